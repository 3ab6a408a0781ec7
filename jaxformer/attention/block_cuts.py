"""Pairs of blocks, and the ways to cut what they need from whole arrays and to put results back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxformer.attention.block_layout import cut, cut_beyond, filled, paste, rearranged

# First query and first key of a pair of blocks, and what else its plan knows of it.
Pair: TypeAlias = Int[Array, "_"]


@dataclass(frozen=True, eq=False)
class PairGroup:
    """Pairs of blocks that are treated alike.

    Attributes:
      pairs: first query and first key of each, and further columns for the functions below.
      visible: bool that broadcasts to [B, K, G, q, s]: which entries of a pair count; None for all.
    """

    pairs: Int[np.ndarray, "_ _"]
    visible: Callable[[Pair], Array] | None


@dataclass(frozen=True, eq=False)
class Blocks:
    """What to compute, and how one pair of blocks differs from a plain product.

    Attributes:
      query_block, key_block: tokens in a block.
      groups: all pairs of blocks.
      skips: whether pairs may turn out to be hidden as a whole, which is then found out beforehand.
      added: bias of a pair, broadcasting to [B, N, q, s], or None.
      add_gradient: (sums, pair, gradient of the pair's logits [B, K, G, q, s]) to sums of gradients of the bias.
      dropout_rate, rng: fraction of the weights that is dropped, and one typed key.
      query_slots, key_slots: places for tokens; of arrays that are only read, empty ones at the end may be left out.
      first_at_query, first_at_key: no pair is met by queries (keys) that another pair, here or before, has met: what
        is under way there need not be read.
    """

    query_block: int
    key_block: int
    groups: tuple[PairGroup, ...]
    skips: bool
    added: Callable[[Pair], Array | None] = lambda pair: None
    add_gradient: Callable[[list[Array], Pair, Array], list[Array]] = lambda sums, pair, d_logits: sums
    dropout_rate: float = 0.0
    rng: Any = None
    query_slots: int = 0
    key_slots: int = 0
    first_at_query: bool = False
    first_at_key: bool = False

    def at_query(self, array: Array, pair: Pair) -> Array:
        """The part of an array [B, K, G, T, ..] that belongs to the pair's queries."""
        return self._cut_queries(array, pair[0], self.query_block)

    def at_key(self, array: Array, pair: Pair) -> Array:
        """The part of an array [B, K, S, ..] that belongs to the pair's keys."""
        return self._cut_keys(array, pair[1], self.key_block)

    def put_query(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_query` gives replaced."""
        return paste(array, block, 3, pair[0])

    def put_key(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_key` gives replaced."""
        return paste(array, block, 2, pair[1])

    def _cut_queries(self, array: Array, start: Array, size: int) -> Array:
        return (cut_beyond if array.shape[3] < self.query_slots else cut)(array, 3, start, size)

    def _cut_keys(self, array: Array, start: Array, size: int) -> Array:
        return (cut_beyond if array.shape[2] < self.key_slots else cut)(array, 2, start, size)


@dataclass(frozen=True, eq=False)
class Runs(Blocks):
    """Blocks of which a run of neighbours is computed at once, as if they were further heads: [B, K run, G, block, H].

    Attributes:
      run: pairs of blocks in a run.
    """

    run: int = 1

    def at_query(self, array: Array, pair: Pair) -> Array:
        """The part of an array that belongs to the run's queries."""
        part = self._cut_queries(array, pair[0], self.run * self.query_block)
        part = part.reshape(*part.shape[:3], self.run, -1, *part.shape[4:]).swapaxes(2, 3)
        return part.reshape(len(part), -1, *part.shape[3:])

    def at_key(self, array: Array, pair: Pair) -> Array:
        """The part of an array that belongs to the run's keys."""
        part = self._cut_keys(array, pair[1], self.run * self.key_block)
        return part.reshape(len(part), -1, self.key_block, *part.shape[3:])

    def put_query(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_query` gives replaced."""
        part = block.reshape(len(block), -1, self.run, *block.shape[2:]).swapaxes(2, 3)
        return paste(array, part.reshape(*part.shape[:3], -1, *part.shape[5:]), 3, pair[0])

    def put_key(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_key` gives replaced."""
        return paste(array, block.reshape(*array.shape[:2], -1, *array.shape[3:]), 2, pair[1])


@dataclass(frozen=True, eq=False)
class Lanes(Runs):
    """Runs whose blocks hold every `stride`-th token, cut from tokens as they stand, `stride` of them a row.

    Attributes:
      stride: of tokens in a block.
    """

    stride: int = 1

    def at_query(self, array: Array, pair: Pair) -> Array:
        """The part of an array that belongs to the run's queries."""
        part = rearranged(jnp.moveaxis(self._cut(array, 3, pair[0], self.query_block), 4, 2))
        return part.reshape(len(part), -1, *part.shape[3:])

    def at_key(self, array: Array, pair: Pair) -> Array:
        """The part of an array that belongs to the run's keys."""
        part = rearranged(self._cut(array, 2, pair[1], self.key_block).swapaxes(2, 3))
        return part.reshape(len(part), -1, *part.shape[3:])

    def put_query(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_query` gives replaced."""
        part = block.reshape(len(block), -1, self.run, *block.shape[2:])
        return self._paste(array, jnp.moveaxis(part, 2, 4), 3, pair[0])

    def put_key(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_key` gives replaced."""
        part = block.reshape(len(block), -1, self.run, *block.shape[2:])
        return self._paste(array, part.swapaxes(2, 3), 2, pair[1])

    def _cut(self, array: Array, axis: int, start: Array, block: int) -> Array:
        """[.., block, run, ..] for the run of blocks that starts at a slot."""
        row, lane = self._place(start, block)
        length = array.shape[axis]
        if length >= (self.key_slots if axis == 2 else self.query_slots):
            return self._cut_rows(array, axis, row, lane, block)
        if block * self.stride <= length:
            array = cut_beyond(array, axis, row * self.stride, block * self.stride)
            return self._cut_rows(array, axis, jnp.zeros_like(row), lane, block)
        # Each lane is one block; its last row, which ends early, is cut for itself.
        whole, last = jnp.split(array, [(block - 1) * self.stride], axis)
        last = filled(last, axis, self.stride)
        rows = self._cut_rows(whole, axis, row, lane, block - 1), self._cut_rows(last, axis, row, lane, 1)
        return jnp.concatenate(rows, axis)

    def _cut_rows(self, array: Array, axis: int, row: Array, lane: Array, count: int) -> Array:
        rows = self._in_rows(array, axis)
        starts: list[Any] = [jnp.zeros_like(row)] * rows.ndim  # All of one dtype, in 64 bits too.
        sizes = list(rows.shape)
        starts[axis : axis + 2] = row, lane
        sizes[axis : axis + 2] = count, self.run
        return lax.dynamic_slice(rows, starts, sizes)

    def _paste(self, array: Array, part: Array, axis: int, start: Array) -> Array:
        starts: list[Any] = [jnp.zeros_like(start)] * part.ndim
        starts[axis : axis + 2] = self._place(start, part.shape[axis])
        return lax.dynamic_update_slice(self._in_rows(array, axis), part, starts).reshape(array.shape)

    def _in_rows(self, array: Array, axis: int) -> Array:
        return array.reshape(*array.shape[:axis], -1, self.stride, *array.shape[axis + 1 :])

    def _place(self, start: Array, block: int) -> tuple[Array, Array]:
        """First row and lane of the blocks that start at a slot."""
        number = start // block
        return number // self.stride * block, number % self.stride


@dataclass(frozen=True, eq=False)
class Batches(Blocks):
    """Several pairs of blocks at once that share no token, as if they were further heads: [B, pairs K, G, block, H].

    A pair, as the functions here call it, is a batch of them: all first queries, then all first keys.
    """

    def at_query(self, array: Array, pair: Pair) -> Array:
        """The parts of an array that belong to the batch's queries."""
        return jnp.concatenate(
            [self._cut_queries(array, start, self.query_block) for start in jnp.split(pair, 2)[0]], 1
        )

    def at_key(self, array: Array, pair: Pair) -> Array:
        """The parts of an array that belong to the batch's keys."""
        return jnp.concatenate([self._cut_keys(array, start, self.key_block) for start in jnp.split(pair, 2)[1]], 1)

    def put_query(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_query` gives replaced."""
        for start, part in zip(jnp.split(pair, 2)[0], jnp.split(block, len(pair) // 2, 1)):
            array = paste(array, part, 3, start)
        return array

    def put_key(self, array: Array, block: Array, pair: Pair) -> Array:
        """The array with what `at_key` gives replaced."""
        for start, part in zip(jnp.split(pair, 2)[1], jnp.split(block, len(pair) // 2, 1)):
            array = paste(array, part, 2, start)
        return array
