"""Random blocks: which they are is a function of the seed and the number of the row alone, without tables."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.attention.pattern_algebra import Pattern
from jaxformer.attention.pattern_compile import Piece
from jaxformer.attention.pattern_layout import make_layout, pad_groups, split_evenly
from jaxformer.attention.pattern_spans import Bounds, Spans

# Tokens in a block of queries or keys that the engine takes at once.
LARGEST_BLOCK = 256
NOWHERE = 2**30
# Blocks that are drawn for a row, or lie around it undrawn, at most: each is compared with the others, without a loop.
MOST_BLOCKS = 256


@dataclass(frozen=True, repr=False)
class RandomBlocks(Pattern):
    """Each row of blocks sees `num` different blocks, drawn evenly from those that are not excluded.

    They are drawn from all of `num_blocks`, or where that is None from the blocks up to the row's own. Excluded are
    blocks within `exclude_window` of the row's (None: none), and `exclude_blocks`.
    """

    num: int
    seed: int
    block_size: int
    num_blocks: int | None
    exclude_window: int | None
    exclude_blocks: tuple[int, ...]
    rank = 5

    def drawn(self, row: Any) -> list[Any]:
        """The blocks that a row of blocks sees: `num` arrays like the row numbers, -1 where too few are left to draw.

        Floyd's algorithm (Bentley 1987, "Programming pearls: a sample of brilliance", CACM 30(9)) on the ranks of the
        blocks that are left.
        """
        where: Any = jnp.where if isinstance(row, jax.Array) else np.where
        available = row + 1 if self.num_blocks is None else row * 0 + self.num_blocks
        excluded = self._excluded(row, available)
        left = available - (excluded < NOWHERE).sum(-1).astype(row.dtype)
        ranks: list[Any] = []
        for number in range(self.num):
            last = left - self.num + number
            rank = _random_below(where(last < 0, 1, last + 1), row, self.seed, number)
            taken = last < 0
            for earlier in ranks:
                taken = taken | (earlier == rank)
            ranks.append(where(taken, where(last < 0, -1, last), rank))
        for place in range(excluded.shape[-1]):
            ranks = [rank + (rank >= excluded[..., place]).astype(row.dtype) for rank in ranks]
        return ranks

    def _excluded(self, row: Any, available: Any) -> Any:
        """[.., E] blocks that a row may not draw, in order; NOWHERE for those that it could not draw anyhow."""
        xp: Any = jnp if isinstance(row, jax.Array) else np
        reach = -1 if self.exclude_window is None else self.exclude_window
        blocks = [row + distance for distance in range(-reach, reach + 1)]
        for block in self.exclude_blocks:
            blocks.append(xp.where((row >= block - reach) & (row <= block + reach), NOWHERE, row * 0 + block))
        if not blocks:
            return xp.zeros((*row.shape, 0), row.dtype)
        blocks = [xp.where((block >= 0) & (block < available), block, NOWHERE) for block in blocks]
        return xp.sort(xp.stack(blocks, -1), axis=-1)

    def sees(self, query: Any, key: Any) -> Any:
        """Draws for each query's row of blocks."""
        block = key // self.block_size
        seen = (query < query) & (key < key)
        for drawn in self.drawn(query // self.block_size):
            seen = seen | (block == drawn)
        return seen

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """Known where a block of queries lies in one row of the pattern's blocks."""
        row = query.common(lambda positions: positions // self.block_size)
        low, high = key.low // self.block_size, key.high // self.block_size
        may, must = row < 0, np.zeros(row.shape, bool)
        for drawn in self.drawn(np.maximum(row, 0)):
            may = may | ((low <= drawn) & (drawn <= high))
            must = must | ((low == drawn) & (drawn == high))
        return may, must & (row >= 0)

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """The drawn pairs of blocks, in parts where they are large."""
        rows = np.arange(-(-length // self.block_size))
        drawn = np.stack(self.drawn(rows), -1)
        counts = (drawn >= 0) & (drawn <= (rows[:, None] if causal else rows[-1]))
        row, column = np.broadcast_to(rows[:, None], drawn.shape)[counts], drawn[counts]
        size = min(self.block_size, length)
        parts, each = split_evenly(size, LARGEST_BLOCK)
        positions = np.arange(len(rows) * size).reshape(-1, size)
        order = pad_groups(np.where(positions < length, positions, -1), parts * each).ravel()
        sub_row, sub_column = (part.ravel() for part in np.indices((parts, parts)))
        pairs = [(block[:, None] * parts + sub) * each for block, sub in ((row, sub_row), (column, sub_column))]
        return [(make_layout("banded", order, order, np.stack(pairs, -1).reshape(-1, 2), each, each), self)]

    def __repr__(self) -> str:
        arguments = [f"{self.num}", f"seed={self.seed}", f"block_size={self.block_size}"]
        if self.num_blocks is not None:
            arguments.append(f"num_blocks={self.num_blocks}")
        if self.exclude_window is not None:
            arguments.append(f"exclude_window={self.exclude_window}")
        if self.exclude_blocks:
            arguments.append(f"exclude_blocks={self.exclude_blocks}")
        return f"random_blocks({', '.join(arguments)})"


def _random_below(limit: Any, row: Any, seed: int, number: int) -> Any:
    """An integer in [0, limit) for each row, from the finaliser of MurmurHash3 on (seed, number, row)."""
    start = np.uint32((seed * 0x9E3779B9 + number * 0x85EBCA77 + 0x27D4EB2F) % 2**32)
    with np.errstate(over="ignore"):
        bits = row.astype(np.uint32) * np.uint32(0x9E3779B1)
        for _ in range(2):
            bits = bits ^ start
            bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            bits = bits ^ (bits >> np.uint32(16))
        return (bits % limit.astype(np.uint32)).astype(row.dtype)
