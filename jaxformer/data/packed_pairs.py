"""Several pairs in a row: little padding without groups, the pairs kept apart by their segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Integer

from jaxformer.data.packing import IGNORE_LABEL, Batch
from jaxformer.data.pair_rows import Widths, round_up, shift_right

# Rows that are still open for further pairs: more fill rows better and take longer.
_OPEN_ROWS = 256


@dataclass(frozen=True, eq=False)
class PackedPairRows:
    """Rows of one shape that each hold several whole pairs.

    The sources of a row's pairs stand one after the other in its source, their targets in the same order in its
    target; source and target of a pair have the same segment number.

    Args:
        sources: ids of each source, its end included.
        targets: ids of each target, its end included.
        widths: tokens of a source row and of a target row; no pair is longer.
        start_id: what the decoder begins each pair with.
        source_pad_id: fills source rows.
        pad_id: fills the decoder's input.

    Raises:
        ValueError: a pair is longer than a row.
    """

    sources: Sequence[Integer[np.ndarray, " _"]]
    targets: Sequence[Integer[np.ndarray, " _"]]
    widths: Widths
    start_id: int
    source_pad_id: int = 0
    pad_id: int = 0

    def __post_init__(self):
        for pair, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            if len(source) > self.widths[0] or len(target) > self.widths[1]:
                raise ValueError(f"pair {pair} has {(len(source), len(target))} tokens; widths is {self.widths!r}.")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """Tokens of the wider side of a row."""
        return max(self.widths)

    @property
    def layout(self) -> str:
        """The widths, with the rows."""
        return f"packed: {len(self):,} of {self.widths[0]} to {self.widths[1]}"

    @property
    def fill(self) -> float:
        """Fraction of the places in all rows, of sources and targets, that hold a token, in [0, 1]."""
        tokens = sum(len(ids) for side in (self.sources, self.targets) for ids in side)
        return tokens / max(1, len(self) * sum(self.widths))

    @cached_property
    def rows(self) -> list[list[int]]:
        """The pairs of each row; each pair is in the first open row with room for both its sides."""
        rows: list[list[int]] = []
        room = np.zeros((0, 2), np.int64)
        for pair, lengths in enumerate(zip(map(len, self.sources), map(len, self.targets))):
            fits = np.flatnonzero((room >= lengths).all(axis=1))
            if not fits.size:
                rows.append([])
                room = np.concatenate([room[-_OPEN_ROWS + 1 :], [self.widths]])
                fits = np.array([len(room) - 1])
            place = int(fits[0])
            room[place] -= lengths
            rows[len(rows) - len(room) + place].append(pair)
        return rows

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, as the training step takes them.

        Args:
            indices: rows wanted [B]; ``len(self)`` or more gives a row that is all padding.

        Returns:
            source, source_segments and source_positions [B, source width], and tokens (what the decoder reads:
            ``shift_right`` of each target), targets (-100 in padding), segments and positions [B, target width], int32.
            Segments are 1, 2, … in a row and 0 in padding; positions are 0, 1, … in each pair.
        """
        shapes = [(len(indices), width) for width in self.widths]
        source = np.full(shapes[0], self.source_pad_id, np.int32)
        tokens, targets = np.full(shapes[1], self.pad_id, np.int32), np.full(shapes[1], IGNORE_LABEL, np.int32)
        segments, positions = ([np.zeros(shape, np.int32) for shape in shapes] for _ in range(2))
        for row, index in enumerate(indices.tolist()):
            starts = [0, 0]
            for number, pair in enumerate(self.rows[index] if index < len(self) else [], start=1):
                given, wanted = self.sources[pair], self.targets[pair]
                places = [slice(start, start + len(side)) for start, side in zip(starts, (given, wanted))]
                source[row, places[0]] = given
                tokens[row, places[1]] = shift_right(wanted, self.start_id, self.pad_id)
                targets[row, places[1]] = wanted
                for side, place in enumerate(places):
                    segments[side][row, place] = number
                    positions[side][row, place] = np.arange(place.stop - place.start)
                starts = [place.stop for place in places]
        return {
            "source": source,
            "source_segments": segments[0],
            "source_positions": positions[0],
            "tokens": tokens,
            "targets": targets,
            "segments": segments[1],
            "positions": positions[1],
        }


def packed_widths(
    sources: Sequence[Integer[np.ndarray, " _"]], targets: Sequence[Integer[np.ndarray, " _"]], length: int | None
) -> Widths:
    """Tokens of source and target rows such that both sides of full rows are equally full.

    Args:
        sources: ids of each source.
        targets: ids of each target.
        length: tokens of the wider side, no fewer than the longest text has; None = as many.

    Returns:
        The widths, in the ratio of all tokens of the sides as far as no text is longer, rounded up to multiples of 8.
    """
    totals, longest = zip(*((sum(map(len, side)), max(map(len, side), default=0)) for side in (sources, targets)))
    width = round_up(max(longest) if length is None else length)
    source, target = (
        max(round_up(-(-width * total // max(1, *totals))), round_up(most)) for total, most in zip(totals, longest)
    )
    return source, target
