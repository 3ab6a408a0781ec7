"""Exact softmax over a union of disjoint components: each by blocks over its own order of tokens, then merged.

Every component yields (highest logit, sum of exponentials, sum of values) per query slot. Components over one order of
queries continue one running softmax; others are merged in the order of tokens by maximum, sum and accumulator, never
through a log-sum-exp of normalised outputs. The backward pass recomputes the weights of each component from the final
log-normaliser: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B. Memory O(length), forward and backward.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.attention.block_cuts import Blocks
from jaxformer.attention.block_layout import by_token, heads_for_tokens, split_heads
from jaxformer.attention.block_steps import (
    Gradients,
    KeyRows,
    QueryRows,
    Running,
    accumulator,
    add_gradients,
    add_softmax,
    finish_softmax,
    over_examples,
    start_gradients,
    start_running,
)
from jaxformer.attention.components import Component
from jaxformer.attention.part_blocks import Dropout, Source, make_blocks
from jaxformer.attention.token_order import TokenOrder


@dataclass(frozen=True, eq=False)
class Part:
    """A component and the number of the source whose keys it takes."""

    component: Component
    source: int


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Static choices: the parts, with one order for all parts that order queries (or a source's keys) alike."""

    parts: tuple[Part, ...]
    queries: tuple[TokenOrder, ...]
    keys: tuple[TokenOrder, ...]
    dropout_rate: float


class Residuals(NamedTuple):
    """What the backward pass needs: inputs, output, and the log-normaliser of each row (0 where nothing is seen)."""

    query: Float[Array, "B T N H"]
    query_segments: Int[Array, "#B T"] | None
    sources: tuple[Source, ...]
    rng: Array | None
    output: Float[Array, "B T N Hv"]
    log_total: Float[Array, "B K G T"]


def attend_parts(
    parts: Iterable[Part],
    query: Float[Array, "B T N H"],
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    dropout_rate: float,
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ) value over the pairs that the parts name, the query being scaled already."""
    # Those whose queries and keys are in one pair of blocks each go first: what they make is written, not added.
    parts = tuple(sorted(parts, key=lambda part: -sum(part.component.meets_once(axis) for axis in (0, 1))))
    if not parts:
        return jnp.zeros((*query.shape[:3], sources[0].value.shape[3]), sources[0].value.dtype)
    plan = make_plan(parts, query.shape[1], [source.key.shape[1] for source in sources], dropout_rate)

    def attend(arrays: tuple, rng: Array | None) -> Float[Array, "B T N Hv"]:
        return _attend(plan, *arrays, rng)

    return over_examples(attend, (query, query_segments, sources), len(query), rng if dropout_rate else None)


def make_plan(parts: tuple[Part, ...], num_queries: int, num_keys: list[int], dropout_rate: float) -> SparsePlan:
    """The plan of parts that read sources of `num_keys` keys each."""
    components = [part.component for part in parts]
    sources = [part.source for part in parts]
    queries = [(0, num_queries, component.query_order) for component in components]
    keys = [(source, num_keys[source], part.key_order) for source, part in zip(sources, components)]
    return SparsePlan(parts, _share_orders(queries, components), _share_orders(keys, components), dropout_rate)


def _share_orders(
    wanted: list[tuple[int, int, Int[np.ndarray, "_"]]], components: list[Component]
) -> tuple[TokenOrder, ...]:
    """Orders in which the loops hold tokens: one for all of a source that agree but for empty slots at their ends.

    Args:
      wanted: (source, length, order) of each part.
      components: of each part; with a stride, tokens stay as they stand, in slots whose number is a multiple of it.
    """
    common = next((component.stride for component in components if component.stride is not None), None)
    names = []
    longest: dict[tuple[int, int, bytes], TokenOrder] = {}
    for (source, length, order), component in zip(wanted, components):
        stride = component.stride
        multiple = stride or common or 1
        positions = np.full(-(-len(order) // multiple) * multiple, -1)
        positions[: len(order)] = (
            order if stride is None else np.where(np.arange(len(order)) < length, np.arange(len(order)), -1)
        )
        name = (source, multiple, np.trim_zeros(positions + 1, "b").tobytes())
        names.append(name)
        if name in longest:
            positions = max(positions, longest[name].positions, key=len)
        longest[name] = TokenOrder(positions, length)
    return tuple(longest[name] for name in names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: SparsePlan,
    query: Float[Array, "B T N H"],
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    return _forward(plan, query, query_segments, sources, rng)[0]


def _forward(
    plan: SparsePlan,
    query: Float[Array, "B T N H"],
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    rng: Array | None,
) -> tuple[Float[Array, "B T N Hv"], Residuals]:
    num_kv_heads = sources[0].key.shape[2]
    value_dim, value_dtype = sources[0].value.shape[3], sources[0].value.dtype
    dtype = accumulator(query, sources[0].value)

    split_query = split_heads(query, num_kv_heads)

    @functools.cache
    def rows_in(order: TokenOrder) -> Float[Array, "B _ _ _ H"]:
        return order.take(split_query, 3)

    states: dict[TokenOrder, Running] = {}
    keys_in = _keys_by_order(sources)
    for number, part in enumerate(plan.parts):
        order = plan.queries[number]
        queries = rows_in(order)
        shape = order.held(queries.shape[:-1], 3)
        state = states[order] if order in states else start_running(shape, value_dim, dtype)
        for blocks in _blocks(plan, number, query_segments, sources, rng, (order not in states, False)):
            state = add_softmax(blocks, queries, keys_in(plan.keys[number], part.source), state)
        states[order] = state
    shape = split_query.shape[:-1]
    output, log_total = finish_softmax(_merge_all(states, lambda: start_running(shape, value_dim, dtype)))
    output = by_token(output.astype(value_dtype))
    return output, Residuals(query, query_segments, sources, rng, output, log_total)


def _keys_by_order(sources: tuple[Source, ...]) -> Callable[[TokenOrder, int], KeyRows]:
    """The keys and values of a source in an order, made once."""

    @functools.cache
    def keys_in(order: TokenOrder, source: int) -> KeyRows:
        return KeyRows(*(order.take(array.swapaxes(1, 2), 2) for array in sources[source][:2]))

    return keys_in


def _merge_all(states: dict[TokenOrder, Running], start: Callable[[], Running]) -> Running:
    """The running softmax of all tokens over all that the orders' tokens have seen."""
    merged = None
    for order, state in sorted(states.items(), key=lambda item: item[0].few):
        if order.few:
            merged = start() if merged is None else merged
            both = _merge(Running(*(order.take(part, 3) for part in merged)), state)
            merged = Running(*(order.replace(part, 3, new) for part, new in zip(merged, both)))
        else:
            lowest = float(jnp.finfo(state.highest.dtype).min)
            back = Running(*(order.put_back(part, 3, empty) for part, empty in zip(state, (lowest, 0.0, 0.0))))
            merged = back if merged is None else _merge(merged, back)
    return start() if merged is None else merged


def _merge(one: Running, other: Running) -> Running:
    """The running softmax over the keys of both, which have none in common."""
    highest = jnp.maximum(one.highest, other.highest)
    shrink, shrink_other = jnp.exp(one.highest - highest), jnp.exp(other.highest - highest)
    return Running(
        highest,
        one.total * shrink + other.total * shrink_other,
        one.output * shrink[..., None] + other.output * shrink_other[..., None],
    )


def _backward(plan: SparsePlan, residuals: Residuals, d_output: Float[Array, "B T N Hv"]) -> tuple:
    query, query_segments, sources, rng, output, log_total = residuals
    num_kv_heads = sources[0].key.shape[2]
    dtype = accumulator(query, sources[0].value)
    mean = (output.astype(dtype) * d_output.astype(dtype)).sum(-1, keepdims=True)
    by_token_order = (*(split_heads(array, num_kv_heads) for array in (query, d_output)), log_total)
    mean = split_heads(mean, num_kv_heads)[..., 0]

    @functools.cache
    def rows_in(order: TokenOrder) -> QueryRows:
        return QueryRows(*(order.take(array, 3) for array in (*by_token_order, mean)))

    d_queries: dict[TokenOrder, Array] = {}
    d_keys: dict[TokenOrder, tuple[Array, Array]] = {}
    keys_in = _keys_by_order(sources)
    for number, part in enumerate(plan.parts):
        query_order, key_order = plan.queries[number], plan.keys[number]
        queries, keys = rows_in(query_order), keys_in(key_order, part.source)
        key_shape, value_shape = (key_order.held(array.shape, 2) for array in keys)
        gradients = start_gradients(query_order.held(queries.query.shape, 3), key_shape, value_shape, [], dtype)
        gradients = gradients._replace(query=d_queries.get(query_order, gradients.query))
        is_first = query_order not in d_queries, key_order not in d_keys
        if key_order in d_keys:
            gradients = Gradients(gradients.query, *d_keys[key_order], [])
        for blocks in _blocks(plan, number, query_segments, sources, rng, is_first):
            gradients = add_gradients(blocks, queries, keys, gradients)
        d_queries[query_order] = gradients.query
        d_keys[key_order] = (gradients.key, gradients.value)
    d_query = _sum_all(d_queries, 3, jnp.zeros(by_token_order[0].shape, dtype))
    d_sources = []
    for number, source in enumerate(sources):
        orders = dict.fromkeys(
            order for part, order in zip(plan.parts, plan.keys, strict=True) if part.source == number
        )
        d_source = (
            _sum_all({order: d_keys[order][field] for order in orders}, 2, jnp.zeros_like(array.swapaxes(1, 2), dtype))
            for field, array in enumerate((source.key, source.value))
        )
        d_sources.append(
            Source(*(heads_for_tokens(sums).astype(array.dtype) for sums, array in zip(d_source, source[:2])))
        )
    return by_token(d_query).astype(query.dtype), None, tuple(d_sources), None


_attend.defvjp(_forward, _backward)


def _sum_all(sums: dict[TokenOrder, Array], axis: int, zeros: Array) -> Array:
    """The sum by tokens of what stands in the slots of several orders along an axis."""
    total = None
    for order, array in sorted(sums.items(), key=lambda item: item[0].few):
        if order.few:
            total = order.add(zeros if total is None else total, axis, array)
        else:
            back = order.put_back(array, axis, 0.0)
            total = back if total is None else total + back
    return zeros if total is None else total


def _blocks(
    plan: SparsePlan,
    number: int,
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    rng: Array | None,
    is_first: tuple[bool, bool],
) -> Iterator[Blocks]:
    """The pairs of blocks of one part."""
    part = plan.parts[number]
    source, orders = sources[part.source], (plan.queries[number], plan.keys[number])
    dropout = Dropout(plan.dropout_rate, None if rng is None else jax.random.fold_in(rng, number))
    return make_blocks(part.component, *orders, source, query_segments, dropout, is_first)
