"""Examples of a task for fine-tuning: rows for the loss, texts to predict from, and what they share."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxformer.data.example_rows import ExampleRows, row_widths
from jaxformer.data.splits import split_indices
from jaxformer.data.tokenizers import Tokenizer, load_tokenizer


@runtime_checkable
class TaskExamples(Protocol):
    """Examples of one split, with their texts."""

    def __len__(self) -> int: ...

    @property
    def rows(self) -> ExampleRows:
        """Their rows, in one group."""


Examples = TypeVar("Examples", bound=TaskExamples)


@dataclass(frozen=True, eq=False)
class TaskData(Generic[Examples]):
    """Rows, and the examples that they come from.

    Args:
        task: "classification", "regression", "tagging" or "answers".
        train_rows: rows of the training examples.
        rows: rows of "validation" and, where there is one, "test".
        tokenizer: theirs.
        classes: what each class id stands for; none of "regression" and "answers".
        splits: the examples of "train", "validation" and, where there is one, "test".
        source: a line on where they come from.
        baselines: a line on what can be reached without reading.
    """

    task: str
    train_rows: ExampleRows
    rows: Mapping[str, ExampleRows]
    tokenizer: Tokenizer
    classes: tuple[str, ...]
    splits: Mapping[str, Examples] = field(repr=False)
    source: str
    baselines: str

    @property
    def validation_rows(self) -> ExampleRows:
        """Rows whose figures choose the best checkpoint."""
        return self.rows["validation"]

    @property
    def buckets(self) -> dict[str, ExampleRows]:
        """Rows that are evaluated apart during training: none here."""
        return {}

    @property
    def bits_per(self) -> dict[str, int]:
        """What bits are counted by: nothing here."""
        return {}

    @property
    def max_length(self) -> int:
        """Tokens of the widest row of any split."""
        return max(rows.length for rows in (self.train_rows, *self.rows.values()))

    @functools.cached_property
    def hash(self) -> str:
        """Digest of all that training reads: 16 hexadecimal digits."""
        digest = hashlib.blake2b(f"{self.task} {self.classes};".encode(), digest_size=8)
        for rows in (self.train_rows, self.validation_rows):
            digest.update(f"{rows.widths};".encode())
            columns = [(name, values) for name, (values, _) in (*rows.per_token.items(), *rows.per_row.items())]
            for name, values in (("tokens", rows.tokens), *columns):
                digest.update(f"{name};".encode())
                for array in values:
                    digest.update(np.atleast_1d(array).astype("<f8").tobytes() + b";")
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        """A line on source, sizes, classes and tokenizer."""
        sizes = ", ".join(f"{name} {len(examples):,}" for name, examples in self.splits.items())
        classes = f"; classes {', '.join(self.classes)}" if self.classes else ""
        widths = ", ".join(map(str, self.train_rows.widths))
        return (
            f"{self.source}; {self.task}, examples: {sizes}{classes}; {len(self.train_rows):,} training rows of at "
            f"most {widths} tokens; tokenizer {self.tokenizer.summary}"
        )


def task_tokenizer(tokenizer: str | Tokenizer) -> Tokenizer:
    """The tokenizer, which has a start and an end. Raises ValueError otherwise."""
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if loaded.bos_id is None or loaded.eos_id is None:
        raise ValueError(f"tokenizer {loaded.name!r} has no start or no end token, which a row needs.")
    return loaded


def in_groups(
    examples: Mapping[str, Examples], num_buckets: int, length: int
) -> tuple[ExampleRows, dict[str, ExampleRows]]:
    """Rows of "train" and of the other splits, in groups of the widths that fit training, none above ``length``."""
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, must be at least 1.")
    widths = row_widths(examples["train"].rows.tokens, num_buckets)
    rows = {split: one.rows.widened(widths, length) for split, one in examples.items()}
    return rows.pop("train"), rows


Read = TypeVar("Read")


def read_splits(
    read: Callable[[str], Read],
    take: Callable[[Read, Sequence[int]], Read],
    keys: Callable[[Read], Sequence[str]],
    paths: Mapping[str, Sequence[str]],
    fraction: float,
    seed: int,
) -> dict[str, Read]:
    """What is read of each split; without validation a share of the training examples is held out.

    Args:
        read: reads one file.
        take: some of the examples, by index.
        keys: the text of each example: those with equal texts are on one side.
        paths: the file of "train", "validation" and "test", or none.
        fraction: share of the training examples for validation, in (0, 1), where that has no file.
        seed: chooses them.

    Raises:
        ValueError: there is no training file, more than one file of a split, or nothing to hold out.
    """
    for split, given in paths.items():
        if isinstance(given, str) or len(given) > 1 or (split == "train" and not given):
            wanted = "the one file" if split == "train" else "one file or none"
            raise ValueError(f"{split} is {given!r}; must be {wanted} of its examples, as ('file',).")
    splits = {split: read(given[0]) for split, given in paths.items() if given}
    if "validation" in splits:
        return splits
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_fraction is {fraction}; must be above 0 and below 1.")
    training, held_out = split_indices(keys(splits["train"]), fraction, seed=seed)
    if not held_out:
        raise ValueError(f"{paths['train'][0]}: there are not two different examples to split; give validation.")
    whole = splits.pop("train")
    return {"train": take(whole, training), "validation": take(whole, held_out), **splits}
