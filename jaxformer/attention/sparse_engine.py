"""Exact softmax over a union of disjoint components: each by blocks over its own order of tokens, then merged.

Every component yields (highest logit, sum of exponentials, sum of values) per query slot. Components over one order of
queries continue one running softmax; others are merged in the order of tokens by maximum, sum and accumulator, never
through a log-sum-exp of normalised outputs. The backward pass recomputes the weights of each component from the final
log-normaliser: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, appendix B. Memory O(length), forward and backward.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_layout import counts_from, cut
from jaxformer.attention.block_steps import (
    Blocks,
    Gradients,
    KeyColumns,
    Pair,
    PairGroup,
    QueryRows,
    Running,
    Runs,
    accumulator,
    add_gradients,
    add_softmax,
    finish_softmax,
    over_examples,
    start_gradients,
    start_running,
)
from jaxformer.attention.components import Component
from jaxformer.attention.slots import Slots
from jaxformer.attention.token_order import TokenOrder


class Source(NamedTuple):
    """Keys and values that components read; there may be some beside the sequence's own.

    Attributes:
      key, value: [B, S, K, H] and [B, S, K, Hv], zeros where `mask` is False.
      mask: True where the key exists and these components may show it; None for everywhere.
      positions: what the components' predicates compare; None for 0 .. S - 1.
      segments: only seen by queries of the same segment; None for seen by all.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K Hv"]
    mask: Bool[Array, "#B S"] | None = None
    positions: Int[Array, "#B S"] | None = None
    segments: Int[Array, "#B S"] | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """A component and the number of the source whose keys it takes."""

    component: Component
    source: int


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Static choices: the parts, with one order for all parts that order queries (or a source's keys) alike."""

    parts: tuple[Part, ...]
    queries: tuple[Slots, ...]
    keys: tuple[Slots, ...]
    dropout_rate: float


class Residuals(NamedTuple):
    """What the backward pass needs: inputs, output, and the log-normaliser of each row (0 where nothing is seen)."""

    query: Float[Array, "B T N H"]
    query_segments: Int[Array, "#B T"] | None
    sources: tuple[Source, ...]
    rng: Array | None
    output: Float[Array, "B T N Hv"]
    log_total: Float[Array, "B T K G"]


def attend_parts(
    parts: Iterable[Part],
    query: Float[Array, "B T N H"],
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    dropout_rate: float,
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ) value over the pairs that the parts name, the query being scaled already."""
    parts = tuple(parts)
    if not parts:
        return jnp.zeros((*query.shape[:3], sources[0].value.shape[3]), sources[0].value.dtype)
    plan = make_plan(parts, query.shape[1], [source.key.shape[1] for source in sources], dropout_rate)

    def attend(arrays: tuple, rng: Array | None) -> Float[Array, "B T N Hv"]:
        return _attend(plan, *arrays, rng)

    return over_examples(attend, (query, query_segments, sources), len(query), rng if dropout_rate else None)


def make_plan(parts: tuple[Part, ...], num_queries: int, num_keys: list[int], dropout_rate: float) -> SparsePlan:
    """The plan of parts that read sources of `num_keys` keys each."""
    # Runs need tokens before heads; one layout for all parts spares copies of all arrays, and merging.
    first = any(part.component.run for part in parts)
    queries = _share_orders([(0, num_queries, part.component.query_order) for part in parts], first)
    keys = _share_orders([(part.source, num_keys[part.source], part.component.key_order) for part in parts], first)
    return SparsePlan(parts, queries, keys, dropout_rate)


def _share_orders(wanted: list[tuple[int, int, Int[np.ndarray, "_"]]], tokens_first: bool) -> tuple[Slots, ...]:
    """One order, with the most empty slots at its end, for all that agree but for these: (source, length, order)."""
    names = []
    longest: dict[tuple[int, bytes], Slots] = {}
    for source, length, order in wanted:
        filled = np.flatnonzero(order >= 0)
        name = (source, order[: filled[-1] + 1 if len(filled) else 0].astype(np.int32).tobytes())
        names.append(name)
        if name not in longest or len(order) > len(longest[name].order.positions):
            longest[name] = Slots(TokenOrder(order, length), tokens_first)
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

    @functools.cache
    def rows_in(slots: Slots) -> Float[Array, "B _ _ _ H"]:
        return slots.rows(query, num_kv_heads)

    @functools.cache
    def columns_in(slots: Slots, source: int) -> tuple[Float[Array, "B _ _ _"], Float[Array, "B _ _ Hv"]]:
        return slots.columns_across(sources[source].key), slots.columns(sources[source].value)

    states: dict[Slots, Running] = {}
    for number, part in enumerate(plan.parts):
        slots = plan.queries[number]
        queries = rows_in(slots)
        blocks = _blocks(plan, number, query_segments, sources, rng)
        state = states[slots] if slots in states else start_running(queries.shape[:-1], value_dim, dtype)
        states[slots] = add_softmax(blocks, queries, *columns_in(plan.keys[number], part.source), state)
    by_position = (
        Running(
            slots.rows_back(state.highest, float(jnp.finfo(dtype).min)),
            slots.rows_back(state.total, 0.0),
            slots.rows_back(state.output, 0.0),
        )
        for slots, state in states.items()
    )
    merged = functools.reduce(_merge, by_position)
    output, log_total = finish_softmax(merged)
    output = output.astype(value_dtype).reshape(*query.shape[:3], value_dim)
    return output, Residuals(query, query_segments, sources, rng, output, log_total)


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
    mean = (output.astype(dtype) * d_output.astype(dtype)).sum(-1).reshape(log_total.shape)

    @functools.cache
    def rows_in(slots: Slots) -> QueryRows:
        rows, d_rows = slots.rows(query, num_kv_heads), slots.rows(d_output, num_kv_heads)
        across = (slots.rows_across(array) for array in (rows, d_rows))
        return QueryRows(rows, next(across), d_rows, next(across), slots.row_sums(log_total), slots.row_sums(mean))

    @functools.cache
    def columns_in(slots: Slots, source: int) -> KeyColumns:
        key, value = sources[source][:2]
        return KeyColumns(slots.columns(key), slots.columns_across(key), slots.columns_across(value))

    d_queries: dict[Slots, Array] = {}
    d_columns: dict[Slots, tuple[Array, Array]] = {}
    for number, part in enumerate(plan.parts):
        query_slots, key_slots = plan.queries[number], plan.keys[number]
        queries, columns = rows_in(query_slots), columns_in(key_slots, part.source)
        start = start_gradients(queries, columns, [], dtype)
        start = start._replace(query=d_queries.get(query_slots, start.query))
        if key_slots in d_columns:
            start = Gradients(start.query, *d_columns[key_slots], [])
        blocks = _blocks(plan, number, query_segments, sources, rng)
        gradients = add_gradients(blocks, queries, columns, start)
        d_queries[query_slots] = gradients.query
        d_columns[key_slots] = (gradients.key, gradients.value)
    d_query = functools.reduce(jnp.add, (slots.rows_back(sums, 0.0) for slots, sums in d_queries.items()))
    d_sources = []
    for number, source in enumerate(sources):
        all_slots = dict.fromkeys(
            slots for part, slots in zip(plan.parts, plan.keys, strict=True) if part.source == number
        )
        d_key, d_value = (
            functools.reduce(
                jnp.add,
                (slots.across_back(d_columns[slots][field]) for slots in all_slots),
                jnp.zeros(array.shape, dtype),
            ).astype(array.dtype)
            for field, array in enumerate(source[:2])
        )
        d_sources.append(Source(d_key, d_value))
    return d_query.reshape(query.shape).astype(query.dtype), None, tuple(d_sources), None


_attend.defvjp(_forward, _backward)


def _blocks(
    plan: SparsePlan,
    number: int,
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    rng: Array | None,
) -> Blocks:
    """The pairs of blocks of one part, with what hides keys in them."""
    part, query_order, key_order = plan.parts[number], plan.queries[number].order, plan.keys[number].order
    component, source = part.component, sources[part.source]
    hidden_later = source.mask is not None or source.segments is not None

    queries, keys = jnp.asarray(query_order.positions)[None], jnp.asarray(key_order.positions)[None]
    if source.positions is not None:
        keys = key_order.take(source.positions, 1)
    exists = None
    if source.mask is not None:
        exists = key_order.take(source.mask, 1)
    elif key_order.has_empty:
        exists = keys >= 0 if source.positions is None else jnp.asarray(key_order.positions >= 0)[None]
    segments = None
    if source.segments is not None and query_segments is not None:
        segments = query_order.take(query_segments, 1), key_order.take(source.segments, 1)

    num_kv_heads, run = source.key.shape[2], component.run or 1

    def visible(ask: bool, pair: Pair) -> Bool[Array, "#B _ 1 q s"]:
        """Which entries count: those that the predicate names, if it must be asked, with keys in their slots."""

        def at_query(array: Array) -> Array:
            return cut(array, 1, pair[0], run * component.query_block).reshape(len(array), run, -1, 1)

        def at_key(array: Array) -> Array:
            return cut(array, 1, pair[1], run * component.key_block).reshape(len(array), run, 1, -1)

        seen = jnp.ones((1, run, component.query_block, component.key_block), bool)
        if ask:
            seen &= component.visible(at_query(queries), at_key(keys))
        if exists is not None:
            seen &= at_key(exists)
        if segments is not None:
            seen &= at_query(segments[0]) == at_key(segments[1])
        if component.skips is not None:
            seen &= counts_from(pair[2], run)[None, :, None, None]
        if component.run:  # Beside each other stand all heads of a block.
            seen = seen[:, :, None].repeat(num_kv_heads, 2).reshape(len(seen), -1, *seen.shape[2:])
        return seen[:, :, None]

    pairs = component.pairs if component.skips is None else np.c_[component.pairs, component.skips]
    make = functools.partial(Runs, run=run) if plan.queries[number].tokens_first else Blocks
    return make(
        component.query_block,
        component.key_block,
        groups=(
            PairGroup(pairs[component.full], functools.partial(visible, False) if hidden_later else None),
            PairGroup(pairs[~component.full], functools.partial(visible, True)),
        ),
        skips=hidden_later,
        dropout_rate=plan.dropout_rate,
        rng=None if rng is None else jax.random.fold_in(rng, number),
    )
