"""Parts of patterns that are not bands: windows of blocks, chosen tokens, and summary positions of blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxformer.attention.pattern_algebra import Pattern
from jaxformer.attention.pattern_compile import Piece
from jaxformer.attention.pattern_layout import Layout, lay_out
from jaxformer.attention.pattern_runs import lay_out_block_runs
from jaxformer.attention.pattern_spans import Bounds, Spans


@dataclass(frozen=True, repr=False)
class BlockBand(Pattern):
    """All keys of the own block of `block_size` tokens, and of `before` blocks before it and `after` behind it."""

    block_size: int
    before: int
    after: int
    rank = 1

    def sees(self, query: Any, key: Any) -> Any:
        """Compares numbers of blocks."""
        distance = query // self.block_size - key // self.block_size
        return (distance <= self.before) & (distance >= -self.after)

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """From the least and the greatest distance in blocks."""
        size = self.block_size
        least, greatest = query.low // size - key.high // size, query.high // size - key.low // size
        may = (least <= self.before) & (greatest >= -self.after)
        return may, (greatest <= self.before) & (least >= -self.after)

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Tokens as they stand, in blocks of queries that fit the pattern's."""
        size = min(self.block_size, length)
        positions = np.arange(-(-length // size) * size).reshape(-1, size)
        block = positions // self.block_size
        first = np.maximum(block - self.before, 0) * self.block_size
        stop = np.minimum((block + self.after + 1) * self.block_size, length)
        if causal:
            stop = np.minimum(stop, positions + 1)
        positions = np.where(positions < length, positions, -1)
        runs = lay_out_block_runs("banded", positions, self.before, 0 if causal else self.after)
        return [(lay_out("banded", positions, np.arange(length), first, stop, runs), self)]

    def __repr__(self) -> str:
        window = self.before if self.before == self.after else (self.before, self.after)
        return f"blocks({self.block_size}, {window})" if window else f"blocks({self.block_size})"


@dataclass(frozen=True, repr=False)
class Tokens(Pattern):
    """Chosen positions: everyone sees them (columns of the matrix), or they see everyone (rows), or both."""

    indices: tuple[int, ...]
    columns: bool = True
    rows: bool = True
    rank = 4

    def _chosen(self, positions: Any) -> Any:
        indices = np.asarray(self.indices, np.int32).reshape((1,) * positions.ndim + (-1,))
        return (positions[..., None] == indices).any(-1)

    def sees(self, query: Any, key: Any) -> Any:
        """Looks for each side's positions among the chosen ones before they are broadcast."""
        if not self.rows:
            return self._chosen(key) & (query == query)
        if not self.columns:
            return self._chosen(query) & (key == key)
        return self._chosen(query) | self._chosen(key)

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """From the positions in each block."""
        (some_rows, all_rows), (some_columns, all_columns) = query.hold(self._chosen), key.hold(self._chosen)
        if not self.rows:
            return some_columns, all_columns
        if not self.columns:
            return some_rows, all_rows
        return some_rows | some_columns, all_rows | all_columns

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """The columns gathered as keys for all queries, and the rows gathered as queries for all keys."""
        chosen = np.array([index for index in self.indices if index < length], int)
        everyone = np.arange(length)
        pieces: list[Piece] = []
        if not len(chosen):
            return pieces
        if self.columns:
            pieces.append((_gather_keys(chosen, length, causal), Tokens(self.indices, rows=False)))
        if self.rows:
            stop = chosen[None] + 1 if causal else np.full((1, len(chosen)), length)
            layout = lay_out("gathered", chosen[None], everyone, np.zeros_like(stop), stop)
            pieces.append((layout, Tokens(self.indices, columns=False)))
        return pieces

    def __repr__(self) -> str:
        sides = "" if self.rows and self.columns else f", rows={self.rows}, columns={self.columns}"
        return f"global_tokens({_by_runs(self.indices)}{sides})"


def _by_runs(indices: tuple[int, ...]) -> str:
    """The tuple as Python reads it, with ranges for four or more neighbours."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts: list[str] = []
    for run in runs:
        parts += [f"*range({run[0]}, {run[-1] + 1})"] if len(run) > 3 else map(str, run)
    return f"({', '.join(parts)},)" if len(parts) == 1 else f"({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Summaries(Pattern):
    """Everyone sees `num_summary` positions of each block of `stride`: the last, or those `offset` before them."""

    stride: int
    num_summary: int
    offset: int
    rank = 3

    def _chosen(self, positions: Any) -> Any:
        place = positions % self.stride
        stop = self.stride - self.offset
        return (place >= stop - self.num_summary) & (place < stop)

    def sees(self, query: Any, key: Any) -> Any:
        """Depends on the key alone."""
        return self._chosen(key) & (query == query)

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """From the positions in each block of keys."""
        return key.hold(self._chosen)

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """The summary positions gathered as keys for all queries."""
        chosen = np.flatnonzero(self._chosen(np.arange(length)))
        return [(_gather_keys(chosen, length, causal), self)] if len(chosen) else []

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"summaries({self.stride}, {self.num_summary}{offset})"


def _gather_keys(chosen: Int[np.ndarray, "C"], length: int, causal: bool) -> Layout:
    queries = np.arange(length)[None]
    stop = np.searchsorted(chosen, queries, "right") if causal else np.full(queries.shape, len(chosen))
    return lay_out("gathered", queries, chosen, np.zeros_like(stop), stop)
