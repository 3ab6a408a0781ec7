"""Batches of rows: shuffled for training, in order for evaluation; part of each for every process."""

import functools
import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer

from jaxformer.data.packing import Batch


@runtime_checkable
class Rows(Protocol):
    """Rows of one shape with random access, as ``TokenRows``."""

    def __len__(self) -> int: ...

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index; an index of ``len(self)`` or more gives a row that is all padding, with no target."""


@runtime_checkable
class DrawnRows(Rows, Protocol):
    """Rows of one shape that are drawn anew each time they are seen, as ``MaskedRows``; ``batch`` has a fixed draw."""

    def drawn_batch(self, seed: int, epochs: Integer[np.ndarray, " B"], indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, each as it is drawn in an epoch: a pure function of seed, epoch and index."""


@runtime_checkable
class GroupedRows(Protocol):
    """Rows of several shapes with random access, in groups of one shape each, as ``PairRows``."""

    @property
    def groups(self) -> tuple[Int64[np.ndarray, " _"], ...]:
        """The rows of each group; every row is in one. A group may be empty."""

    def __len__(self) -> int: ...

    def batch(self, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Rows of a group by index; one of ``len(self)`` or more gives a row that is all padding, with no target."""


@runtime_checkable
class DrawnGroupedRows(GroupedRows, Protocol):
    """Rows in groups whose places have other rows in every epoch, as ``MixedPairRows``; ``batch`` has a fixed draw."""

    def drawn_batch(self, seed: int, epoch: int, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Rows of a group by place in an epoch: a pure function of seed, epoch and place."""


@runtime_checkable
class Examples(Protocol):
    """Rows of one shape without end, each made from a seed and its index, as ``TaskExamples``."""

    def batch(self, seed: int, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, any from 0 on."""


@runtime_checkable
class BatchIterator(Protocol):
    """What the pipelines return: grain's ``DatasetIterator``, made ready ahead by a thread, never by a process."""

    def __iter__(self) -> "BatchIterator": ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON can hold it: batches given out, whatever was made ready ahead."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position."""

    def start_prefetch(self) -> None:
        """Begins to make batches ready."""

    def close(self) -> None:
        """Ends the thread; the iterator cannot be used after. Done too when the iterator is garbage collected."""


def train_batches(
    rows: Rows | GroupedRows | Examples,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 2,
) -> BatchIterator:
    """Batches without end, over epochs that are each shuffled anew.

    Examples without end have no epochs: batch k is examples k * batch_size to (k + 1) * batch_size - 1. Of rows, epoch
    e is a permutation of all rows that depends on (seed, e) alone, and batches run on over the end of an epoch,
    so in each epoch each row comes exactly once; rows that are drawn are drawn for (seed, e). Of rows in groups, every
    batch is of one group: in an epoch the rows of each group are permuted and cut into batches, the last one filled up
    with rows that have no target, and the batches of all groups are permuted; so each row comes exactly once (each
    place, where these have other rows in every epoch), and every epoch has as many batches. Batch k is the same rows in
    the same order for any number of processes: process i gets the i-th part of it.

    Args:
        rows: the rows, in groups or not, or examples without end.
        batch_size: rows of a batch over all processes.
        seed: of the shuffles, or of the examples; at least 0.
        process_index: which part of each batch.
        process_count: number of parts; divides batch_size.
        prefetch: batches made ready in the background; 0 = none.

    Returns:
        An iterator with ``get_state`` and ``set_state``: from a state it goes on exactly, in another process too.

    Raises:
        ValueError: a number is out of range, or there are no rows.
    """
    if isinstance(rows, Rows) and not len(rows):
        raise ValueError("there are no rows to train on: the training documents are empty.")
    if seed < 0:
        raise ValueError(f"seed is {seed}, must be at least 0.")
    part = _part(batch_size, process_index, process_count)
    if isinstance(rows, GroupedRows):
        return _iterate(_GroupedBatches(rows, batch_size, part, seed), prefetch)
    if not isinstance(rows, Rows):
        return _iterate(_ExampleBatches(rows, batch_size, part, seed), prefetch)
    return _iterate(_Batches(rows, batch_size, part, seed), prefetch)


def eval_batches(
    rows: Rows | GroupedRows, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch: int = 2
) -> BatchIterator:
    """All rows once, in order, in batches of one shape; of rows in groups one group after the other.

    Args:
        rows: the rows, in groups or not.
        batch_size: rows of a batch over all processes.
        process_index: which part of each batch.
        process_count: number of parts; divides batch_size.
        prefetch: batches made ready in the background; 0 = none.

    Returns:
        A finite iterator of ceil(rows / batch_size) batches, for every process; the last is filled up with rows that
        have no target. Of rows in groups that holds for each group.

    Raises:
        ValueError: a number is out of range.
    """
    part = _part(batch_size, process_index, process_count)
    if isinstance(rows, GroupedRows):
        return _iterate(_GroupedBatches(rows, batch_size, part, None), prefetch)
    return _iterate(_Batches(rows, batch_size, part, None), prefetch)


def _part(batch_size: int, process_index: int, process_count: int) -> slice:
    """The rows of a batch that a process gets."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, must be at least 1.")
    if process_count < 1 or batch_size % process_count:
        raise ValueError(f"batch_size is {batch_size}, must be a multiple of process_count = {process_count}.")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}, must be in 0 to {process_count - 1}.")
    size = batch_size // process_count
    return slice(process_index * size, (process_index + 1) * size)


class _Batches:
    """Batch k of the sequence, for any k: what grain calls a random-access source.

    grain's own shuffle is not used: it takes milliseconds an index where there are few rows, and the orders of seed 1
    are those of seed 0 an epoch later.
    """

    def __init__(self, rows: Rows, batch_size: int, part: slice, seed: int | None):
        self._rows = rows
        self._drawn = rows if isinstance(rows, DrawnRows) else None
        self._batch_size = batch_size
        self._part = part
        self._seed = seed
        # Two epochs, for the batches that run over a border.
        self._order = functools.lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        return sys.maxsize if self._seed is not None else -(-len(self._rows) // self._batch_size)

    def __getitem__(self, number: int) -> Batch:
        wanted = np.arange(number * self._batch_size, (number + 1) * self._batch_size)[self._part]
        if self._seed is None:
            return self._rows.batch(wanted)
        epochs, places = np.divmod(wanted, len(self._rows))
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            wanted[inside] = self._order(int(epoch))[places[inside]]
        if self._drawn is not None:
            return self._drawn.drawn_batch(self._seed, epochs, wanted)
        return self._rows.batch(wanted)

    def _epoch_order(self, epoch: int) -> Int64[np.ndarray, " rows"]:
        return permutation(len(self._rows), self._seed or 0, epoch)


def permutation(count: int, *entropy: int) -> Int64[np.ndarray, " count"]:
    """A permutation from sorted random numbers: bit generators never change between versions, shuffles may."""
    random = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(random, kind="stable")


class _GroupedBatches:
    """The same for rows in groups: each batch of one group, the batches of all groups mixed."""

    def __init__(self, rows: GroupedRows, batch_size: int, part: slice, seed: int | None):
        self._rows = rows
        self._drawn = rows if isinstance(rows, DrawnGroupedRows) else None
        self._batch_size = batch_size
        self._part = part
        self._seed = seed
        counts = [-(-len(group) // batch_size) for group in rows.groups]
        # Of each batch of an epoch, before they are mixed: its group, and which one it is of that group's.
        self._group_of = np.repeat(np.arange(len(counts)), counts)
        self._place_of = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])
        self._order = functools.lru_cache(maxsize=1)(self._epoch_order)
        self._rows_of = functools.lru_cache(maxsize=len(counts) or 1)(self._group_order)

    def __len__(self) -> int:
        return sys.maxsize if self._seed is not None else len(self._group_of)

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, len(self._group_of))
        if self._seed is not None:
            place = int(self._order(epoch)[place])
        group = int(self._group_of[place])
        members = self._rows_of(epoch, group)
        start = int(self._place_of[place]) * self._batch_size
        wanted = np.full(self._batch_size, len(self._rows), np.int64)
        found = members[start : start + self._batch_size]
        wanted[: len(found)] = found
        if self._drawn is not None and self._seed is not None:
            return self._drawn.drawn_batch(self._seed, epoch, wanted[self._part], group)
        return self._rows.batch(wanted[self._part], group)

    def _epoch_order(self, epoch: int) -> Int64[np.ndarray, " batches"]:
        return permutation(len(self._group_of), self._seed or 0, epoch)

    def _group_order(self, epoch: int, group: int) -> Int64[np.ndarray, " _"]:
        members = self._rows.groups[group]
        if self._seed is None:
            return members
        # From 1 on: numbers that end in 0 give the same stream as without it.
        return members[permutation(len(members), self._seed, epoch, group + 1)]


class _ExampleBatches:
    """The same for examples without end, which need no order."""

    def __init__(self, examples: Examples, batch_size: int, part: slice, seed: int):
        self._examples = examples
        self._batch_size = batch_size
        self._part = part
        self._seed = seed

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: int) -> Batch:
        wanted = np.arange(number * self._batch_size, (number + 1) * self._batch_size)[self._part]
        return self._examples.batch(self._seed, wanted)


def _iterate(batches: _Batches | _GroupedBatches | _ExampleBatches, prefetch: int) -> BatchIterator:
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}, must be at least 0.")
    import grain

    # One thread: batches are cheap, and more would contend for the interpreter's lock.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))
