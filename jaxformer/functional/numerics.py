"""The precision in which formulas are computed, whatever the precision of their inputs."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32 for every floating type up to 32 bits, float64 for float64 (so that gradients can be checked in it).

    Unlike `jnp.promote_types` this also works where implicit promotion is forbidden.

    Args:
      dtype: floating dtype of the input.

    Returns:
      The dtype in which logits, normalisers, statistics and angles of that input are computed.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
