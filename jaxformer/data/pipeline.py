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
    rows: Rows | Examples,
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
    so in each epoch each row comes exactly once. Batch k is the same rows in the same order for any number of
    processes: process i gets the i-th part of it.

    Args:
        rows: the rows, or examples without end.
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
    if not isinstance(rows, Rows):
        return _iterate(_ExampleBatches(rows, batch_size, part, seed), prefetch)
    return _iterate(_Batches(rows, batch_size, part, seed), prefetch)


def eval_batches(
    rows: Rows, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch: int = 2
) -> BatchIterator:
    """All rows once, in order, in batches of one shape.

    Args:
        rows: the rows.
        batch_size: rows of a batch over all processes.
        process_index: which part of each batch.
        process_count: number of parts; divides batch_size.
        prefetch: batches made ready in the background; 0 = none.

    Returns:
        A finite iterator of ceil(rows / batch_size) batches, for every process; the last is filled up with rows that
        have no target.

    Raises:
        ValueError: a number is out of range.
    """
    return _iterate(_Batches(rows, batch_size, _part(batch_size, process_index, process_count), None), prefetch)


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
        return self._rows.batch(wanted)

    def _epoch_order(self, epoch: int) -> Int64[np.ndarray, " rows"]:
        """A permutation from sorted random numbers: bit generators never change between versions, shuffles may."""
        random = np.random.Philox(np.random.SeedSequence([self._seed or 0, epoch])).random_raw(len(self._rows))
        return np.argsort(random, kind="stable")


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


def _iterate(batches: _Batches | _ExampleBatches, prefetch: int) -> BatchIterator:
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}, must be at least 0.")
    import grain

    # One thread: batches are cheap, and more would contend for the interpreter's lock.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))
