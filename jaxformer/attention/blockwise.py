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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_bias import add_bias_gradient, bias_gradient_zeros, block_bias, finish_bias_gradient
from jaxformer.attention.plain import draw_keep
from jaxformer.attention.products import batched_matmul
from jaxformer.attention.terms import Bias, Terms
from jaxformer.functional import compute_dtype

# Tokens per block: of 128, 256 and 512 the fastest on a busy CPU, where larger blocks leave the caches, and as fast as
# any on an idle one; accelerators prefer larger products.
BLOCK_SIZE, BLOCK_SIZE_CPU = 512, 256

State = TypeVar("State")
Pairs: TypeAlias = Int[np.ndarray, "_ 4"]


@dataclass(frozen=True)
class Plan:
    """Static choices of one attention.

    Attributes:
      num_queries, num_keys: T and S.
      query_block, key_block: tokens per block, at most T and S.
      causal_start: position of the first query, keys counting from 0, where the causal rule is known beforehand.
      mask_all: whether other terms may hide a key in any block.
      dropout_rate: fraction of the weights that is dropped.
    """

    num_queries: int
    num_keys: int
    query_block: int
    key_block: int
    causal_start: int | None
    mask_all: bool
    dropout_rate: float

    def pairs(self) -> tuple[Pairs, Pairs]:
        """The pairs of blocks without and with hidden entries: rows (query start, key start, query skip, key skip).

        A last block that is not full is moved back to end with the sequence, and skips the entries that it shares with
        the block before it. Pairs in which no query sees a key are left out.
        """
        query_owned = np.arange(0, self.num_queries, self.query_block)
        key_owned = np.arange(0, self.num_keys, self.key_block)
        query_owned, key_owned = (grid.ravel() for grid in np.meshgrid(query_owned, key_owned, indexing="ij"))
        query_start = np.minimum(query_owned, self.num_queries - self.query_block)
        key_start = np.minimum(key_owned, self.num_keys - self.key_block)
        skips = query_owned - query_start, key_owned - key_start
        pairs = np.stack([query_start, key_start, *skips], axis=1).astype(np.int32)
        masked = (skips[0] > 0) | (skips[1] > 0) | self.mask_all
        if self.causal_start is None:
            return pairs[~masked], pairs[masked]
        first, last = self.causal_start + query_start, self.causal_start + query_start + self.query_block - 1
        masked |= key_start + self.key_block - 1 > first
        seen = key_owned <= last
        return pairs[seen & ~masked], pairs[seen & masked]


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


def make_plan(terms: Terms, block_size: int | None, dropout_rate: float) -> Plan:
    """Block sizes that divide the lengths as evenly as multiples of 8 can, and what is known about hidden entries."""
    static = terms.causal and terms.has_default_positions
    restrictions = (terms.key_mask, terms.query_segments, terms.mask)
    return Plan(
        num_queries=terms.num_queries,
        num_keys=terms.num_keys,
        query_block=_block(terms.num_queries, block_size),
        key_block=_block(terms.num_keys, block_size),
        causal_start=terms.num_keys - terms.num_queries if static else None,
        mask_all=any(term is not None for term in restrictions) or (terms.causal and not static),
        dropout_rate=dropout_rate,
    )


def _block(length: int, block_size: int | None) -> int:
    if block_size is not None:
        return min(length, block_size)
    blocks = -(-length // (BLOCK_SIZE_CPU if jax.default_backend() == "cpu" else BLOCK_SIZE))
    return min(length, 8 * -(-length // (8 * blocks)))


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
    rows = _by_head(query, key.shape[2])
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
            block = _rows_times(weights.astype(value.dtype), _cut(values, 2, key_start, plan.key_block), dtype)
            return Running(highest, total, old.output * shrink[..., None] + block)

        new = _unless_hidden(
            plan, visible, add, Running(*(_cut(part, 3, query_start, plan.query_block) for part in running))
        )
        return Running(*(_paste(part, block, 3, query_start) for part, block in zip(running, new))), None

    # Starting at the lowest finite number keeps -inf - (-inf) = NaN out of a row that sees nothing.
    shape = rows.shape[:-1]
    start = Running(
        jnp.full(shape, jnp.finfo(dtype).min, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, value.shape[-1]), dtype),
    )
    running = _over_pairs(plan, step, start)
    total = jnp.where(running.total == 0, jnp.ones((), dtype), running.total)
    output = _by_token((running.output / total[..., None]).astype(value.dtype))
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
    rows, d_rows = _by_head(query, num_kv_heads), _by_head(d_output, num_kv_heads)
    rows_across, d_rows_across = (array.transpose(0, 1, 4, 2, 3) for array in (rows, d_rows))
    keys, keys_across = key.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1)
    values_across = value.transpose(0, 2, 3, 1)
    # Sum over keys of weight times its gradient, known beforehand from the output.
    mean = (_by_head(output, num_kv_heads).astype(dtype) * d_rows.astype(dtype)).sum(-1)

    def step(masked: bool, gradients: Gradients, pair: Int[Array, "4"]) -> tuple[Gradients, None]:
        query_start, key_start = pair[0], pair[1]
        at_query = functools.partial(_cut, start=query_start, size=plan.query_block)
        at_key = functools.partial(_cut, start=key_start, size=plan.key_block)
        visible = _visible(plan, rows.shape, terms, pair) if masked else None

        def add(old: Gradients) -> Gradients:
            logits = _logits(plan, rows, keys_across, bias, terms, pair, visible, dtype)
            weights = jnp.exp(logits - at_query(log_total, 3)[..., None])
            d_weights = _rows_times(at_query(d_rows, 3), at_key(values_across, 3), dtype)
            used = weights
            if plan.dropout_rate:
                used, d_weights = (_drop(plan, array, rng, pair) for array in (weights, d_weights))
            d_logits = weights * (d_weights - at_query(mean, 3)[..., None])
            if visible is not None:  # Hidden content may be so large that its gradient is 0 * inf.
                d_logits = jnp.where(visible, d_logits, jnp.zeros((), dtype))
            d_bias = add_bias_gradient(old.bias, bias, terms, pair, plan.query_block, plan.key_block, d_logits)
            d_logits = d_logits.astype(query.dtype)
            return Gradients(
                old.query + _rows_times(d_logits, at_key(keys, 2), dtype),
                old.key + _across_times(at_query(rows_across, 4), d_logits, dtype),
                old.value + _across_times(at_query(d_rows_across, 4), used.astype(value.dtype), dtype),
                d_bias,
            )

        old = Gradients(
            at_query(gradients.query, 3), at_key(gradients.key, 3), at_key(gradients.value, 3), gradients.bias
        )
        new = _unless_hidden(plan, visible, add, old)
        return Gradients(
            _paste(gradients.query, new.query, 3, query_start),
            _paste(gradients.key, new.key, 3, key_start),
            _paste(gradients.value, new.value, 3, key_start),
            new.bias,
        ), None

    zeros = functools.partial(jnp.zeros, dtype=dtype)
    start = Gradients(
        zeros(rows.shape), zeros(keys_across.shape), zeros(values_across.shape), bias_gradient_zeros(bias)
    )
    gradients = _over_pairs(plan, step, start)
    return (
        _by_token(gradients.query).astype(query.dtype),
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
    owned = _from(query_skip, plan.query_block)[:, None] & _from(key_skip, plan.key_block)[None, :]
    visible = terms.block(query_start, plan.query_block, key_start, plan.key_block).visible()
    owned = owned[None, None, None]
    return owned if visible is None else owned & _group(visible, *shape[1:3])


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
    queries, block_keys = _cut(rows, 3, pair[0], plan.query_block), _cut(keys, 3, pair[1], plan.key_block)
    logits = _rows_times(queries, block_keys, dtype)
    block = terms.block(pair[0], plan.query_block, pair[1], plan.key_block)
    added = block_bias(bias, block, pair, plan.query_block, plan.key_block)
    if added is not None:
        logits = logits + _group(added, *rows.shape[1:3]).astype(dtype)
    return logits if visible is None else jnp.where(visible, logits, jnp.full((), -jnp.inf, dtype))


def _drop(plan: Plan, weights: Array, rng: Any, pair: Int[Array, "4"]) -> Array:
    """Dropout with the block's own random numbers, the same in the backward pass."""
    keep, factor = draw_keep(
        jax.random.fold_in(jax.random.fold_in(rng, pair[0]), pair[1]), weights.shape, plan.dropout_rate
    )
    return jnp.where(keep, weights * jnp.asarray(factor, weights.dtype), jnp.zeros((), weights.dtype))


def _accumulator(query: Array, value: Array) -> jnp.dtype:
    return max(compute_dtype(query.dtype), compute_dtype(value.dtype), key=lambda dtype: dtype.itemsize)


def _by_head(array: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K G T H"]:
    batch_size, length, _, head_dim = array.shape
    return array.reshape(batch_size, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def _by_token(array: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    batch_size, _, _, length, head_dim = array.shape
    return array.transpose(0, 3, 1, 2, 4).reshape(batch_size, length, -1, head_dim)


def _group(pairs: Array, num_kv_heads: int, group: int) -> Array:
    """[B, N, T, S] as [B, K, G, T, S]; an axis of one head, shared by all, stays one."""
    batch_size, num_heads, queries, keys = pairs.shape
    heads = (1, 1) if num_heads == 1 else (num_kv_heads, group)
    return pairs.reshape(batch_size, *heads, queries, keys)


def _from(start: Array, size: int) -> Bool[Array, "size"]:
    return jnp.arange(size, dtype=jnp.int32) >= start


def _cut(array: Array, axis: int, start: Array, size: int) -> Array:
    return array if array.shape[axis] == size else lax.dynamic_slice_in_dim(array, start, size, axis)


def _paste(array: Array, block: Array, axis: int, start: Array) -> Array:
    return block if array.shape == block.shape else lax.dynamic_update_slice_in_dim(array, block, start, axis)


def _rows_times(rows: Float[Array, "B K G q m"], matrix: Float[Array, "B K m s"], dtype: jnp.dtype) -> Array:
    """Product of each row of each group with its key head's matrix: [B, K, G, q, s]."""
    batch_size, num_kv_heads, group, queries, inner = rows.shape
    flat = rows.reshape(batch_size, num_kv_heads, group * queries, inner)
    return batched_matmul(flat, matrix, dtype).reshape(batch_size, num_kv_heads, group, queries, -1)


def _across_times(across: Float[Array, "B K m G q"], block: Float[Array, "B K G q s"], dtype: jnp.dtype) -> Array:
    """Sum over groups and rows: [B, K, m, s]."""
    batch_size, num_kv_heads, inner, _, _ = across.shape
    flat = across.reshape(batch_size, num_kv_heads, inner, -1)
    rows = block.reshape(batch_size, num_kv_heads, flat.shape[-1], -1)
    return batched_matmul(flat, rows, dtype)
