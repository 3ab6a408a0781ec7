"""From the layouts of a pattern's parts to disjoint components, and to numbers of pairs."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.attention.components import Component, spread_runs
from jaxformer.attention.pattern_layout import Layout
from jaxformer.attention.pattern_spans import Spans

# A layout and the pattern whose pairs it covers.
Piece = tuple[Layout, Any]
# Entries that are looked at together when pairs are counted.
COUNTED_AT_ONCE = 2**22


def compile_pieces(pieces: list[Piece]) -> tuple[Component, ...]:
    """Components that leave out the pairs of earlier ones, and blocks without any pair."""
    components: list[Component] = []
    done: list[Any] = []
    for layout, pattern in pieces:
        query, key = _spans(layout)
        may = _may_see(pattern, query, key)
        met = [earlier for earlier in done if (may & earlier.bounds(query, key)[0]).any()]
        done.append(pattern)
        region = pattern
        for earlier in met:
            region = region & ~earlier
        if met:
            may = _may_see(region, query, key)
        if may.any():
            full = region.bounds(query, key)[1] & query.whole & key.whole
            run = layout.run or 1
            may, full = np.asarray(may.reshape(-1, run).any(1)), np.asarray(full.reshape(-1, run).all(1))
            components.append(_component(layout, may, full, region))
    return tuple(components)


def count_executed(pieces: list[Piece]) -> int:
    """Pairs of slots in the blocks that are not known to be empty."""
    executed = 0
    for layout, pattern in pieces:
        may = _may_see(pattern, *_spans(layout)).reshape(-1, layout.run or 1).any(1)
        executed += int(may.sum()) * layout.area
    return executed


def count_diagonals(pattern: Any, length: int) -> int:
    """The pairs of a shift-invariant pattern: each distance that is seen is seen in every row where it fits."""
    distances = np.arange(1 - length, length)
    seen = np.asarray(pattern.visible(distances + length, np.full(distances.shape, length)))
    return int((length - np.abs(distances[seen])).sum())


def count_component(component: Component, length: int) -> int:
    """The pairs of a component; blocks that are neither empty nor full are quartered until they are small."""
    region = component.visible.__self__  # type: ignore[attr-defined]
    if region.shift_invariant:
        return count_diagonals(region, length)
    count, pairs, query_block, key_block = 0, component.each_pair(), component.query_block, component.key_block
    while len(pairs):
        query = Spans(component.query_order, pairs[:, 0], query_block)
        key = Spans(component.key_order, pairs[:, 1], key_block)
        may, must = region.bounds(query, key)
        full = must & query.whole & key.whole
        count += int(full.sum()) * query_block * key_block
        pairs = pairs[may & query.some & key.some & ~full]
        query_parts, key_parts = _parts(query_block), _parts(key_block)
        if query_parts == key_parts == 1:
            return count + _count_entries(component, pairs, query_block, key_block)
        query_block, key_block = query_block // query_parts, key_block // key_parts
        steps = np.indices((query_parts, key_parts)).reshape(2, -1).T * (query_block, key_block)
        pairs = (pairs[:, None] + steps).reshape(-1, 2)
    return count


def _spans(layout: Layout) -> tuple[Spans, Spans]:
    pairs = spread_runs(layout.pairs, layout.run, layout.query_block, layout.key_block)
    return (
        Spans(layout.query_order, pairs[:, 0], layout.query_block),
        Spans(layout.key_order, pairs[:, 1], layout.key_block),
    )


def _may_see(pattern: Any, query: Spans, key: Spans) -> Bool[np.ndarray, "P"]:
    return pattern.bounds(query, key)[0] & query.some & key.some


def _component(layout: Layout, kept: Bool[np.ndarray, "P"], full: Bool[np.ndarray, "P"], region: Any) -> Component:
    arrays = (layout.query_order, layout.key_order, layout.pairs[kept], full[kept])
    skips = None if layout.skips is None else layout.skips[kept]
    if skips is not None:
        arrays[3][skips > 0] = False  # What an earlier run has is masked.
        skips.setflags(write=False)
    for array in arrays:
        array.setflags(write=False)
    return Component(
        layout.name, *arrays, layout.query_block, layout.key_block, region.visible, layout.run, skips, layout.stride
    )


def _parts(size: int) -> int:
    return 2 if size % 2 == 0 and size > 16 else 1


def _count_entries(component: Component, pairs: Int[np.ndarray, "P 2"], query_block: int, key_block: int) -> int:
    queries, keys = np.arange(query_block), np.arange(key_block)
    together = max(1, COUNTED_AT_ONCE // (query_block * key_block))
    count = 0
    for start in range(0, len(pairs), together):
        now = pairs[start : start + together]
        query = component.query_order[now[:, :1] + queries][:, :, None]
        key = component.key_order[now[:, 1:] + keys][:, None, :]
        count += int((component.visible(query, key) & (query >= 0) & (key >= 0)).sum())
    return count
