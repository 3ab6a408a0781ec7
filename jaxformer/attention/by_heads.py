"""Mapping a function of one head of one example over all: together, or some heads at a time where that saves memory."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

PAIRS_AT_ONCE = 2**24
"""Logits that are in memory together: 64 MiB in float32."""


def map_heads(function: Callable[..., Any], arrays: Any, batch_size: int, num_heads: int, pairs: int) -> Any:
    """`function` of a tuple of arrays without batch and heads, over arrays [N, B, ..]; returns [N, B, ..].

    `pairs` is how many pairs of tokens one call has in memory. The batch stays whole, so that it may be sharded.
    """
    over_batch = jax.vmap(lambda arrays: function(*arrays))
    fitting = max(1, PAIRS_AT_ONCE // max(1, batch_size * pairs))
    together = max((size for size in range(1, num_heads + 1) if num_heads % size == 0 and size <= fitting), default=1)
    if together == num_heads:
        return jax.vmap(over_batch)(arrays)
    return lax.map(over_batch, arrays, batch_size=together)
