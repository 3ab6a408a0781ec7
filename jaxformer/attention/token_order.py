"""An order of tokens with empty slots: taking tokens into it and putting results back, without a scatter if many."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxformer.attention.block_layout import filled, rearranged

# A whole pass over all tokens costs less than a scatter unless there are so many times more tokens than slots.
FEW = 8


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
    def index(self) -> Int[np.ndarray, "Q"]:
        """The token in each slot, one past the last for an empty slot."""
        return np.where(self.positions < 0, self.length, self.positions)

    @functools.cached_property
    def few(self) -> bool:
        """Whether there are so few slots that what they hold is better put among the tokens one by one."""
        return FEW * len(self.positions) <= self.length

    @functools.cached_property
    def has_empty(self) -> bool:
        """Whether any slot is empty."""
        return bool((self.positions < 0).any())

    @functools.cached_property
    def stands(self) -> bool:
        """Whether the tokens stand as they are, with empty slots behind them only."""
        return len(self.positions) >= self.length and np.array_equal(self.slots, np.arange(self.length))

    def held(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """The shape with all slots along an axis."""
        return (*shape[:axis], len(self.positions), *shape[axis + 1 :])

    def take(self, array: Array, axis: int) -> Array:
        """The array's tokens in this order, zeros (or False) in empty slots; without these where the tokens stand."""
        if array.shape[axis] == 1 and self.length != 1:
            raise ValueError("an axis of one entry has no order.")
        if self.stands:
            return rearranged(array)
        return _take(array, axis, self.index, 0, self.has_empty)

    def fill(self, array: Array, axis: int) -> Array:
        """The same with zeros (or False) in all empty slots."""
        return filled(self.take(array, axis), axis, len(self.positions))

    def put_back(self, array: Array, axis: int, empty: float) -> Array:
        """An array over slots by tokens, `empty` at tokens without a slot."""
        if self.stands:
            return lax.slice_in_dim(array, 0, self.length, axis=axis)
        return _take(array, axis, self.slots, empty, bool((self.slots == len(self.positions)).any()))

    def replace(self, array: Array, axis: int, rows: Array) -> Array:
        """An array over tokens with those that have a slot replaced."""
        return array.at[(slice(None),) * axis + (self.index,)].set(rows, mode="drop")

    def add(self, array: Array, axis: int, rows: Array) -> Array:
        """An array over tokens with an array over slots added."""
        return array.at[(slice(None),) * axis + (self.index,)].add(rows, mode="drop")


def _take(array: Array, axis: int, index: Int[np.ndarray, "_"], empty: float, has_empty: bool) -> Array:
    """Entries by index; those one past the end are empty."""
    if has_empty:
        return rearranged(jnp.take(array, index, axis, mode="fill", fill_value=empty))
    return rearranged(jnp.take(array, index, axis, mode="clip", unique_indices=True))
