"""Exact attention by blocks with a running softmax: memory O(length), forward and backward.

Milakov, Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867; Rabe, Staats 2021,
"Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; the backward pass recomputes the weights from the saved
log-normaliser as in Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.attention.block_bias import add_bias_gradient, bias_gradient_zeros, block_bias, finish_bias_gradient
from jaxformer.attention.block_cuts import Blocks, Pair, PairGroup
from jaxformer.attention.block_layout import by_head, by_token, counts_from, group_heads, heads_for_tokens
from jaxformer.attention.block_plan import Plan, make_plan
from jaxformer.attention.block_steps import (
    KeyRows,
    QueryRows,
    accumulator,
    add_gradients,
    add_softmax,
    finish_softmax,
    over_examples,
    start_gradients,
    start_running,
)
from jaxformer.attention.terms import Bias, Terms


class Residuals(NamedTuple):
    """What the backward pass needs: inputs, output, and the log-normaliser of each row (0 where nothing is seen)."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K Hv"]
    bias: Bias
    terms: Terms
    rng: Array | None
    output: Float[Array, "B T N Hv"]
    log_total: Float[Array, "B K G T"]


def blockwise_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    dropout_rate: float,
    rng: Array | None,
    block_size: int | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ + bias) value by blocks, the query being scaled already."""
    if 0 in (query.size, key.size, value.size):
        return jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
    plan = make_plan(terms, block_size, dropout_rate)

    def attend(arrays: tuple, rng: Array | None) -> Float[Array, "B T N Hv"]:
        query, key, value, array_bias, terms = arrays
        return attend_blocks(plan, query, key, value, bias if callable(bias) else array_bias, terms, rng)

    arrays = (query, key, value, None if callable(bias) else bias, terms)
    return over_examples(attend, arrays, len(query), rng if dropout_rate else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_blocks(
    plan: Plan,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ + bias) value by blocks, the query being scaled already."""
    return _forward(plan, query, key, value, bias, terms, rng)[0]


def _forward(
    plan: Plan,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    rng: Array | None,
) -> tuple[Float[Array, "B T N Hv"], Residuals]:
    rows = by_head(query, key.shape[2])
    blocks = _blocks(plan, rows.shape, bias, terms, rng)
    running = start_running(rows.shape[:-1], value.shape[3], accumulator(query, value))
    running = add_softmax(blocks, rows, KeyRows(heads_for_tokens(key), heads_for_tokens(value)), running)
    output, log_total = finish_softmax(running)
    output = by_token(output.astype(value.dtype))
    return output, Residuals(query, key, value, bias, terms, rng, output, log_total)


def _backward(plan: Plan, residuals: Residuals, d_output: Float[Array, "B T N Hv"]) -> tuple:
    query, key, value, bias, terms, rng, output, log_total = residuals
    dtype = accumulator(query, value)
    queries, d_rows = by_head(query, key.shape[2]), by_head(d_output, key.shape[2])
    rows = QueryRows(
        queries,
        d_rows,
        log_total,
        (by_head(output, key.shape[2]).astype(dtype) * d_rows.astype(dtype)).sum(-1),
    )
    keys = KeyRows(heads_for_tokens(key), heads_for_tokens(value))
    start = start_gradients(rows.query.shape, keys.key.shape, keys.value.shape, bias_gradient_zeros(bias), dtype)
    gradients = add_gradients(_blocks(plan, queries.shape, bias, terms, rng), rows, keys, start)
    return (
        by_token(gradients.query).astype(query.dtype),
        heads_for_tokens(gradients.key).astype(key.dtype),
        heads_for_tokens(gradients.value).astype(value.dtype),
        finish_bias_gradient(gradients.bias, bias),
        None,
        None,
    )


attend_blocks.defvjp(_forward, _backward)


def _blocks(plan: Plan, shape: tuple[int, ...], bias: Bias, terms: Terms, rng: Array | None) -> Blocks:
    """The plan's pairs with masks, bias and dropout, for query rows of `shape` [B, K, G, T, H]."""
    sizes = plan.query_block, plan.key_block
    full, masked = plan.pairs()

    def added(pair: Pair) -> Float[Array, "#B #N #q #s"] | None:
        return block_bias(bias, terms.block(pair[0], sizes[0], pair[1], sizes[1]), pair, *sizes)

    return Blocks(
        *sizes,
        groups=(
            PairGroup(full, None),
            PairGroup(masked, lambda pair: _visible(plan, shape, terms, pair)),
        ),
        skips=plan.mask_all,
        added=added,
        add_gradient=lambda sums, pair, d_logits: add_bias_gradient(sums, bias, terms, pair, *sizes, d_logits),
        dropout_rate=plan.dropout_rate,
        rng=rng,
    )


def _visible(plan: Plan, shape: tuple[int, ...], terms: Terms, pair: Pair) -> Bool[Array, "..."]:
    """Which entries of a pair of blocks count: visible ones that no other pair has counted."""
    query_start, key_start, query_skip, key_skip = pair
    owned = counts_from(query_skip, plan.query_block)[:, None] & counts_from(key_skip, plan.key_block)[None, :]
    visible = terms.block(query_start, plan.query_block, key_start, plan.key_block).visible()
    owned = owned[None, None, None]
    return owned if visible is None else owned & group_heads(visible, *shape[1:3])
