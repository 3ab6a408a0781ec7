"""What is known of whole blocks of positions, so that most need no look at their pairs."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

# For pairs of blocks: whether any pair of positions may be visible, and whether all surely are.
Bounds = tuple[Bool[np.ndarray, "P"], Bool[np.ndarray, "P"]]


class Spans:
    """The positions in one side's block of every pair, for tests of whole blocks at once; arrays are [P]."""

    def __init__(self, order: Int[np.ndarray, "S"], starts: Int[np.ndarray, "P"], size: int) -> None:
        unique, self._index = np.unique(starts, return_inverse=True)
        self._positions = order[unique[:, None] + np.arange(size)]
        self._present = self._positions >= 0
        self.low = self._positions.min(1, where=self._present, initial=2**31 - 1)[self._index].astype(np.int64)
        self.high = self._positions.max(1, where=self._present, initial=-1)[self._index].astype(np.int64)
        self.whole = np.asarray(self._present.all(1))[self._index]
        self.some = np.asarray(self._present.any(1))[self._index]

    def hold(self, test: Callable[[np.ndarray], np.ndarray]) -> tuple[Bool[np.ndarray, "P"], Bool[np.ndarray, "P"]]:
        """Whether any, and whether every position passes a test."""
        passed = np.asarray(test(self._positions))
        some, every = np.asarray((passed & self._present).any(1)), np.asarray((passed | ~self._present).all(1))
        return some[self._index], every[self._index]

    def common(self, number: Callable[[np.ndarray], np.ndarray]) -> Int[np.ndarray, "P"]:
        """The non-negative number that all positions share; -1 where they differ."""
        numbers = np.asarray(number(self._positions))
        low = numbers.min(1, where=self._present, initial=2**31 - 1)
        high = numbers.max(1, where=self._present, initial=-1)
        return np.where(low == high, low, -1)[self._index]
