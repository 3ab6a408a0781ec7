"""The pairs of blocks of a component as the loops take them, with what hides keys in them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_cuts import Batches, Blocks, Lanes, Pair, PairGroup, Runs
from jaxformer.attention.block_layout import counts_from, cut
from jaxformer.attention.components import Component
from jaxformer.attention.pair_batches import batch_pairs
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


class Dropout(NamedTuple):
    """Fraction of the weights that is dropped, and one typed key or None."""

    rate: float
    rng: Any


def make_blocks(
    component: Component,
    query_order: TokenOrder,
    key_order: TokenOrder,
    source: Source,
    query_segments: Int[Array, "#B T"] | None,
    dropout: Dropout,
    is_first: tuple[bool, bool],
) -> Iterator[Blocks]:
    """All pairs of blocks, in one or two ways to compute them.

    Args:
      component: whose pairs they are.
      query_order, key_order: how the loops hold the tokens.
      source: of the keys.
      query_segments: of the queries, beside those of the source.
      dropout: of the weights.
      is_first: no component before was met by these queries, and by these keys.
    """
    if component.stride is not None:  # Held as they stand, counted as the component orders them.
        query_order = TokenOrder(component.query_order, query_order.length)
        key_order = TokenOrder(component.key_order, key_order.length)
    visible = _visible(component, query_order, key_order, source, query_segments)
    hidden_later = source.mask is not None or source.segments is not None
    options: dict[str, Any] = {
        "query_block": component.query_block,
        "key_block": component.key_block,
        "query_slots": len(component.query_order),
        "key_slots": len(component.key_order),
        "skips": hidden_later,
        "dropout_rate": dropout.rate,
        "rng": dropout.rng,
    }

    def groups(full: np.ndarray, others: np.ndarray, visible: Callable) -> tuple[PairGroup, ...]:
        hides = functools.partial(visible, False) if hidden_later else None
        return PairGroup(full, hides), PairGroup(others, functools.partial(visible, True))

    pairs = component.pairs if component.skips is None else np.c_[component.pairs, component.skips]
    full, others = pairs[component.full], pairs[~component.full]
    once: dict[str, Any] = {
        name: first and component.meets_once(axis)
        for axis, (name, first) in enumerate(zip(("first_at_query", "first_at_key"), is_first))
    }
    if component.run is not None and component.stride is not None:
        lanes = groups(full, others, visible)
        yield Lanes(**options, **once, groups=lanes, run=component.run, stride=component.stride)
    elif component.run is not None:
        yield Runs(**options, **once, groups=groups(full, others, visible), run=component.run)
    else:
        (full_batches, full), (other_batches, others) = (
            batch_pairs(some, component.query_block, component.key_block) for some in (full, others)
        )
        if len(full_batches) or len(other_batches):
            together = _visible_together(visible, source.key.shape[2])
            yield Batches(**options, groups=groups(full_batches, other_batches, together))
            once = {}
        yield Blocks(**options, **once, groups=groups(full, others, visible))


def _visible(
    component: Component,
    query_order: TokenOrder,
    key_order: TokenOrder,
    source: Source,
    query_segments: Int[Array, "#B T"] | None,
) -> Callable[[bool, Pair], Bool[Array, "#B _ 1 q s"]]:
    """Which entries of a pair count: those that the predicate names, if it must be asked, with keys in their slots."""
    queries, keys = jnp.asarray(query_order.positions)[None], jnp.asarray(key_order.positions)[None]
    if source.positions is not None:
        keys = key_order.fill(source.positions, 1)
    exists = None
    if source.mask is not None:
        exists = key_order.fill(source.mask, 1)
    elif key_order.has_empty:
        exists = keys >= 0 if source.positions is None else jnp.asarray(key_order.positions >= 0)[None]
    segments = None
    if source.segments is not None and query_segments is not None:
        segments = query_order.fill(query_segments, 1), key_order.fill(source.segments, 1)
    num_kv_heads, run = source.key.shape[2], component.run or 1

    def visible(ask: bool, pair: Pair) -> Bool[Array, "#B _ 1 q s"]:
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
        if component.run:  # All blocks of a head stand beside each other.
            seen = seen[:, None].repeat(num_kv_heads, 1).reshape(len(seen), -1, *seen.shape[2:])
        return seen[:, :, None]

    return visible


def _visible_together(visible: Callable[[bool, Pair], Array], num_kv_heads: int) -> Callable[[bool, Pair], Array]:
    """The same for batches of pairs."""

    def together(ask: bool, batch: Pair) -> Bool[Array, "#B _ 1 q s"]:
        each = (visible(ask, pair) for pair in jnp.stack(jnp.split(batch, 2), 1))
        return jnp.concatenate([seen.repeat(num_kv_heads, 1) for seen in each], 1)

    return together
