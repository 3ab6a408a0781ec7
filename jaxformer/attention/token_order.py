"""An order of tokens with empty slots: taking tokens into it and putting results back, both without a scatter."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class TokenOrder:
    """Slots that hold the tokens of a sequence of `length`, each at most once.

    Attributes:
      positions: int32 [Q], the token in each slot, -1 for an empty slot.
      length: tokens in the sequence.
    """

    def __init__(self, positions: Int[np.ndarray, "Q"], length: int):
        self.positions = np.asarray(positions, np.int32)
        self.length = length

    @functools.cached_property
    def slots(self) -> Int[np.ndarray, "T"]:
        """The slot of each token, Q for a token without one."""
        slots = np.full(self.length, len(self.positions), np.int32)
        filled = np.flatnonzero(self.positions >= 0)
        slots[self.positions[filled]] = filled
        return slots

    @functools.cached_property
    def has_empty(self) -> bool:
        """Whether any slot is empty."""
        return bool((self.positions < 0).any())

    @functools.cached_property
    def stands(self) -> bool:
        """Whether the tokens stand as they are, with empty slots behind them only."""
        return len(self.positions) >= self.length and np.array_equal(self.slots, np.arange(self.length))

    def take(self, array: Array, axis: int) -> Array:
        """The array's tokens in this order, zeros (or False) in empty slots."""
        if array.shape[axis] == 1 and self.length != 1:
            raise ValueError("an axis of one entry has no order.")
        if self.stands:
            return _pad(array, axis, len(self.positions))
        return _take(array, axis, np.where(self.positions < 0, self.length, self.positions), 0, self.has_empty)

    def put_back(self, array: Array, axis: int, empty: float) -> Array:
        """An array over slots by tokens, `empty` at tokens without a slot."""
        if self.stands:
            return array[(slice(None),) * axis + (slice(self.length),)]
        return _take(array, axis, self.slots, empty, bool((self.slots == len(self.positions)).any()))


def _pad(array: Array, axis: int, size: int) -> Array:
    behind = [(0, 0)] * array.ndim
    behind[axis] = (0, size - array.shape[axis])
    return array if array.shape[axis] == size else jnp.pad(array, behind)


def _take(array: Array, axis: int, index: Int[np.ndarray, "_"], empty: float, has_empty: bool) -> Array:
    """Entries by index; those one past the end are empty."""
    if has_empty:
        return jnp.take(array, index, axis, mode="fill", fill_value=empty)
    return jnp.take(array, index, axis, mode="clip", unique_indices=True)
