"""Which blocks of reordered tokens a pattern computes: sizes chosen for few, large blocks within a bound on waste.

Everything here is numpy on O(length) or O(blocks) entries, never length x length.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

# At most so many pairs are computed for each that the pattern has, where blocks of at least 8 queries can keep it: by
# single blocks, by runs, and by lanes, of which one whole block wastes half where they are causal. A window and its
# lanes together stay below 2.
MAX_WASTE, MAX_RUN_WASTE, MAX_LANE_WASTE = 1.9, 1.99, 2.05
# Else, for windows of a few tokens, at most so many for each query.
SMALL_WINDOW = 32
# What one more step, and each query or key in it, costs beside its pairs of tokens, in pairs of tokens: measured on a
# CPU with heads of 64. Tokens of runs are copied once more.
STEP_COST, TOKEN_COST, RUN_TOKEN_COST = 6_000, 15, 22
# Entries of the largest block of logits, for each head.
MAX_AREA = 2**17
QUERY_BLOCKS = (8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024)
KEY_BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, eq=False)
class Layout:
    """Blocks before anything is known to be empty or full; fields as in `Component`."""

    name: str
    query_order: Int[np.ndarray, "Q"]
    key_order: Int[np.ndarray, "K"]
    pairs: Int[np.ndarray, "P 2"]
    query_block: int
    key_block: int
    run: int | None = None
    skips: Int[np.ndarray, "P"] | None = None
    stride: int | None = None

    @property
    def max_waste(self) -> float:
        """Pairs that may be computed for each that counts."""
        return MAX_RUN_WASTE if self.stride is None else MAX_LANE_WASTE

    @property
    def area(self) -> int:
        """Pairs of slots that are computed at once."""
        return (self.run or 1) * self.query_block * self.key_block

    @property
    def executed(self) -> int:
        """Pairs of slots that are computed."""
        return len(self.pairs) * self.area

    def cost(self) -> int:
        """In pairs of tokens."""
        tokens = (self.run or 1) * (self.query_block + self.key_block)
        return len(self.pairs) * (self.area + STEP_COST + RUN_TOKEN_COST * tokens)


def lay_out(
    name: str,
    queries: Int[np.ndarray, "G m"],
    keys: Int[np.ndarray, "K"],
    first: Int[np.ndarray, "G m"],
    stop: Int[np.ndarray, "G m"],
    others: Iterable[Layout] = (),
) -> Layout:
    """The cheapest layout in which the query in each slot meets a range of key slots.

    Args:
      name: of the layout.
      queries: position of the query in each slot, -1 for none, in groups that blocks should not straddle.
      keys: position of the key in each slot, -1 for none.
      first, stop: the query in slot [g, i] meets the keys in slots first[g, i] up to stop[g, i], excluded.
      others: further layouts of the same pairs to choose from.
    """
    stop = np.where(queries < 0, first, np.maximum(first, stop))
    candidates: list[_Blocks | Layout] = [*_candidates(queries, first, stop, len(keys)), *others]
    wanted = max(1, int((stop - first).sum()))
    allowed = [blocks for blocks in candidates if blocks.executed <= blocks.max_waste * wanted]
    allowed = allowed or [blocks for blocks in candidates if blocks.executed <= SMALL_WINDOW * queries.size]
    allowed = allowed or candidates
    blocks = min(allowed, key=lambda blocks: blocks.cost())
    if isinstance(blocks, Layout):
        return blocks
    pairs = blocks.pairs()
    end = int(pairs[:, 1].max(initial=0)) + blocks.key_block
    key_order = np.concatenate([keys, np.full(max(0, end - len(keys)), -1)])
    return make_layout(name, blocks.query_order, key_order, pairs, blocks.query_block, blocks.key_block)


def make_layout(
    name: str,
    query_order: np.ndarray,
    key_order: np.ndarray,
    pairs: np.ndarray,
    query_block: int,
    key_block: int,
    run: int | None = None,
    skips: np.ndarray | None = None,
    stride: int | None = None,
) -> Layout:
    """A layout of int32 arrays, its pairs sorted."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs, skips = pairs[order], skips[order].astype(np.int32) if skips is not None and skips.any() else None
    query_order, key_order, pairs = (array.astype(np.int32) for array in (query_order, key_order, pairs))
    return Layout(name, query_order, key_order, pairs, query_block, key_block, run, skips, stride)


def pad_groups(groups: Int[np.ndarray, "G m"], size: int) -> Int[np.ndarray, "G s"]:
    """Each group filled up to `size` with empty slots."""
    return np.pad(groups, ((0, 0), (0, size - groups.shape[1])), constant_values=-1)


def split_evenly(size: int, most: int) -> tuple[int, int]:
    """(parts, entries in each): the fewest parts of at most about `most` entries, of several large ones in eights."""
    parts = -(-size // most)
    each = -(-size // parts)
    return parts, each if each <= 32 or parts == 1 else -(-each // 8) * 8


@dataclass(frozen=True, eq=False)
class _Blocks:
    """One choice of sizes: the query blocks that start at `starts` meet key slots `low` up to `low + widths`."""

    query_order: np.ndarray
    starts: np.ndarray
    low: np.ndarray
    widths: np.ndarray
    query_block: int
    key_block: int
    max_waste = MAX_WASTE

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Blocks of keys for each of queries."""
        return -(-self.widths // self.key_block)

    @property
    def executed(self) -> int:
        return int(self.counts.sum()) * self.query_block * self.key_block

    def cost(self) -> int:
        return self.executed + int(self.counts.sum()) * (STEP_COST + TOKEN_COST * (self.query_block + self.key_block))

    def pairs(self) -> np.ndarray:
        row = np.repeat(np.arange(len(self.starts)), self.counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return np.stack([self.starts[row], self.low[row] + number * self.key_block], 1)


def _candidates(queries: np.ndarray, first: np.ndarray, stop: np.ndarray, num_keys: int) -> Iterator[_Blocks]:
    for query_block, *arrays in _groupings(queries, first, stop):
        order, low, high = (_in_blocks(array, query_block) for array in arrays)
        empty = high <= low
        low = np.where(empty, num_keys, low).min(1)
        widths = np.maximum(np.where(empty, 0, high).max(1) - low, 0)
        starts = np.flatnonzero(widths) * query_block
        low, widths = low[widths > 0], widths[widths > 0]
        widest = min(num_keys, -(-int(widths.max(initial=1)) // 8) * 8)
        if widest <= max(8, min(MAX_AREA // query_block, KEY_BLOCKS[-1])):
            # One block of keys for each of queries: it may reach back beyond the range to stay within the sequence.
            yield _Blocks(order.ravel(), starts, np.minimum(low, num_keys - widest), widths, query_block, widest)
        for key_block in {*KEY_BLOCKS, query_block, 2 * query_block, 4 * query_block}:
            if key_block < widest and query_block * key_block <= MAX_AREA:
                yield _Blocks(order.ravel(), starts, low, widths, query_block, key_block)


def _groupings(*groups: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """(query_block, *groups) with groups split or joined so that no block straddles two without need."""
    number, size = groups[0].shape
    seen = set()
    for most in QUERY_BLOCKS:
        parts, query_block = split_evenly(size, most) if most < size else (1, size * min(number, most // size))
        if query_block not in seen:
            seen.add(query_block)
            yield (
                query_block,
                *(pad_groups(array, max(size, parts * query_block) if most < size else size) for array in groups),
            )


def _in_blocks(groups: np.ndarray, size: int) -> np.ndarray:
    flat = groups.ravel()
    return np.pad(flat, (0, -len(flat) % size), constant_values=-1).reshape(-1, size)
