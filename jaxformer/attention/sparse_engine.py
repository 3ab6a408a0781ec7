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

from jaxformer.attention.block_layout import by_head, by_token, cut
from jaxformer.attention.block_steps import (
    Blocks,
    Gradients,
    KeyColumns,
    Pair,
    PairGroup,
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
    query_orders: tuple[TokenOrder, ...]
    key_orders: tuple[TokenOrder, ...]
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
    parts = tuple(parts)
    if not parts:
        return jnp.zeros((*query.shape[:3], sources[0].value.shape[3]), sources[0].value.dtype)
    plan = make_plan(parts, query.shape[1], [source.key.shape[1] for source in sources], dropout_rate)

    def attend(arrays: tuple, rng: Array | None) -> Float[Array, "B T N Hv"]:
        return _attend(plan, *arrays, rng)

    return over_examples(attend, (query, query_segments, sources), len(query), rng if dropout_rate else None)


def make_plan(parts: tuple[Part, ...], num_queries: int, num_keys: list[int], dropout_rate: float) -> SparsePlan:
    """The plan of parts that read sources of `num_keys` keys each."""
    return SparsePlan(
        parts=parts,
        query_orders=_share_orders([(0, num_queries, part.component.query_order) for part in parts]),
        key_orders=_share_orders([(part.source, num_keys[part.source], part.component.key_order) for part in parts]),
        dropout_rate=dropout_rate,
    )


def _share_orders(wanted: list[tuple[int, int, Int[np.ndarray, "_"]]]) -> tuple[TokenOrder, ...]:
    """One order, with the most empty slots at its end, for all that agree but for these: (source, length, order)."""
    names = []
    longest: dict[tuple[int, bytes], TokenOrder] = {}
    for source, length, order in wanted:
        filled = np.flatnonzero(order >= 0)
        name = (source, order[: filled[-1] + 1 if len(filled) else 0].astype(np.int32).tobytes())
        names.append(name)
        if name not in longest or len(order) > len(longest[name].positions):
            longest[name] = TokenOrder(order, length)
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
    rows = by_head(query, sources[0].key.shape[2])
    value_dim, value_dtype = sources[0].value.shape[3], sources[0].value.dtype
    dtype = accumulator(query, sources[0].value)

    @functools.cache
    def rows_in(order: TokenOrder) -> Float[Array, "B K G Q H"]:
        return order.take(rows, 3)

    @functools.cache
    def columns_in(order: TokenOrder, source: int) -> tuple[Float[Array, "B K H S"], Float[Array, "B K S Hv"]]:
        key, value = (order.take(array, 1) for array in sources[source][:2])
        return key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    states: dict[TokenOrder, Running] = {}
    for number, part in enumerate(plan.parts):
        order = plan.query_orders[number]
        queries = rows_in(order)
        blocks = _blocks(plan, number, query_segments, sources, rng)
        state = states[order] if order in states else start_running(queries.shape[:-1], value_dim, dtype)
        states[order] = add_softmax(blocks, queries, *columns_in(plan.key_orders[number], part.source), state)
    merged = start_running(rows.shape[:-1], value_dim, dtype)
    for number, (order, state) in enumerate(states.items()):
        by_position = Running(
            order.put_back(state.highest, 3, float(jnp.finfo(dtype).min)),
            order.put_back(state.total, 3, 0.0),
            order.put_back(state.output, 3, 0.0),
        )
        merged = by_position if number == 0 else _merge(merged, by_position)
    output, log_total = finish_softmax(merged)
    output = by_token(output.astype(value_dtype))
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
    rows, d_rows = by_head(query, num_kv_heads), by_head(d_output, num_kv_heads)
    mean = (by_head(output, num_kv_heads).astype(dtype) * d_rows.astype(dtype)).sum(-1)

    @functools.cache
    def rows_in(order: TokenOrder) -> QueryRows:
        own_rows, own_d_rows = order.take(rows, 3), order.take(d_rows, 3)
        across = (array.transpose(0, 1, 4, 2, 3) for array in (own_rows, own_d_rows))
        return QueryRows(
            own_rows, next(across), own_d_rows, next(across), order.take(log_total, 3), order.take(mean, 3)
        )

    @functools.cache
    def columns_in(order: TokenOrder, source: int) -> KeyColumns:
        key, value = (order.take(array, 1) for array in sources[source][:2])
        return KeyColumns(key.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1), value.transpose(0, 2, 3, 1))

    d_queries: dict[TokenOrder, Array] = {}
    d_columns: dict[TokenOrder, tuple[Array, Array]] = {}
    for number, part in enumerate(plan.parts):
        query_order, key_order = plan.query_orders[number], plan.key_orders[number]
        queries, columns = rows_in(query_order), columns_in(key_order, part.source)
        start = start_gradients(queries, columns, [], dtype)
        start = start._replace(query=d_queries.get(query_order, start.query))
        if key_order in d_columns:
            start = Gradients(start.query, *d_columns[key_order], [])
        blocks = _blocks(plan, number, query_segments, sources, rng)
        gradients = add_gradients(blocks, queries, columns, start)
        d_queries[query_order] = gradients.query
        d_columns[key_order] = (gradients.key, gradients.value)
    d_query = functools.reduce(jnp.add, (order.put_back(sums, 3, 0.0) for order, sums in d_queries.items()))
    d_sources = []
    for number, source in enumerate(sources):
        orders = dict.fromkeys(
            order for part, order in zip(plan.parts, plan.key_orders, strict=True) if part.source == number
        )
        d_key, d_value = (
            functools.reduce(
                jnp.add,
                (order.put_back(d_columns[order][field].transpose(0, 3, 1, 2), 1, 0.0) for order in orders),
                jnp.zeros(array.shape, dtype),
            ).astype(array.dtype)
            for field, array in enumerate(source[:2])
        )
        d_sources.append(Source(d_key, d_value))
    return by_token(d_query).astype(query.dtype), None, tuple(d_sources), None


_attend.defvjp(_forward, _backward)


def _blocks(
    plan: SparsePlan,
    number: int,
    query_segments: Int[Array, "#B T"] | None,
    sources: tuple[Source, ...],
    rng: Array | None,
) -> Blocks:
    """The pairs of blocks of one part, with what hides keys in them."""
    part, query_order, key_order = plan.parts[number], plan.query_orders[number], plan.key_orders[number]
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

    def visible(ask: bool, pair: Pair) -> Bool[Array, "#B 1 1 q s"]:
        """Which entries count: those that the predicate names, if it must be asked, with keys in their slots."""

        def at_query(array: Array) -> Array:
            return cut(array, 1, pair[0], component.query_block)[:, :, None]

        def at_key(array: Array) -> Array:
            return cut(array, 1, pair[1], component.key_block)[:, None, :]

        seen = jnp.ones((1, component.query_block, component.key_block), bool)
        if ask:
            seen &= component.visible(at_query(queries), at_key(keys))
        if exists is not None:
            seen &= at_key(exists)
        if segments is not None:
            seen &= at_query(segments[0]) == at_key(segments[1])
        return seen[:, None, None]

    return Blocks(
        component.query_block,
        component.key_block,
        groups=(
            PairGroup(component.pairs[component.full], functools.partial(visible, False) if hidden_later else None),
            PairGroup(component.pairs[~component.full], functools.partial(visible, True)),
        ),
        skips=hidden_later,
        dropout_rate=plan.dropout_rate,
        rng=None if rng is None else jax.random.fold_in(rng, number),
    )
