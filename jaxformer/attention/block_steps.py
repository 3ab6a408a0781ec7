"""A running softmax over pairs of blocks, and its gradients: the loops that dense and sparse attention share.

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
from jaxtyping import Array, Float, Int

from jaxformer.attention.block_layout import across_times, cut, group_heads, paste, rows_times
from jaxformer.attention.plain import draw_keep
from jaxformer.functional import compute_dtype

State = TypeVar("State")
# First query and first key of a pair of blocks, and what else its plan knows of it.
Pair: TypeAlias = Int[Array, "_"]


class Running(NamedTuple):
    """Softmax under way: the largest logit so far, the sum of exponentials below it, and the sum of values."""

    highest: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    output: Float[Array, "B K G T Hv"]


class Gradients(NamedTuple):
    """Gradients under way; those of keys and values transposed."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K H S"]
    value: Float[Array, "B K Hv S"]
    bias: list[Array]


class QueryRows(NamedTuple):
    """What the backward pass reads of the queries; `mean` is the sum over keys of weight times its gradient."""

    query: Float[Array, "B K G T H"]
    query_across: Float[Array, "B K H G T"]
    d_output: Float[Array, "B K G T Hv"]
    d_output_across: Float[Array, "B K Hv G T"]
    log_total: Float[Array, "B K G T"]
    mean: Float[Array, "B K G T"]


class KeyColumns(NamedTuple):
    """What the backward pass reads of the keys and values."""

    key: Float[Array, "B K S H"]
    key_across: Float[Array, "B K H S"]
    value_across: Float[Array, "B K Hv S"]


@dataclass(frozen=True, eq=False)
class PairGroup:
    """Pairs of blocks that are treated alike.

    Attributes:
      pairs: first query and first key of each, and further columns for the functions below.
      visible: bool that broadcasts to [B, K, G, q, s]: which entries of a pair count; None for all.
    """

    pairs: Int[np.ndarray, "_ _"]
    visible: Callable[[Pair], Array] | None


@dataclass(frozen=True, eq=False)
class Blocks:
    """What to compute, and how one pair of blocks differs from a plain product.

    Attributes:
      query_block, key_block: tokens in a block.
      groups: all pairs of blocks.
      skips: whether pairs may turn out to be hidden as a whole, which is then found out beforehand.
      added: bias of a pair, broadcasting to [B, N, q, s], or None.
      add_gradient: (sums, pair, gradient of the pair's logits [B, K, G, q, s]) to sums of gradients of the bias.
      dropout_rate, rng: fraction of the weights that is dropped, and one typed key.
    """

    query_block: int
    key_block: int
    groups: tuple[PairGroup, ...]
    skips: bool
    added: Callable[[Pair], Array | None] = lambda pair: None
    add_gradient: Callable[[list[Array], Pair, Array], list[Array]] = lambda sums, pair, d_logits: sums
    dropout_rate: float = 0.0
    rng: Any = None

    def at_query(self, array: Array, axis: int, pair: Pair) -> Array:
        """The part of an array that belongs to the pair's queries, which stand along the axis."""
        return cut(array, axis, pair[0], self.query_block)

    def at_key(self, array: Array, axis: int, pair: Pair) -> Array:
        """The part of an array that belongs to the pair's keys."""
        return cut(array, axis, pair[1], self.key_block)

    def put(self, array: Array, block: Array, axis: int, start: Array) -> Array:
        """The array with such a part replaced."""
        return paste(array, block, axis, start)


@dataclass(frozen=True, eq=False)
class Runs(Blocks):
    """Blocks of which a run of neighbours is computed at once, as if they were further heads.

    Arrays stay as they come, tokens before heads: [B, T, K, G, H] and [B, S, K, H], also those of sums and gradients.
    What `Blocks` cuts from [B, K, G, T, H] along an axis is here [B, run K, G, block, H].

    Attributes:
      run: pairs of blocks in a run.
    """

    run: int = 1

    def at_query(self, array: Array, axis: int, pair: Pair) -> Array:
        """The part of an array that belongs to the run's queries."""
        return self._by_block(cut(array, 1, pair[0], self.run * self.query_block), axis)

    def at_key(self, array: Array, axis: int, pair: Pair) -> Array:
        """The part of an array that belongs to the run's keys."""
        return self._by_block(cut(array, 1, pair[1], self.run * self.key_block), axis)

    def put(self, array: Array, block: Array, axis: int, start: Array) -> Array:
        """The array with such a part replaced."""
        parts = block.reshape(len(block), self.run, -1, *block.shape[2:])
        parts = parts.transpose(np.argsort(_axes_by_block(parts.ndim, axis)))
        return paste(array, parts.reshape(len(block), -1, *parts.shape[3:]), 1, start)

    def _by_block(self, part: Array, axis: int) -> Array:
        parts = part.reshape(len(part), self.run, -1, *part.shape[2:])
        parts = parts.transpose(_axes_by_block(parts.ndim, axis))
        return parts.reshape(len(part), -1, *parts.shape[3:])


def _axes_by_block(ndim: int, axis: int) -> tuple[int, ...]:
    """From [B, run, tokens, K, ..] to [B, run, K, ..] with tokens at an axis that does not count the run."""
    rest = list(range(4, ndim))
    if axis == 4:  # Rows that are read by columns: [B, K, H, G, T].
        rest.reverse()
    rest.insert(axis - 2, 2)
    return (0, 1, 3, *rest)


def accumulator(query: Array, value: Array) -> jnp.dtype:
    """The dtype of logits and sums."""
    return max(compute_dtype(query.dtype), compute_dtype(value.dtype), key=lambda dtype: dtype.itemsize)


def start_running(shape: tuple[int, ...], value_dim: int, dtype: jnp.dtype) -> Running:
    """Nothing seen yet, by queries of `shape` [B, K, G, T].

    Starting at the lowest finite number keeps -inf - (-inf) = NaN out of a row that sees nothing.
    """
    return Running(
        jnp.full(shape, jnp.finfo(dtype).min, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, value_dim), dtype),
    )


def add_softmax(
    blocks: Blocks,
    rows: Float[Array, "B _ _ _ H"],
    keys: Float[Array, "B _ _ _"],
    values: Float[Array, "B _ _ Hv"],
    running: Running,
) -> Running:
    """The running softmax with all pairs of blocks added."""
    dtype = running.output.dtype

    def step(visible_in: Callable | None, running: Running, pair: Pair) -> tuple[Running, None]:
        visible = None if visible_in is None else visible_in(pair)

        def add(old: Running) -> Running:
            logits = _logits(blocks, rows, keys, pair, visible, dtype)
            highest = jnp.maximum(old.highest, logits.max(-1))
            weights = jnp.exp(logits - highest[..., None])
            shrink = jnp.exp(old.highest - highest)
            total = old.total * shrink + weights.sum(-1)
            if blocks.dropout_rate:
                weights = _drop(blocks, weights, pair)
            block = rows_times(weights.astype(values.dtype), blocks.at_key(values, 2, pair), dtype)
            return Running(highest, total, old.output * shrink[..., None] + block)

        new = _unless_hidden(blocks, visible, add, Running(*(blocks.at_query(part, 3, pair) for part in running)))
        return Running(*(blocks.put(part, block, 3, pair[0]) for part, block in zip(running, new))), None

    return _over_pairs(blocks, step, running)


def finish_softmax(running: Running) -> tuple[Float[Array, "B _ _ _ Hv"], Float[Array, "B _ _ _"]]:
    """Outputs and log-normalisers, both 0 where nothing was seen."""
    dtype = running.total.dtype
    total = jnp.where(running.total == 0, jnp.ones((), dtype), running.total)
    log_total = jnp.where(running.total == 0, jnp.zeros((), dtype), running.highest + jnp.log(total))
    return running.output / total[..., None], log_total


def start_gradients(rows: QueryRows, columns: KeyColumns, bias: list[Array], dtype: jnp.dtype) -> Gradients:
    """Zeros, beside the sums of the bias."""
    zeros = functools.partial(jnp.zeros, dtype=dtype)
    return Gradients(zeros(rows.query.shape), zeros(columns.key_across.shape), zeros(columns.value_across.shape), bias)


def add_gradients(blocks: Blocks, rows: QueryRows, columns: KeyColumns, gradients: Gradients) -> Gradients:
    """The gradients with those of all pairs of blocks added, whose weights are recomputed from the log-normalisers."""
    dtype = gradients.query.dtype

    def step(visible_in: Callable | None, gradients: Gradients, pair: Pair) -> tuple[Gradients, None]:
        at_query = functools.partial(blocks.at_query, pair=pair)
        at_key = functools.partial(blocks.at_key, pair=pair)
        visible = None if visible_in is None else visible_in(pair)

        def add(old: Gradients) -> Gradients:
            logits = _logits(blocks, rows.query, columns.key_across, pair, visible, dtype)
            weights = jnp.exp(logits - at_query(rows.log_total, 3)[..., None])
            d_weights = rows_times(at_query(rows.d_output, 3), at_key(columns.value_across, 3), dtype)
            used = weights
            if blocks.dropout_rate:
                used, d_weights = (_drop(blocks, array, pair) for array in (weights, d_weights))
            d_logits = weights * (d_weights - at_query(rows.mean, 3)[..., None])
            if visible is not None:  # Hidden content may be so large that its gradient is 0 * inf.
                d_logits = jnp.where(visible, d_logits, jnp.zeros((), dtype))
            d_bias = blocks.add_gradient(old.bias, pair, d_logits)
            d_logits = d_logits.astype(rows.query.dtype)
            return Gradients(
                old.query + rows_times(d_logits, at_key(columns.key, 2), dtype),
                old.key + across_times(at_query(rows.query_across, 4), d_logits, dtype),
                old.value
                + across_times(at_query(rows.d_output_across, 4), used.astype(columns.value_across.dtype), dtype),
                d_bias,
            )

        old = Gradients(
            at_query(gradients.query, 3), at_key(gradients.key, 3), at_key(gradients.value, 3), gradients.bias
        )
        new = _unless_hidden(blocks, visible, add, old)
        return Gradients(
            blocks.put(gradients.query, new.query, 3, pair[0]),
            blocks.put(gradients.key, new.key, 3, pair[1]),
            blocks.put(gradients.value, new.value, 3, pair[1]),
            new.bias,
        ), None

    return _over_pairs(blocks, step, gradients)


def over_examples(attend: Callable, arrays: Any, batch_size: int, rng: Array | None) -> Float[Array, "B T N Hv"]:
    """attend(arrays, rng) by examples, one after the other: on a CPU the blocks of one stay in its caches.

    Elsewhere, and on several devices, all examples at once. Arrays whose first axis is not the batch are shared.
    """
    if batch_size == 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return attend(arrays, rng)
    leaves, tree = jax.tree.flatten(arrays)
    split = [jnp.ndim(leaf) > 0 and leaf.shape[0] == batch_size for leaf in leaves]

    def one(row: list[Array], index: Array) -> Array:
        parts = iter(row)
        example = jax.tree.unflatten(
            tree, [next(parts)[None] if is_split else leaf for leaf, is_split in zip(leaves, split)]
        )
        return attend(example, None if rng is None else jax.random.fold_in(rng, index))[0]

    rows = [leaf for leaf, is_split in zip(leaves, split) if is_split]
    return lax.map(lambda xs: one(*xs), (rows, jnp.arange(batch_size, dtype=jnp.uint32)))


def _over_pairs(blocks: Blocks, step: Callable, state: State) -> State:
    """Runs the step over all pairs of blocks; only those with hidden entries pay for masks."""
    for group in blocks.groups:
        run = functools.partial(step, group.visible)
        if len(group.pairs) == 1:
            state, _ = run(state, jnp.asarray(group.pairs[0]))
        elif len(group.pairs):
            state, _ = lax.scan(run, state, jnp.asarray(group.pairs))
    return state


def _unless_hidden(blocks: Blocks, visible: Array | None, add: Callable[[State], State], state: State) -> State:
    """The state with a block added, untouched without any work where masks turn out to hide the whole block."""
    if visible is None or not blocks.skips:
        return add(state)
    return lax.cond(visible.any(), add, lambda state: state, state)


def _logits(
    blocks: Blocks,
    rows: Float[Array, "B _ _ _ H"],
    keys: Float[Array, "B _ _ _"],
    pair: Pair,
    visible: Array | None,
    dtype: jnp.dtype,
) -> Float[Array, "B _ G q s"]:
    """Logits of one pair of blocks, -inf where hidden."""
    logits = rows_times(blocks.at_query(rows, 3, pair), blocks.at_key(keys, 3, pair), dtype)
    added = blocks.added(pair)
    if added is not None:
        logits = logits + group_heads(added, *rows.shape[1:3]).astype(dtype)
    return logits if visible is None else jnp.where(visible, logits, jnp.full((), -jnp.inf, dtype))


def _drop(blocks: Blocks, weights: Array, pair: Pair) -> Array:
    """Dropout with the block's own random numbers, the same in the backward pass."""
    own = jax.random.fold_in(jax.random.fold_in(blocks.rng, pair[0]), pair[1])
    keep, factor = draw_keep(own, weights.shape, blocks.dropout_rate)
    return jnp.where(keep, weights * jnp.asarray(factor, weights.dtype), jnp.zeros((), weights.dtype))
