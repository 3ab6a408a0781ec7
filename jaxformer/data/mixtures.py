"""Pairs of several tasks, mixed at chosen rates: each epoch has so many of each, and all of a task take turns."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int64, Integer

from jaxformer.data.packing import Batch
from jaxformer.data.pair_rows import PairRows
from jaxformer.data.pipeline import permutation

# A leading number of its own keeps these orders from those of shuffles and masks.
_ORDER = 0x6D6978


def mixing_rates(
    sizes: Sequence[int], *, limit: int | None = None, temperature: float = 1.0, weights: Sequence[float] | None = None
) -> Float[np.ndarray, " tasks"]:
    """The share of each task (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2).

    r_m = w_m min(e_m, K)^(1/T) / sum_n w_n min(e_n, K)^(1/T)

    Args:
        sizes: e, the examples of each task, at least 1.
        limit: K, so that a task of more examples counts as one of so many; None = no limit.
        temperature: T, at least 1: at 1 shares are those of the sizes, and they near each other as it grows.
        weights: w, a factor for each task, above 0; None = 1 for all. The paper has none.

    Returns:
        The shares, which sum to 1 [tasks].

    Raises:
        ValueError: a number is out of range.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes is {tuple(sizes)}; must be the examples of each task, at least 1.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, must be at least 1 example, or None.")
    if not temperature >= 1.0:
        raise ValueError(f"temperature is {temperature}, must be at least 1.")
    factors = np.ones(len(sizes)) if weights is None else np.array(weights, np.float64)
    if len(factors) != len(sizes) or not np.all((factors > 0) & np.isfinite(factors)):
        raise ValueError(f"weights is {weights}; must be a number above 0 for each of {len(sizes)} tasks.")
    rates = factors * np.minimum(sizes, limit or max(sizes)) ** (1.0 / temperature)
    return rates / rates.sum()


@dataclass(frozen=True)
class _Cell:
    """The rows of one task in one group, and the places that they have in every epoch.

    Over epochs they come in an endless sequence of permutations, cut into pieces of ``quota`` = share[0] / share[1]
    rows on average: each row equally often.
    """

    members: Int64[np.ndarray, " n"]
    share: tuple[int, int]
    first: int

    def before(self, epoch: int) -> int:
        """Rows that the epochs before this one take: epoch * quota, rounded up."""
        return -(-epoch * self.share[0] // self.share[1])

    @property
    def end(self) -> int:
        """The place behind the last: there are as many as the fullest epoch needs."""
        return self.first + self.before(1)


@dataclass(frozen=True, eq=False)
class MixedPairRows:
    """Rows of pairs of several tasks: a ``DrawnGroupedRows``, in whose epochs each task has its share.

    A row is a place in an epoch, and which pair stands there is drawn for each epoch. Of a task of n pairs with c in an
    epoch each is seen c / n times an epoch on average: those of one width go round in orders that are drawn for each
    turn, so that after any number of epochs they differ by one at most. A place that an epoch has no pair for is all
    padding; there is at most one for each task and width.

    Args:
        rows: all pairs, each once.
        owners: the task of each pair, from 0 on [N].
        counts: pairs of each task in an epoch, at least 1.

    Raises:
        ValueError: there is not an owner for each pair, or a task has no pair or none in an epoch.
    """

    rows: PairRows
    owners: Int64[np.ndarray, " N"]
    counts: tuple[int, ...]

    def __post_init__(self):
        if len(self.owners) != len(self.rows):
            raise ValueError(f"owners are {len(self.owners)}; must be {len(self.rows)}, one for each pair.")
        sizes = self._sizes
        if len(sizes) != len(self.counts) or not np.all(sizes) or min(self.counts) < 1:
            raise ValueError(f"counts is {self.counts}; must be at least 1 for each task, whose pairs are {sizes}.")

    @property
    def _sizes(self) -> Int64[np.ndarray, " tasks"]:
        return np.bincount(self.owners, minlength=len(self.counts))

    @cached_property
    def _cells(self) -> list[list[_Cell]]:
        """Of each group the cells with a row, their places in order."""
        found, first, sizes = [], 0, self._sizes.tolist()
        for group in self.rows.groups:
            cells = []
            for task, count in enumerate(self.counts):
                members = group[self.owners[group] == task]
                if len(members):
                    cells.append(_Cell(members, (count * len(members), sizes[task]), first))
                    first = cells[-1].end
            found.append(cells)
        return found

    @cached_property
    def groups(self) -> tuple[Int64[np.ndarray, " _"], ...]:
        """The places of each group."""
        none = np.zeros(0, np.int64)
        return tuple(np.arange(cells[0].first, cells[-1].end) if cells else none for cells in self._cells)

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    @property
    def sources(self) -> Sequence[Integer[np.ndarray, " _"]]:
        """Ids of the source of each pair, each once."""
        return self.rows.sources

    @property
    def targets(self) -> Sequence[Integer[np.ndarray, " _"]]:
        """Ids of the target of each pair, each once."""
        return self.rows.targets

    @property
    def length(self) -> int:
        """Tokens of the widest row, of a source or of a target."""
        return self.rows.length

    @property
    def fill(self) -> float:
        """Fraction of the places in rows of all pairs that hold a token, in [0, 1]."""
        return self.rows.fill

    @property
    def layout(self) -> str:
        """What an epoch has, and the widths."""
        shares = ", ".join(f"{count:,} of {size:,}" for count, size in zip(self.counts, self._sizes.tolist()))
        return f"mixed (an epoch has of each task's pairs {shares}) and {self.rows.layout}"

    def batch(self, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Rows by place, as in epoch 0 of seed 0."""
        return self.drawn_batch(0, 0, indices, group)

    def drawn_batch(self, seed: int, epoch: int, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Rows by place, as in an epoch of a seed; ``len(self)`` or more gives a row that is all padding.

        Returns:
            As of ``PairRows.batch``.
        """
        pairs = [self.pair(seed, epoch, place, group) for place in indices.tolist()]
        return self.rows.batch(np.array(pairs, np.int64), group)

    def pair(self, seed: int, epoch: int, place: int, group: int) -> int:
        """Which pair stands at a place of an epoch; ``len(self.rows)`` = none."""
        number, cell = next(
            ((number, cell) for number, cell in enumerate(self._cells[group]) if cell.first <= place < cell.end),
            (0, None),
        )
        if cell is None or place - cell.first >= cell.before(epoch + 1) - cell.before(epoch):
            return len(self.rows)
        turn, at = divmod(cell.before(epoch) + place - cell.first, len(cell.members))
        return int(cell.members[self._order(len(cell.members), seed, turn, group, number)[at]])

    @cached_property
    def _order(self) -> Callable[[int, int, int, int, int], Int64[np.ndarray, " _"]]:
        """The order of a cell's rows in a turn through them; those of the turns that a batch may be of are kept."""
        cells = sum(map(len, self._cells))
        return functools.lru_cache(maxsize=4 * cells)(_permutation)


def _permutation(count: int, seed: int, turn: int, group: int, cell: int) -> Int64[np.ndarray, " count"]:
    """A permutation that no shuffle of the pipeline has."""
    return permutation(count, _ORDER, seed, turn, group, cell)
