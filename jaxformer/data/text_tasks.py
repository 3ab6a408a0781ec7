"""Tasks as a text to read and a text to write, told apart by their prefixes, and mixed: the form that T5 learns in."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any

import numpy as np

from jaxformer.data.hub import paths_of_split
from jaxformer.data.labelled_texts import LABEL_FILES, LabelledTexts, load_labelled
from jaxformer.data.mixtures import MixedPairRows, mixing_rates
from jaxformer.data.pair_data import PairData
from jaxformer.data.pair_rows import PairRows
from jaxformer.data.pair_splits import PAIR_MAKERS, encode_pairs, make_pairs, pair_tokenizers, read_pairs, refuse
from jaxformer.data.pairs import PAIR_FILES, Pairs
from jaxformer.data.task_data import read_splits
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.translation import check_layout, lay_out_pairs

TEXT_TASKS = "text_tasks"
"""The name of these data."""


@dataclass(frozen=True)
class TextTask:
    """Where the examples of a task come from, and the texts that they become.

    Args:
        name: pairs of ``PAIR_FILES`` or ``PAIR_MAKERS``, or labelled texts of ``LABEL_FILES``.
        train: the training files, as of ``load_pair_data`` or ``load_classification_data``.
        validation: the validation files; none = a share of the training examples.
        test: the test files; none = no test.
        fields: of pairs source and target; of labelled texts that of the text, or those of two; none = the usual ones.
        numbers: of pairs that are made: what these take, as train_examples.
        prefix: in front of every source, with its own blank: "sentiment: ".
        weight: how often the task comes, times what its size gives.
        label: the field of the label.
        parts: in front of each of the texts; none = nothing in front of one, and of two their fields' names: "premise:
            ... hypothesis: ...", or "sentence1: " and "sentence2: " where fields are numbers.
        words: what is written for a label; one that is not in it is written as it is.
        step: labels are numbers, rounded to multiples of this as T5 rounds STS-B's to 0.2; None = they are classes.
    """

    name: str
    train: Sequence[str] = ()
    validation: Sequence[str] = ()
    test: Sequence[str] = ()
    fields: Sequence[str] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    weight: float = 1.0
    label: str = "label"
    parts: Sequence[str] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    step: float | None = None

    @property
    def paths(self) -> dict[str, Sequence[str]]:
        """The files of each split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


def describe_task(described: Mapping[str, Any]) -> TextTask:
    """A task from its fields. Raises ValueError for a field that there is not."""
    known = [entry.name for entry in dataclasses.fields(TextTask)]
    unknown = [key for key in described if key not in known]
    if unknown or "name" not in described:
        wrong = f"no field {unknown[0]!r}" if unknown else "a field name"
        raise ValueError(f"a task has {wrong}; there are {', '.join(known)}.")
    task = TextTask(**described)
    if task.name in LABEL_FILES:
        refuse(task.name, {"numbers": task.numbers} if task.numbers else {})
    elif task.name in PAIR_FILES or task.name in PAIR_MAKERS:
        of_labels = {"parts": task.parts, "words": task.words, "step": task.step}
        of_labels |= {} if task.name in PAIR_MAKERS else {"numbers": task.numbers}
        refuse(task.name, {key: value for key, value in of_labels.items() if value})
    else:
        names = ", ".join((*PAIR_FILES, *PAIR_MAKERS, *LABEL_FILES))
        raise ValueError(f"name is {task.name!r}; must be one of {names}.")
    return task


def _plain(value: Any) -> Any:
    """Sections of a config as mappings, and lists as tuples."""
    if hasattr(value, "items"):
        return {key: _plain(entry) for key, entry in value.items()}
    return tuple(value) if isinstance(value, list) else value


def number_text(label: str, step: float) -> str:
    """A number rounded to a multiple of ``step``, halves to the even one, as text: of 0.2 and "2.57" it is "2.6".

    Raises:
        ValueError: label is not a finite number, or step not above 0.
    """
    if not step > 0:
        raise ValueError(f"step is {step}, must be above 0.")
    exact = Decimal(str(step))
    try:
        if not np.isfinite(float(label)):
            raise ValueError(label)
        # Zero is added for its sign: there is no "-0.0".
        return str((Decimal(label.strip()) / exact).quantize(Decimal(1), ROUND_HALF_EVEN) * exact + Decimal(0))
    except (InvalidOperation, ValueError) as error:
        raise ValueError(f"label {label!r} is not a number that can be rounded.") from error


def labelled_pairs(texts: LabelledTexts, task: TextTask) -> Pairs:
    """Labelled texts as pairs, without the task's prefix; those without a label are left out.

    Raises:
        ValueError: there are no labels, parts are not as many as texts, or a label is no number.
    """
    if texts.labels is None:
        raise ValueError(f"{texts.source} has no labels.")
    sides = [texts.texts] if texts.seconds is None else [texts.texts, texts.seconds]
    fields = task.fields if len(task.fields) == 2 else ("", "")
    named = [f"sentence{n}" if name.isdecimal() else name for n, name in enumerate(fields, start=1)]
    parts = task.parts or ([""] if len(sides) == 1 else [f"{name}: " for name in named])
    if len(parts) != len(sides):
        raise ValueError(f"parts is {task.parts!r}; must be {len(sides)}, one for each text.")
    kept = [index for index, label in enumerate(texts.labels) if label]
    sources = [" ".join(part + side[index] for part, side in zip(parts, sides)) for index in kept]
    labels = [texts.labels[index] for index in kept]
    if task.step is None:
        targets = [task.words.get(label, label) for label in labels]
    else:
        targets = [number_text(label, task.step) for label in labels]
    return Pairs([texts.names[index] for index in kept], sources, targets, texts.source, None, len(texts) - len(kept))


def read_task(key: str, task: TextTask, fraction: float, seed: int) -> dict[str, Pairs]:
    """The pairs of each split with the task's prefix, labelled with its name."""
    if task.name in PAIR_MAKERS:
        splits = dict(make_pairs(task.name, task.paths, task.numbers, (None, None), seed).splits)
    elif task.name in PAIR_FILES:
        fields = task.fields or ("source", "target")
        if len(fields) != 2:
            raise ValueError(f"fields is {fields!r}; must be two: the source's and the target's.")
        splits = read_pairs(task.name, task.paths, (fields[0], fields[1]), fraction, seed)
    else:
        read = read_splits(
            lambda path: load_labelled(task.name, path, task.fields or ("text",), task.label),
            LabelledTexts.take,
            lambda texts: texts.keys,
            {split: paths_of_split(task.name, given, split) for split, given in task.paths.items()},
            fraction,
            seed,
        )
        splits = {split: labelled_pairs(texts, task) for split, texts in read.items()}
    return {
        split: dataclasses.replace(
            pairs, sources=[task.prefix + source for source in pairs.sources], labels=[key] * len(pairs)
        )
        for split, pairs in splits.items()
    }


def load_text_task_data(
    *,
    name: str = TEXT_TASKS,
    tasks: Any = None,
    tokenizer: str | Tokenizer = "bytes",
    limit: int | None = None,
    temperature: float = 1.0,
    length: int | None = None,
    batching: str = "bucketed",
    num_buckets: int = 4,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
) -> PairData:
    """Tasks in text form, mixed: a text with the task's prefix as source, what is wanted as target.

    An epoch has as many pairs as all tasks have within ``limit``, and of each task its share (``mixing_rates``); of a
    task with more pairs than that, later epochs have others. Batches mix the tasks. Validation and test have every
    pair once; ``PairExamples.labels`` are the tasks' names.

    Args:
        name: "text_tasks".
        tasks: by the name of each task its fields, those of ``TextTask``: {"polarity": {"name": "tsv_labels", "train":
            ("a.tsv",), "prefix": "sentiment: "}}. They are taken in the order of their names.
        tokenizer: of both sides: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer.
        limit: a task of more training pairs counts as one of so many; None = no limit.
        temperature: 1 = shares as of sizes; larger ones bring them nearer to each other.
        length: tokens that a side of a training pair has at most, end included; longer pairs are left out.
        batching: "bucketed" or "padded", as of ``load_pair_data``.
        num_buckets: groups at most, of "bucketed".
        validation_fraction: share of a task's training pairs for validation, in (0, 1), where that has no file.
        split_seed: chooses them, or draws the pairs that are made.

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, a file cannot be read, or no pair is left of a task.
    """
    if name != TEXT_TASKS:
        raise ValueError(f"name is {name!r}; must be {TEXT_TASKS!r}.")
    check_layout(batching, num_buckets, length)
    if batching == "packed":
        raise ValueError("batching is 'packed'; tasks are mixed in rows of a pair each: must be bucketed or padded.")
    if not tasks:
        raise ValueError(f"data {name!r} need tasks: by name the fields of each.")
    loaded, _ = pair_tokenizers(tokenizer, None)
    tasks = _plain(tasks)
    keys, weights, read = sorted(tasks), [], []
    for key in keys:
        try:
            task = describe_task(tasks[key])
            read.append(read_task(key, task, validation_fraction, split_seed))
            weights.append(task.weight)
        except ValueError as error:
            raise ValueError(f"task {key!r}: {error}") from error
    splits = {
        split: _join([task[split] for task in read if split in task])
        for split in ("train", "validation", "test")
        if any(split in task for task in read)
    }
    examples = {split: encode_pairs(name, pairs, loaded, loaded) for split, pairs in splits.items()}
    kept = examples["train"] if length is None else examples["train"].up_to(length)
    owners = np.array([keys.index(key) for key in kept.labels or ()], np.int64)
    sizes = np.bincount(owners, minlength=len(keys)).tolist()
    if not all(sizes):
        what = "" if length is None else f" of at most length = {length} tokens"
        raise ValueError(f"task {keys[sizes.index(0)]!r} has no training pair{what}.")
    rates = mixing_rates(sizes, limit=limit, temperature=temperature, weights=weights)
    whole = sum(min(size, limit or size) for size in sizes)
    counts = tuple(max(1, round(whole * rate)) for rate in rates.tolist())
    data = lay_out_pairs(splits["train"], examples, loaded, loaded, length, batching, num_buckets)
    assert isinstance(data.train_rows, PairRows)
    shares = ", ".join(f"{key} {rate:.3f}" for key, rate in zip(keys, rates.tolist()))
    return dataclasses.replace(
        data, train_rows=MixedPairRows(data.train_rows, owners, counts), source=f"{data.source}; shares {shares}"
    )


def _join(parts: Sequence[Pairs]) -> Pairs:
    """Pairs of several tasks, one task after the other."""
    source = " and ".join(dict.fromkeys(part.source for part in parts))
    names, sources, targets, labels = (
        [entry for part in parts for entry in getattr(part, column)]
        for column in ("names", "sources", "targets", "labels")
    )
    return Pairs(names, sources, targets, source, labels, sum(part.skipped for part in parts))
