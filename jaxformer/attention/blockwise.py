"""Exact attention by blocks with a running softmax: memory O(length), forward and backward.

Milakov, Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867; Rabe, Staats 2021,
"Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; the backward pass recomputes the weights from the saved
log-normaliser as in Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B.

Layout: heads stand before tokens, [B, K, G, T, H] for the G query heads of each of K key heads, so that every product
is one batched matrix product. Products over the rows of both operands are three times slower on CPUs, so the backward
pass holds what it needs transposed once: O(length).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_bias import add_bias_gradient, bias_gradient_zeros, block_bias, finish_bias_gradient
from jaxformer.attention.block_layout import (
    across_times,
    by_head,
    by_token,
    counts_from,
    cut,
    group_heads,
    paste,
    rows_times,
)
from jaxformer.attention.block_plan import Plan, make_plan
from jaxformer.attention.plain import draw_keep
from jaxformer.attention.terms import Bias, Terms
from jaxformer.functional import compute_dtype

State = TypeVar("State")


class Running(NamedTuple):
    """Softmax under way: the largest logit so far, the sum of exponentials below it, and the sum of values."""

    highest: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    output: Float[Array, "B K G T Hv"]


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
    rng = rng if dropout_rate else None
    if len(query) == 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return attend_blocks(plan, query, key, value, bias, terms, rng)
    return _over_batch(plan, query, key, value, bias, terms, rng)


def _over_batch(
    plan: Plan,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    """One example after the other: on a CPU the blocks of one stay in its caches."""
    batch_size = len(query)
    leaves, tree = jax.tree.flatten((query, key, value, None if callable(bias) else bias, terms))
    split = [jnp.ndim(leaf) > 0 and leaf.shape[0] == batch_size for leaf in leaves]

    def one(row: list[Array], index: Array) -> Array:
        parts = iter(row)
        arrays = jax.tree.unflatten(
            tree, [next(parts)[None] if is_split else leaf for leaf, is_split in zip(leaves, split)]
        )
        query, key, value, row_bias, terms = arrays
        row_rng = None if rng is None else jax.random.fold_in(rng, index)
        return attend_blocks(plan, query, key, value, bias if callable(bias) else row_bias, terms, row_rng)[0]

    rows = [leaf for leaf, is_split in zip(leaves, split) if is_split]
    return lax.map(lambda xs: one(*xs), (rows, jnp.arange(batch_size, dtype=jnp.uint32)))


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
    keys, values = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    dtype = _accumulator(query, value)

    def step(masked: bool, running: Running, pair: Int[Array, "4"]) -> tuple[Running, None]:
        query_start, key_start = pair[0], pair[1]
        visible = _visible(plan, rows.shape, terms, pair) if masked else None

        def add(old: Running) -> Running:
            logits = _logits(plan, rows, keys, bias, terms, pair, visible, dtype)
            highest = jnp.maximum(old.highest, logits.max(-1))
            weights = jnp.exp(logits - highest[..., None])
            shrink = jnp.exp(old.highest - highest)
            total = old.total * shrink + weights.sum(-1)
            if plan.dropout_rate:
                weights = _drop(plan, weights, rng, pair)
            block = rows_times(weights.astype(value.dtype), cut(values, 2, key_start, plan.key_block), dtype)
            return Running(highest, total, old.output * shrink[..., None] + block)

        new = _unless_hidden(
            plan, visible, add, Running(*(cut(part, 3, query_start, plan.query_block) for part in running))
        )
        return Running(*(paste(part, block, 3, query_start) for part, block in zip(running, new))), None

    # Starting at the lowest finite number keeps -inf - (-inf) = NaN out of a row that sees nothing.
    shape = rows.shape[:-1]
    start = Running(
        jnp.full(shape, jnp.finfo(dtype).min, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, value.shape[-1]), dtype),
    )
    running = _over_pairs(plan, step, start)
    total = jnp.where(running.total == 0, jnp.ones((), dtype), running.total)
    output = by_token((running.output / total[..., None]).astype(value.dtype))
    log_total = jnp.where(running.total == 0, jnp.zeros((), dtype), running.highest + jnp.log(total))
    return output, Residuals(query, key, value, bias, terms, rng, output, log_total)


class Gradients(NamedTuple):
    """Gradients under way; those of keys and values transposed."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K H S"]
    value: Float[Array, "B K Hv S"]
    bias: list[Array]


def _backward(plan: Plan, residuals: Residuals, d_output: Float[Array, "B T N Hv"]) -> tuple:
    query, key, value, bias, terms, rng, output, log_total = residuals
    dtype = _accumulator(query, value)
    num_kv_heads = key.shape[2]
    rows, d_rows = by_head(query, num_kv_heads), by_head(d_output, num_kv_heads)
    rows_across, d_rows_across = (array.transpose(0, 1, 4, 2, 3) for array in (rows, d_rows))
    keys, keys_across = key.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1)
    values_across = value.transpose(0, 2, 3, 1)
    # Sum over keys of weight times its gradient, known beforehand from the output.
    mean = (by_head(output, num_kv_heads).astype(dtype) * d_rows.astype(dtype)).sum(-1)

    def step(masked: bool, gradients: Gradients, pair: Int[Array, "4"]) -> tuple[Gradients, None]:
        query_start, key_start = pair[0], pair[1]
        at_query = functools.partial(cut, start=query_start, size=plan.query_block)
        at_key = functools.partial(cut, start=key_start, size=plan.key_block)
        visible = _visible(plan, rows.shape, terms, pair) if masked else None

        def add(old: Gradients) -> Gradients:
            logits = _logits(plan, rows, keys_across, bias, terms, pair, visible, dtype)
            weights = jnp.exp(logits - at_query(log_total, 3)[..., None])
            d_weights = rows_times(at_query(d_rows, 3), at_key(values_across, 3), dtype)
            used = weights
            if plan.dropout_rate:
                used, d_weights = (_drop(plan, array, rng, pair) for array in (weights, d_weights))
            d_logits = weights * (d_weights - at_query(mean, 3)[..., None])
            if visible is not None:  # Hidden content may be so large that its gradient is 0 * inf.
                d_logits = jnp.where(visible, d_logits, jnp.zeros((), dtype))
            d_bias = add_bias_gradient(old.bias, bias, terms, pair, plan.query_block, plan.key_block, d_logits)
            d_logits = d_logits.astype(query.dtype)
            return Gradients(
                old.query + rows_times(d_logits, at_key(keys, 2), dtype),
                old.key + across_times(at_query(rows_across, 4), d_logits, dtype),
                old.value + across_times(at_query(d_rows_across, 4), used.astype(value.dtype), dtype),
                d_bias,
            )

        old = Gradients(
            at_query(gradients.query, 3), at_key(gradients.key, 3), at_key(gradients.value, 3), gradients.bias
        )
        new = _unless_hidden(plan, visible, add, old)
        return Gradients(
            paste(gradients.query, new.query, 3, query_start),
            paste(gradients.key, new.key, 3, key_start),
            paste(gradients.value, new.value, 3, key_start),
            new.bias,
        ), None

    zeros = functools.partial(jnp.zeros, dtype=dtype)
    start = Gradients(
        zeros(rows.shape), zeros(keys_across.shape), zeros(values_across.shape), bias_gradient_zeros(bias)
    )
    gradients = _over_pairs(plan, step, start)
    return (
        by_token(gradients.query).astype(query.dtype),
        gradients.key.transpose(0, 3, 1, 2).astype(key.dtype),
        gradients.value.transpose(0, 3, 1, 2).astype(value.dtype),
        finish_bias_gradient(gradients.bias, bias),
        None,
        None,
    )


attend_blocks.defvjp(_forward, _backward)


def _over_pairs(plan: Plan, step: Callable, state: State) -> State:
    """Runs the step over all pairs of blocks; only those with hidden entries pay for masks."""
    for masked, pairs in zip((False, True), plan.pairs()):
        if len(pairs) == 1:
            state, _ = step(masked, state, jnp.asarray(pairs[0]))
        elif len(pairs):
            state, _ = lax.scan(functools.partial(step, masked), state, jnp.asarray(pairs))
    return state


def _unless_hidden(plan: Plan, visible: Array | None, add: Callable[[State], State], state: State) -> State:
    """The state with a block added, untouched without any work where masks turn out to hide the whole block."""
    if visible is None or not plan.mask_all:
        return add(state)
    return lax.cond(visible.any(), add, lambda state: state, state)


def _visible(plan: Plan, shape: tuple[int, ...], terms: Terms, pair: Int[Array, "4"]) -> Bool[Array, "..."]:
    """Which entries of a pair of blocks count: visible ones that no other pair has counted."""
    query_start, key_start, query_skip, key_skip = pair
    owned = counts_from(query_skip, plan.query_block)[:, None] & counts_from(key_skip, plan.key_block)[None, :]
    visible = terms.block(query_start, plan.query_block, key_start, plan.key_block).visible()
    owned = owned[None, None, None]
    return owned if visible is None else owned & group_heads(visible, *shape[1:3])


def _logits(
    plan: Plan,
    rows: Float[Array, "B K G T H"],
    keys: Float[Array, "B K H S"],
    bias: Bias,
    terms: Terms,
    pair: Int[Array, "4"],
    visible: Bool[Array, "..."] | None,
    dtype: jnp.dtype,
) -> Float[Array, "B K G q s"]:
    """Logits of one pair of blocks, -inf where hidden."""
    queries, block_keys = cut(rows, 3, pair[0], plan.query_block), cut(keys, 3, pair[1], plan.key_block)
    logits = rows_times(queries, block_keys, dtype)
    block = terms.block(pair[0], plan.query_block, pair[1], plan.key_block)
    added = block_bias(bias, block, pair, plan.query_block, plan.key_block)
    if added is not None:
        logits = logits + group_heads(added, *rows.shape[1:3]).astype(dtype)
    return logits if visible is None else jnp.where(visible, logits, jnp.full((), -jnp.inf, dtype))


def _drop(plan: Plan, weights: Array, rng: Any, pair: Int[Array, "4"]) -> Array:
    """Dropout with the block's own random numbers, the same in the backward pass."""
    keep, factor = draw_keep(
        jax.random.fold_in(jax.random.fold_in(rng, pair[0]), pair[1]), weights.shape, plan.dropout_rate
    )
    return jnp.where(keep, weights * jnp.asarray(factor, weights.dtype), jnp.zeros((), weights.dtype))


def _accumulator(query: Array, value: Array) -> jnp.dtype:
    return max(compute_dtype(query.dtype), compute_dtype(value.dtype), key=lambda dtype: dtype.itemsize)
