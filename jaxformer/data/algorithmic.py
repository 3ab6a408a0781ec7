"""Algorithmic tasks as data: an endless stream of training examples, and fixed examples for each test length.

An example is a pure function of seed, index and length range, so a run goes on exactly at any step. A row holds the
question, then the answer; only the answer's tokens are targets.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer, UInt64

from jaxformer.data.packing import IGNORE_LABEL, Batch
from jaxformer.data.symbol_tokenizer import SymbolTokenizer
from jaxformer.data.tasks import PARITY_SYMBOLS, TASKS, Size, Task

# Streams of one seed: each draws numbers that no other does.
TRAINING, VALIDATION, TEST = range(3)
_MAX_LENGTH = 2**20


@dataclass(frozen=True)
class TaskExamples:
    """Examples of one task without end, each by its index.

    Args:
        task: the task.
        size: what all examples of a run have in common.
        lengths: (lowest, highest) length of a question, in symbols; drawn uniformly.
        length: tokens of a row; at least ``needed``.
        stream: which stream of a seed's random numbers.
    """

    task: Task
    size: Size
    lengths: tuple[int, int]
    length: int
    stream: int = TRAINING

    @staticmethod
    def needed(task: Task, size: Size, longest: int) -> int:
        """Tokens of a row for questions of at most so many symbols: question, answer and its end."""
        question, answer = task.example(np.zeros(2 * longest, np.uint64), longest, size)
        return len(question) + len(answer) + task.ends

    def batch(self, seed: int, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Examples by index, any from 0 to 2^63 - 1, as the training step takes them.

        Args:
            seed: another seed gives other examples; at least 0.
            indices: examples wanted [B].

        Returns:
            tokens and targets int32 [B, length], the targets -100 but for the answer, and key_mask bool [B, length],
            False in the padding at the end.
        """
        tokenizer = self.tokenizer
        tokens = np.full((len(indices), self.length), tokenizer.pad_id, np.int32)
        targets = np.full(tokens.shape, IGNORE_LABEL, np.int32)
        for row, index in enumerate(indices.tolist()):
            question, answer = self.example(seed, index)
            whole = np.concatenate([question, answer])
            tokens[row, : len(whole)] = whole
            targets[row, len(question) - 1 : len(whole) - 1] = answer
        return {"tokens": tokens, "targets": targets, "key_mask": tokens != tokenizer.pad_id}

    def example(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of question and answer, the id that ends the answer included where the task has one."""
        low, high = self.lengths
        # The counter's third word is the index: before one example's numbers reach another's they are 2^128.
        bits = np.random.Philox(key=_philox_key(seed, self.stream), counter=[0, 0, index, 0])
        numbers = bits.random_raw(1 + 2 * high)
        length = low + int(numbers[0] % np.uint64(high - low + 1))
        question, answer = self.task.example(numbers[1:], length, self.size)
        ending = [self.tokenizer.eos_id] if self.tokenizer.eos_id is not None else []
        return question, np.array([*answer, *ending], np.int64)

    @functools.cached_property
    def tokenizer(self) -> SymbolTokenizer:
        """That of the task."""
        return self.task.tokenizer(self.size)


@functools.lru_cache(maxsize=64)
def _philox_key(seed: int, stream: int) -> UInt64[np.ndarray, " 2"]:
    return np.random.SeedSequence([seed, stream]).generate_state(2, np.uint64)


@dataclass(frozen=True)
class TaskRows:
    """So many examples of one seed, in order.

    Args:
        examples: where they come from.
        seed: of the examples.
        count: how many.
    """

    examples: TaskExamples
    seed: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.examples.length

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index; an index of ``len(self)`` or more gives a row that is all padding."""
        batch = self.examples.batch(self.seed, indices)
        absent = indices >= self.count
        for name, filling in (
            ("tokens", self.examples.tokenizer.pad_id),
            ("targets", IGNORE_LABEL),
            ("key_mask", False),
        ):
            batch[name][absent] = filling
        return batch


@dataclass(frozen=True)
class AlgorithmicData:
    """Examples of one task for training and evaluation.

    Args:
        train_rows: training examples without end, of the training lengths.
        validation_rows: other examples of the training lengths.
        buckets: examples of each test length alone, by "length_<symbols>".
        tokenizer: names of the ids.
    """

    train_rows: TaskExamples
    validation_rows: TaskRows
    buckets: Mapping[str, TaskRows]
    tokenizer: SymbolTokenizer

    @property
    def bits_per(self) -> dict[str, int]:
        """What bits are counted by: nothing here."""
        return {}

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max([self.train_rows.length, *(rows.length for rows in self.buckets.values())])

    @functools.cached_property
    def hash(self) -> str:
        """Digest of what training reads, by its settings and first examples: 16 hexadecimal digits."""
        rows = self.train_rows
        settings = (rows.task.name, rows.size.num_symbols, rows.lengths, rows.length)
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
        for array in rows.batch(0, np.arange(16)).values():
            digest.update(array.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def baselines(self) -> str:
        """A line on what guessing reaches."""
        task, size = self.train_rows.task, self.train_rows.size
        choices = 2 if task.num_symbols is None else size.num_symbols - (not task.ends)
        return (
            f"for scale: a guess among {choices} symbols has a loss of {math.log(choices):.4f} nats per token and "
            f"an accuracy of {1 / choices:.4f}"
        )

    @property
    def summary(self) -> str:
        """A line on task, lengths and sizes."""
        rows, (low, high) = self.train_rows, self.train_rows.lengths
        tests = ", ".join(str(bucket.examples.lengths[0]) for bucket in self.buckets.values()) or "none"
        count = len(next(iter(self.buckets.values()))) if self.buckets else 0
        return (
            f"task {rows.task.name} ({rows.task.summary}); lengths {low} to {high} in rows of {rows.length}, drawn "
            f"without end; validation {len(self.validation_rows):,} others; test lengths {tests}, {count:,} each; "
            f"tokenizer {self.tokenizer.summary}"
        )


def load_algorithmic_data(
    *,
    name: str = "copy",
    min_length: int = 1,
    max_length: int = 20,
    test_lengths: tuple[int, ...] = (20, 40, 80),
    num_symbols: int | None = None,
    length: int | None = None,
    validation_examples: int = 512,
    test_examples: int = 128,
    test_seed: int = 0,
) -> AlgorithmicData:
    """Makes the examples of a task.

    Short words are few, so training meets the short ones of validation and tests too; of words of n symbols there are
    num_symbols^n.

    Args:
        name: a task of ``TASKS``.
        min_length: shortest question in training, in symbols (digits of each number; entries that are not zero).
        max_length: longest question in training, in symbols.
        test_lengths: lengths to test at, in symbols, those beyond max_length included.
        num_symbols: different symbols (the base of numbers); None = the task's own number.
        length: tokens of a training row; None = as many as the longest needs.
        validation_examples: examples of the training lengths for validation.
        test_examples: examples of each test length.
        test_seed: of validation and test examples: the same in runs of other training seeds.

    Returns:
        The data; the seed of training comes with each batch.

    Raises:
        ValueError: an unknown task, or a number out of range.
    """
    if name not in TASKS:
        raise ValueError(f"name is {name!r}; must be one of {', '.join(TASKS)}.")
    task = TASKS[name]
    check_lengths(min_length, max_length, test_lengths)
    for argument, value in (("validation_examples", validation_examples), ("test_examples", test_examples)):
        if value < 1:
            raise ValueError(f"{argument} is {value}, must be at least 1.")
    if test_seed < 0:
        raise ValueError(f"test_seed is {test_seed}, must be at least 0.")
    size = Size(number_of_symbols(task, num_symbols), max((max_length, *test_lengths)))
    needed = TaskExamples.needed(task, size, max_length)
    if length is not None and length < needed:
        raise ValueError(f"length is {length}, must be at least the {needed} tokens of the longest {name}, or None.")
    row = needed if length is None else length
    train = TaskExamples(task, size, (min_length, max_length), row)
    validation = TaskExamples(task, size, (min_length, max_length), row, VALIDATION)
    buckets = {}
    for number in sorted(set(test_lengths)):
        # A row as long as in training where that is enough.
        test = TaskExamples(
            task, size, (number, number), max(row, TaskExamples.needed(task, size, number)), TEST + number
        )
        buckets[f"length_{number}"] = TaskRows(test, test_seed, test_examples)
    rows = TaskRows(validation, test_seed, validation_examples)
    return AlgorithmicData(train, rows, buckets, train.tokenizer)


def check_lengths(min_length: int, max_length: int, test_lengths: tuple[int, ...]) -> None:
    """Raises ValueError for lengths of words that are out of range or order."""
    if not 1 <= min_length <= max_length < _MAX_LENGTH:
        raise ValueError(
            f"min_length is {min_length} and max_length {max_length}; they must be 1 or more, in this order."
        )
    wrong = [length for length in test_lengths if not 1 <= length < _MAX_LENGTH]
    if wrong:
        raise ValueError(f"test_lengths holds {wrong[0]}; each must be at least 1.")


def number_of_symbols(task: Task, num_symbols: int | None) -> int:
    """How many symbols a task has of those asked for (None = its own number). Raises ValueError for a wrong number."""
    if task.num_symbols is None:
        if num_symbols is not None:
            raise ValueError(f"num_symbols is {num_symbols}; {task.name} has symbols of its own, so it must be None.")
        return len(PARITY_SYMBOLS)
    chosen = task.num_symbols if num_symbols is None else num_symbols
    if chosen < 3:
        raise ValueError(f"num_symbols is {chosen}, must be at least 3.")
    return chosen
