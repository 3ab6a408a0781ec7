"""A running softmax over pairs of blocks, and its gradients: the loops that dense and sparse attention share.

Layout: heads stand before tokens, [B, K, G, T, H] for the G query heads of each of K key heads, so that every product
is one batched matrix product whose operands are read as they stand: nothing is held transposed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxformer.attention.block_cuts import Blocks, Pair
from jaxformer.attention.block_layout import (
    group_heads,
    keys_by_rows,
    over_keys,
    over_rows,
    rows_by_keys,
    rows_times,
)
from jaxformer.attention.plain import draw_keep
from jaxformer.functional import compute_dtype

State = TypeVar("State")


class Running(NamedTuple):
    """Softmax under way: the largest logit so far, the sum of exponentials below it, and the sum of values."""

    highest: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    output: Float[Array, "B K G T Hv"]


class Gradients(NamedTuple):
    """Gradients under way."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S Hv"]
    bias: list[Array]


class QueryRows(NamedTuple):
    """What the backward pass reads of the queries; `mean` is the sum over keys of weight times its gradient."""

    query: Float[Array, "B K G T H"]
    d_output: Float[Array, "B K G T Hv"]
    log_total: Float[Array, "B K G T"]
    mean: Float[Array, "B K G T"]


class KeyRows(NamedTuple):
    """What is read of the keys and values."""

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S Hv"]


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
    keys: KeyRows,
    running: Running,
) -> Running:
    """The running softmax with all pairs of blocks added."""
    dtype = running.output.dtype

    def step(visible_in: Callable | None, running: Running, pair: Pair) -> tuple[Running, None]:
        visible = None if visible_in is None else visible_in(pair)

        def add(old: Running) -> Running:
            query = blocks.at_query(rows, pair)
            logits = rows_by_keys(query, blocks.at_key(keys.key, pair), dtype)
            logits = _complete(blocks, logits, query.shape, pair, visible)
            highest = jnp.maximum(old.highest, logits.max(-1))
            weights = jnp.exp(logits - highest[..., None])
            total = weights.sum(-1)
            if blocks.dropout_rate:
                weights = _drop(blocks, weights, pair)
            block = rows_times(weights.astype(keys.value.dtype), blocks.at_key(keys.value, pair), dtype)
            if blocks.first_at_query:
                return Running(highest, total, block)
            shrink = jnp.exp(old.highest - highest)
            return Running(highest, old.total * shrink + total, old.output * shrink[..., None] + block)

        if blocks.first_at_query:
            shape = jax.eval_shape(blocks.at_query, running.total, pair).shape
            old = start_running(shape, running.output.shape[-1], dtype)
        else:
            old = Running(*(blocks.at_query(part, pair) for part in running))
        new = _unless_hidden(blocks, visible, add, old)
        return Running(*(blocks.put_query(part, block, pair) for part, block in zip(running, new))), None

    return _over_pairs(blocks, step, running)


def finish_softmax(running: Running) -> tuple[Float[Array, "B _ _ _ Hv"], Float[Array, "B _ _ _"]]:
    """Outputs and log-normalisers, both 0 where nothing was seen."""
    dtype = running.total.dtype
    total = jnp.where(running.total == 0, jnp.ones((), dtype), running.total)
    log_total = jnp.where(running.total == 0, jnp.zeros((), dtype), running.highest + jnp.log(total))
    return running.output / total[..., None], log_total


def start_gradients(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], bias: list[Array], dtype: jnp.dtype
) -> Gradients:
    """Zeros of these shapes, beside the sums of the bias.

    Some of them are -0.0, to which anything may be added as well: of two equal arrays XLA makes one and copies it.
    """
    return Gradients(jnp.full(query, -0.0, dtype), jnp.zeros(key, dtype), jnp.full(value, -0.0, dtype), bias)


def add_gradients(blocks: Blocks, rows: QueryRows, keys: KeyRows, gradients: Gradients) -> Gradients:
    """The gradients with those of all pairs of blocks added, whose weights are recomputed from the log-normalisers."""
    dtype = gradients.query.dtype

    def step(visible_in: Callable | None, gradients: Gradients, pair: Pair) -> tuple[Gradients, None]:
        at_query = functools.partial(blocks.at_query, pair=pair)
        at_key = functools.partial(blocks.at_key, pair=pair)
        visible = None if visible_in is None else visible_in(pair)

        def add(old: Gradients) -> Gradients:
            query, d_output, key, value = (
                at_query(rows.query),
                at_query(rows.d_output),
                at_key(keys.key),
                at_key(keys.value),
            )
            logits = _complete(blocks, keys_by_rows(key, query, dtype), query.shape, pair, visible, _turn)
            weights = jnp.exp(logits - at_query(rows.log_total)[:, :, None])
            d_weights = keys_by_rows(value, d_output, dtype)
            used = weights
            if blocks.dropout_rate:
                used, d_weights = (_turn(_drop(blocks, _turn_back(array), pair)) for array in (weights, d_weights))
            d_logits = weights * (d_weights - at_query(rows.mean)[:, :, None])
            if visible is not None:  # Hidden content may be so large that its gradient is 0 * inf.
                d_logits = jnp.where(_turn(visible), d_logits, jnp.zeros((), dtype))
            d_bias = blocks.add_gradient(old.bias, pair, _turn_back(d_logits))
            d_logits = d_logits.astype(query.dtype)
            return Gradients(
                old.query + over_keys(d_logits, key, dtype),
                old.key + over_rows(d_logits, query, dtype),
                old.value + over_rows(used.astype(d_output.dtype), d_output, dtype),
                d_bias,
            )

        old = Gradients(
            _so_far(at_query, gradients.query, blocks.first_at_query),
            _so_far(at_key, gradients.key, blocks.first_at_key),
            _so_far(at_key, gradients.value, blocks.first_at_key),
            gradients.bias,
        )
        new = _unless_hidden(blocks, visible, add, old)
        return Gradients(
            blocks.put_query(gradients.query, new.query, pair),
            blocks.put_key(gradients.key, new.key, pair),
            blocks.put_key(gradients.value, new.value, pair),
            new.bias,
        ), None

    return _over_pairs(blocks, step, gradients)


def _so_far(cut: Callable[[Array], Array], sums: Array, is_first: bool) -> Array:
    """The pair's part of sums, without reading them where it is the first to add to them."""
    if not is_first:
        return cut(sums)
    part = jax.eval_shape(cut, sums)
    return jnp.zeros(part.shape, part.dtype)


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


def _complete(
    blocks: Blocks,
    logits: Array,
    shape: tuple[int, ...],
    pair: Pair,
    visible: Array | None,
    turn: Callable[[Array], Array] = lambda block: block,
) -> Array:
    """The pair's products of queries, of `shape`, and keys with bias, -inf where hidden; `turn` as these are turned."""
    added = blocks.added(pair)
    if added is not None:
        logits = logits + turn(group_heads(added, *shape[1:3])).astype(logits.dtype)
    return logits if visible is None else jnp.where(turn(visible), logits, jnp.full((), -jnp.inf, logits.dtype))


def _turn(block: Shaped[Array, "B K G q s"]) -> Shaped[Array, "B K s G q"]:
    """Keys before rows, as the backward pass has them: of its five products only one then sums over rows of both."""
    return jnp.moveaxis(block, 4, 2)


def _turn_back(block: Shaped[Array, "B K s G q"]) -> Shaped[Array, "B K G q s"]:
    return jnp.moveaxis(block, 2, 4)


def _drop(blocks: Blocks, weights: Array, pair: Pair) -> Array:
    """Dropout with the block's own random numbers, the same in the backward pass."""
    own = jax.random.fold_in(jax.random.fold_in(blocks.rng, pair[0]), pair[1])
    keep, factor = draw_keep(own, weights.shape, blocks.dropout_rate)
    return jnp.where(keep, weights * jnp.asarray(factor, weights.dtype), jnp.zeros((), weights.dtype))
