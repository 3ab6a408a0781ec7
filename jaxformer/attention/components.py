"""One disjoint part of a pattern as blocks over reordered tokens: what patterns compile to and the engine executes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

# (query positions, key positions), integer arrays of any kind that broadcast, to which pairs count.
Predicate = Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Component:
    """Pairs of blocks of slots, a slot being a place in an order of queries or of keys.

    Blocks of queries start at multiples of `query_block`; for one block of queries the blocks of keys do not overlap,
    so no pair is met twice. What lies in a pair of blocks and is not `visible` is computed and masked.

    Attributes:
      layout: "banded" (tokens as they stand), "permuted" (all tokens, grouped) or "gathered" (some queries or keys).
      query_order: int32 [Q], position of the query in each slot, -1 for an empty slot; no position twice. Q is a
        multiple of query_block.
      key_order: int32 [K], the same for keys; K is at least key_block.
      pairs: int32 [P, 2], first query slot and first key slot of each run of pairs of blocks, sorted by both.
      full: bool [P], whether every pair of slots in the blocks counts, so that no mask is needed.
      query_block, key_block: slots in a block.
      visible: which (query position, key position) belong to this component and to no earlier one.
      run: pairs of blocks in a run: of each the next block of queries, and the next of keys. All blocks of keys then
        start at multiples of `key_block`. None: single pairs.
      skips: int32 [P], how many pairs at the start of a run an earlier run has; None for none in any.
      stride: the blocks of a run hold every `stride`-th token, from neighbours on: slot (j stride + g) block + i holds
        token (j block + i) stride + g, for keys as for queries. None: the orders are of any kind.
    """

    layout: str
    query_order: Int[np.ndarray, "Q"]
    key_order: Int[np.ndarray, "K"]
    pairs: Int[np.ndarray, "P 2"]
    full: Bool[np.ndarray, "P"]
    query_block: int
    key_block: int
    visible: Predicate
    run: int | None = None
    skips: Int[np.ndarray, "P"] | None = None
    stride: int | None = None

    @property
    def executed(self) -> int:
        """Pairs of slots that are computed."""
        return len(self.pairs) * self.area

    @property
    def area(self) -> int:
        """Pairs of slots that are computed at once."""
        return (self.run or 1) * self.query_block * self.key_block

    def meets_once(self, axis: int) -> bool:
        """Whether no query (axis 0) or no key (axis 1) is in two pairs of blocks."""
        size = (self.run or 1) * (self.query_block, self.key_block)[axis]
        return bool((np.diff(np.sort(self.pairs[:, axis])) >= size).all())

    def each_pair(self) -> Int[np.ndarray, "_ 2"]:
        """First query slot and first key slot of every pair of blocks, run after run, each once."""
        pairs = spread_runs(self.pairs, self.run, self.query_block, self.key_block)
        return pairs if self.skips is None else pairs[(np.arange(self.run or 1) >= self.skips[:, None]).ravel()]


def spread_runs(pairs: Int[np.ndarray, "P 2"], run: int | None, query_block: int, key_block: int) -> np.ndarray:
    """The starts of all pairs of blocks in runs that start at `pairs`."""
    steps = np.arange(run or 1)[:, None] * np.array([query_block, key_block])
    return (pairs[:, None] + steps).reshape(-1, 2)
