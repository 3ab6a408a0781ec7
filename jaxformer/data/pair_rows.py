"""Pairs of token ids as rows of few shapes: a source and a target in each, padded to the widths of a group."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Int64, Integer

from jaxformer.data.packing import IGNORE_LABEL, Batch

WIDTH_UNIT = 8
"""Widths are multiples of so many tokens."""

# Steps between the shortest and the longest width that is considered: choosing takes their square.
_MOST_STEPS = 128

Widths = tuple[int, int]
"""Tokens of a source row and of a target row."""


def shift_right(targets: Integer[np.ndarray, "*B T"], start_id: int, pad_id: int) -> Int[np.ndarray, "*B T"]:
    """What a decoder reads to predict ``targets``: the start id, then the targets but the last.

    The one shift of pairs is done here: the decoder's output at a place is scored on the target of the same place.

    Args:
        targets: ids, -100 where nothing is scored [..., T].
        start_id: what a decoder begins with.
        pad_id: stands for -100.

    Returns:
        Ids of the same shape, int32: of targets [10, 11, 1, -100, -100], start 0 and padding 0 they are
        [0, 10, 11, 1, 0].
    """
    shifted = np.full(targets.shape, start_id, np.int32)
    shifted[..., 1:] = np.where(targets[..., :-1] == IGNORE_LABEL, pad_id, targets[..., :-1])
    return shifted[..., : targets.shape[-1]]


def round_up(length: int) -> int:
    """The width of a row that holds so many tokens: the next multiple of ``WIDTH_UNIT``, at least one."""
    return max(1, -(-length // WIDTH_UNIT)) * WIDTH_UNIT


@dataclass(frozen=True, eq=False)
class PairRows:
    """Pairs in groups of one shape each: a ``GroupedRows``.

    A pair is in the group that takes least of those that hold both its sides.

    Args:
        sources: ids of each source, its end included.
        targets: ids of each target, its end included.
        widths: tokens of the source and target rows of each group.
        start_id: what the decoder begins with.
        source_pad_id: fills source rows.
        pad_id: fills the decoder's input.

    Raises:
        ValueError: a pair is longer than every group.
    """

    sources: Sequence[Integer[np.ndarray, " _"]]
    targets: Sequence[Integer[np.ndarray, " _"]]
    widths: tuple[Widths, ...]
    start_id: int
    source_pad_id: int = 0
    pad_id: int = 0

    def __post_init__(self):
        lengths = _lengths(self.sources, self.targets)
        if not len(self) or _fits(lengths, self.widths).any(axis=1).all():
            return
        pair = int(np.argmin(_fits(lengths, self.widths).any(axis=1)))
        raise ValueError(f"pair {pair} has {tuple(lengths[pair].tolist())} tokens; widths is {self.widths!r}.")

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def length(self) -> int:
        """Tokens of the widest row, of a source or of a target."""
        return max(map(max, self.widths))

    @cached_property
    def groups(self) -> tuple[Int64[np.ndarray, " _"], ...]:
        """The pairs of each group, in order."""
        if not len(self):
            return tuple(np.zeros(0, np.int64) for _ in self.widths)
        cost = np.where(_fits(_lengths(self.sources, self.targets), self.widths), np.sum(self.widths, axis=1), np.inf)
        group = cost.argmin(axis=1)
        return tuple(np.flatnonzero(group == index) for index in range(len(self.widths)))

    @property
    def layout(self) -> str:
        """The widths, with the pairs of each."""
        sizes = ", ".join(f"{len(group):,} of {s} to {t}" for group, (s, t) in zip(self.groups, self.widths))
        return f"bucketed: {sizes}"

    @property
    def fill(self) -> float:
        """Fraction of the places in all rows, of sources and targets, that hold a token, in [0, 1]."""
        places = sum(len(group) * sum(widths) for group, widths in zip(self.groups, self.widths))
        return sum(len(ids) for side in (self.sources, self.targets) for ids in side) / max(1, places)

    def batch(self, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Pairs by index, as the training step takes them.

        Args:
            indices: pairs wanted [B], of that group; ``len(self)`` or more gives a row that is all padding.
            group: whose widths the rows have.

        Returns:
            source int32 and source_mask bool [B, source width], and tokens (what the decoder reads, ``shift_right``),
            targets (-100 behind the end) int32 and key_mask bool [B, target width]; masks are False in padding.
        """
        source_width, width = self.widths[group]
        source = np.full((len(indices), source_width), self.source_pad_id, np.int32)
        source_mask = np.zeros(source.shape, bool)
        targets = np.full((len(indices), width), IGNORE_LABEL, np.int32)
        for row, index in enumerate(indices.tolist()):
            if index < len(self):
                given, wanted = self.sources[index], self.targets[index]
                source[row, : len(given)], source_mask[row, : len(given)] = given, True
                targets[row, : len(wanted)] = wanted
        return {
            "source": source,
            "source_mask": source_mask,
            "tokens": shift_right(targets, self.start_id, self.pad_id),
            "targets": targets,
            "key_mask": targets != IGNORE_LABEL,
        }


def bucket_widths(
    sources: Sequence[Integer[np.ndarray, " _"]], targets: Sequence[Integer[np.ndarray, " _"]], num_buckets: int
) -> tuple[Widths, ...]:
    """Widths of at most so many groups such that rows hold little padding.

    Pairs are ordered by their longer side and cut into groups of neighbours, each as wide as its longest source and
    longest target, rounded up to multiples of 8; of all such cuts the one whose rows have fewest places, found by
    dynamic programming.

    Args:
        sources: ids of each source.
        targets: ids of each target.
        num_buckets: groups at most.

    Returns:
        Widths of source and target rows of each group, from the narrowest on; one of (8, 8) where there is no pair.

    Raises:
        ValueError: num_buckets is below 1.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, must be at least 1.")
    lengths = _lengths(sources, targets)
    if not len(lengths):
        return ((WIDTH_UNIT, WIDTH_UNIT),)
    longer = -(-np.maximum(lengths.max(axis=1), 1) // WIDTH_UNIT)
    steps, step = np.unique(-(-longer // -(-int(longer.max()) // _MOST_STEPS)), return_inverse=True)
    counts = np.bincount(step)
    widest = np.zeros((len(steps), 2), np.int64)
    np.maximum.at(widest, step, lengths)
    widest = np.maximum(-(-widest // WIDTH_UNIT), 1) * WIDTH_UNIT
    return tuple(
        (int(source), int(target))
        for source, target in (
            widest[first:end].max(axis=0) for first, end in _cheapest_cuts(counts, widest, num_buckets)
        )
    )


def _cheapest_cuts(
    counts: Int64[np.ndarray, " steps"], widest: Int64[np.ndarray, "steps 2"], most: int
) -> list[tuple[int, int]]:
    """The steps of each group, from first to end, such that all rows together have fewest places."""
    size = len(counts)
    # cost[first, end]: places of one group of the steps first to end - 1.
    cost = np.full((size + 1, size + 1), np.inf)
    for first in range(size):
        running = np.maximum.accumulate(widest[first:], axis=0).sum(axis=1)
        cost[first, first + 1 :] = np.cumsum(counts[first:]) * running
    best, froms = np.full(size + 1, np.inf), []
    best[0] = 0.0
    for _ in range(min(most, size)):
        # A group may be empty, so that fewer are chosen where more save nothing.
        totals = best[:, None] + np.minimum(cost, np.where(np.eye(size + 1, dtype=bool), 0.0, np.inf))
        froms.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    cuts, end = [], size
    for chosen in reversed(froms):
        first = int(chosen[end])
        if first < end:
            cuts.append((first, end))
        end = first
    return cuts[::-1]


def fitting_widths(
    sources: Sequence[Integer[np.ndarray, " _"]],
    targets: Sequence[Integer[np.ndarray, " _"]],
    widths: tuple[Widths, ...],
) -> tuple[Widths, ...]:
    """The widths, and one more if a pair is too long for all of them: batches of few shapes, and nothing is cut."""
    lengths = _lengths(sources, targets)
    if not len(lengths) or _fits(lengths, widths).any(axis=1).all():
        return widths
    source, target = np.maximum(lengths.max(axis=0), np.max(widths, axis=0)).tolist()
    return (*widths, (round_up(source), round_up(target)))


def _lengths(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Int64[np.ndarray, "pairs 2"]:
    both = [(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    return np.array(both, np.int64).reshape(-1, 2)


def _fits(lengths: Int64[np.ndarray, "pairs 2"], widths: tuple[Widths, ...]) -> np.ndarray:
    """Whether each pair fits into each group [pairs, groups]."""
    return np.all(lengths[:, None] <= np.array(widths), axis=-1)
