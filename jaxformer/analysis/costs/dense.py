"""Dense attention and what computes like it: all pairs, in the form that the function itself would choose."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxformer.analysis.costs.softmax import running_softmax, whole_matrix
from jaxformer.analysis.costs.work import FLAG_BYTES, INDEX_BYTES, AttentionCost, Sizes, Work
from jaxformer.attention.block_plan import make_plan
from jaxformer.attention.dense import choose_implementation
from jaxformer.attention.terms import Terms


def dense_cost(sizes: Sizes, *, implementation: str | None = None, block_size: int | None = None) -> AttentionCost:
    """T S pairs for each head: 2 T S (H + Hv) operations, of which blocks of a causal attention need about half.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1 and table 1. A decoded token reads all S slots of the cache.
    """
    forward, backward = all_pairs(sizes, sizes.terms(), implementation, block_size)
    return AttentionCost(forward, backward, *cached_steps(sizes), cache_bytes=key_value_cache_bytes(sizes))


def shared_query_key_cost(sizes: Sizes) -> AttentionCost:
    """As dense attention: the products of unit-length keys with queries that share their projection.

    Kitaev et al. 2020, arXiv:2001.04451, section 2. A few operations more for each pair, which compare positions, are
    left out of the estimate.
    """
    return dense_cost(sizes)


def all_pairs(
    sizes: Sizes, terms: Terms, implementation: str | None = None, block_size: int | None = None
) -> tuple[Work, Work]:
    """Forward and backward of dense attention under these terms, in the form that is asked for or suits its size."""
    implementation = _choose(sizes, terms, implementation, block_size)
    if implementation == "xla":
        return whole_matrix(sizes, sizes.queries * sizes.keys)
    if implementation == "cudnn":
        # Its blocks are its own; at the diagonal they compute somewhat more than the visible pairs.
        pairs = sizes.queries * (sizes.queries + 1) // 2 if sizes.causal else sizes.queries * sizes.keys
        return running_softmax(sizes, pairs, min(128, sizes.queries), min(128, sizes.keys))
    plan = make_plan(terms, block_size, 0.0)
    pairs = plan.num_pairs() * plan.query_block * plan.key_block
    return running_softmax(sizes, pairs, plan.query_block, plan.key_block, examples_together(sizes))


def examples_together(sizes: Sizes) -> int:
    """How many examples the loops over blocks have in memory at once: on one CPU device they come one after another."""
    return 1 if jax.default_backend() == "cpu" and jax.device_count() == 1 else sizes.batch


def cached_steps(sizes: Sizes) -> tuple[Work, Work]:
    """Prefill and one decoded token over a cache of S slots, all of which are computed, empty ones too."""
    prefill, decode = (_over_slots(dataclasses.replace(sizes, queries=tokens)) for tokens in (sizes.queries, 1))
    return prefill, decode


def _over_slots(sizes: Sizes) -> Work:
    # Positions are known when it runs, so that all pairs of blocks stand in the plan.
    positions = np.zeros((1, 1), np.int32)
    terms = dataclasses.replace(sizes.terms(), query_positions=positions, key_positions=positions)
    return all_pairs(sizes, terms)[0]


def key_value_cache_bytes(sizes: Sizes) -> int:
    """Keys and values of S tokens, with position, segment and mask of each slot."""
    tokens = sizes.batch * sizes.keys * (2 * INDEX_BYTES + FLAG_BYTES)
    return sizes.key_value_numbers(sizes.keys) * sizes.item + tokens + INDEX_BYTES


def _choose(sizes: Sizes, terms: Terms, implementation: str | None, block_size: int | None) -> str:
    """The function's own choice, made on arrays that exist as shapes only."""
    chosen = []

    def look(query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"]) -> None:
        chosen.append(choose_implementation(implementation, block_size, query, key, value, None, terms, 0.0))

    shapes = (
        (sizes.batch, sizes.queries, sizes.heads, sizes.head_dim),
        (sizes.batch, sizes.keys, sizes.kv_heads, sizes.head_dim),
        (sizes.batch, sizes.keys, sizes.kv_heads, sizes.value_dim),
    )
    jax.eval_shape(look, *(jax.ShapeDtypeStruct(shape, sizes.dtype) for shape in shapes))
    return chosen[0]
