"""Texts, or pairs of texts, to classify or to give a number: turned into rows, and kept to predict from."""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxformer.data.example_rows import ExampleRows
from jaxformer.data.hub import paths_of_split
from jaxformer.data.labelled_texts import LabelledTexts, load_labelled
from jaxformer.data.packing import IGNORE_LABEL
from jaxformer.data.sentence_pairs import pair_layout, truncated_lengths
from jaxformer.data.task_data import TaskData, in_groups, read_splits, task_tokenizer
from jaxformer.data.tokenizers import Tokenizer, encode_texts


@dataclass(frozen=True, eq=False)
class ClassificationExamples:
    """Examples as texts and as rows.

    Args:
        texts: the texts, with their labels.
        rows: of each text or pair a row, with ``token_types`` (0, and 1 in the second text) and ``labels``: class ids
            int32, -100 where there is none; of regression numbers float32, with ``label_mask`` bool.
    """

    texts: LabelledTexts
    rows: ExampleRows

    def __len__(self) -> int:
        return len(self.texts)


def encode_labelled(
    texts: LabelledTexts,
    tokenizer: Tokenizer,
    *,
    length: int,
    classes: Sequence[str] | None,
    separators: int = 1,
    dataset: str = "labels",
) -> ClassificationExamples:
    """Texts as rows ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, cut at the end, of pairs the longer text's.

    Args:
        texts: the texts.
        tokenizer: theirs.
        length: tokens of a row at most.
        classes: what each class id stands for; None = labels are numbers.
        separators: how many ``[SEP]`` stand between A and B.
        dataset: name of the data, for messages.

    Raises:
        ValueError: a label is no class, or no number; or length has no room.
    """
    room = length - 2 - (separators if texts.seconds is not None else 0)
    if room < 2:
        raise ValueError(f"length is {length}, has no room for a token of each text.")
    first = encode_texts(tokenizer, texts.texts, names=texts.names, dataset=dataset)
    second = None
    if texts.seconds is not None:
        second = encode_texts(tokenizer, texts.seconds, names=texts.names, dataset=dataset)
    tokens: list[Int32[np.ndarray, " _"]] = []
    types = []
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    ids = {"start_id": tokenizer.bos_id, "end_id": tokenizer.eos_id, "separators": separators}
    for index, side in enumerate(first):
        other = None if second is None else second[index]
        sizes = truncated_lengths(len(side), 0 if other is None else len(other), room)
        row = pair_layout(side[: sizes[0]], None if other is None else other[: sizes[1]], **ids)
        tokens.append(row[0])
        types.append(row[1])
    longest = max(map(len, tokens), default=1)
    per_row = _labels(texts, classes)
    rows = ExampleRows(tokens, (longest,), tokenizer.pad_id, {"token_types": (types, 0)}, per_row)
    return ClassificationExamples(texts, rows)


def _labels(texts: LabelledTexts, classes: Sequence[str] | None) -> dict[str, tuple[np.ndarray, Any]]:
    """What a batch says of labels, with the value of a row that is none."""
    count = len(texts)
    if classes is not None:
        known = {name: index for index, name in enumerate(classes)}
        for name, label in zip(texts.names, texts.labels or ()):
            if label and label not in known:
                raise ValueError(f"{name}: label {label!r} is none of the classes {', '.join(classes)}.")
        ids = [known[label] if label else IGNORE_LABEL for label in texts.labels or [""] * count]
        return {"labels": (np.array(ids, np.int32), IGNORE_LABEL)}
    numbers, given = np.zeros(count, np.float32), np.zeros(count, bool)
    for index, label in enumerate(texts.labels or ()):
        try:
            number = float(label)
        except ValueError:
            raise ValueError(f"{texts.names[index]}: label {label!r} is not a number.") from None
        if math.isfinite(number) and abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"{texts.names[index]}: label {label!r} is more than a float32 holds.")
        numbers[index], given[index] = number, math.isfinite(number)
    return {"labels": (numbers, 0.0), "label_mask": (given, False)}


def load_classification_data(
    *,
    name: str = "sentence_polarity",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    fields: Sequence[str] = ("text",),
    label: str = "label",
    regression: bool = False,
    tokenizer: str | Tokenizer = "bytes",
    length: int = 128,
    separators: int = 1,
    num_buckets: int = 4,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
) -> TaskData[ClassificationExamples]:
    """Loads texts to classify, or to give a number.

    Args:
        name: one of ``LABEL_FILES``.
        train: the training file; of the Hugging Face Hub `("owner/name[:config][@split]",)`, where a split that is not
            named is train, validation or test by argument.
        validation: the validation file; none = a share of the training examples.
        test: the test file; none = no test.
        fields: that of the text, or those of a pair's two.
        label: that of the label.
        regression: whether labels are numbers.
        tokenizer: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer.
        length: tokens of a row at most; longer texts are cut, in every split.
        separators: how many ``[SEP]`` stand between the texts of a pair: 1 of BERT, 2 of RoBERTa.
        num_buckets: groups of rows of one width at most.
        validation_fraction: share of the training examples for validation, in (0, 1), where that has no file; examples
            with equal texts are on one side.
        split_seed: chooses them.

    Returns:
        The data; classes are the labels of training, sorted.

    Raises:
        ValueError: an argument cannot be used, or a file cannot be read.
    """
    loaded = task_tokenizer(tokenizer)
    paths = {"train": train, "validation": validation, "test": test}
    splits = read_splits(
        lambda path: load_labelled(name, path, fields, label),
        LabelledTexts.take,
        lambda texts: texts.keys,
        {split: paths_of_split(name, given, split) for split, given in paths.items()},
        validation_fraction,
        split_seed,
    )
    classes = None if regression else tuple(sorted(set(splits["train"].labels or ()) - {""}))
    if classes is not None and len(classes) < 2:
        raise ValueError(f"{splits['train'].source}: training has {len(classes)} classes, must have two or more.")
    examples = {
        split: encode_labelled(
            texts, loaded, length=length, classes=classes, separators=separators, dataset=f"{name} {split}"
        )
        for split, texts in splits.items()
    }
    rows = in_groups(examples, num_buckets, length)
    for split in ("train", "validation"):
        per_row = examples[split].rows.per_row
        labelled = per_row["label_mask"][0] if regression else per_row["labels"][0] != IGNORE_LABEL
        if not labelled.any():
            raise ValueError(f"{splits[split].source}: no example of {split} has a label.")
    task = "regression" if regression else "classification"
    source = splits["train"].source
    return TaskData(task, *rows, loaded, classes or (), examples, source, _baselines(splits, regression))


def _baselines(splits: Mapping[str, LabelledTexts], regression: bool) -> str:
    """A line on the most frequent class of training, or its mean, on the validation examples."""
    train, validation = splits["train"].labels or (), splits["validation"].labels or ()
    if regression:
        numbers, wanted = (np.array(list(map(float, labels))) for labels in (train, validation))
        # Those that are none have no part in training either.
        error = np.mean((wanted[np.isfinite(wanted)] - numbers[np.isfinite(numbers)].mean()) ** 2)
        return f"for scale, on validation: the mean of training has a squared error of {error:.4f}"
    most = collections.Counter(label for label in train if label).most_common(1)[0][0]
    share = np.mean([label == most for label in validation if label])
    return f"for scale, on validation: the most frequent class, {most!r}, has an accuracy of {share:.4f}"
