"""From the name of pairs to the rows and texts of a model that reads a source and writes a target."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.data.dates import date_pairs
from jaxformer.data.packed_pairs import PackedPairRows, packed_widths
from jaxformer.data.pair_data import PairData, PairExamples, decoder_start
from jaxformer.data.pair_rows import PairRows, Widths, bucket_widths, fitting_widths
from jaxformer.data.pairs import PAIR_FILES, MadePairs, Pairs, load_pairs
from jaxformer.data.splits import split_indices
from jaxformer.data.task_pairs import PAIR_TASKS
from jaxformer.data.tokenizers import Tokenizer, encode_texts, load_tokenizer

BATCHINGS = ("bucketed", "packed", "padded")

PAIR_MAKERS: dict[str, Callable[..., MadePairs]] = {"dates": date_pairs, **PAIR_TASKS}
"""Pairs that are made by name; each takes its own numbers."""

PAIR_DATASETS: dict[str, Callable[..., Any]] = {**PAIR_FILES, **PAIR_MAKERS}
"""All pairs that a config may name."""


def load_pair_data(
    *,
    name: str = "dates",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    fields: tuple[str, str] = ("source", "target"),
    tokenizer: str | Tokenizer | None = None,
    source_tokenizer: str | Tokenizer | None = None,
    validation_fraction: float = 0.05,
    train_examples: int | None = None,
    validation_examples: int | None = None,
    test_examples: int | None = None,
    locales: Sequence[str] = (),
    years: tuple[int, int] | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    num_symbols: int | None = None,
    split_seed: int = 0,
    length: int | None = None,
    batching: str = "bucketed",
    num_buckets: int = 4,
) -> PairData:
    """Loads pairs, turns both sides into ids that end with the end id, and lays them out in rows.

    Pairs with a blank side are left out of training. Evaluation pairs are never left out: a blank source there is the
    end id alone.

    Args:
        name: pairs of ``PAIR_DATASETS``.
        train: files of the training pairs: source and target (parallel), or the one of both; of the Hugging Face Hub
            ("owner/name[:config][@split]",), where a split that is not named is train, validation or test by argument.
        validation: files of the validation pairs; none = a share of the training pairs.
        test: files of the test pairs; none = no test.
        fields: which fields hold source and target, where a file holds both.
        tokenizer: of the targets, or of both sides: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer; None =
            bytes, or that of pairs that bring their own, which take no other.
        source_tokenizer: of the sources; None = the same.
        validation_fraction: share of the training pairs for validation, in (0, 1), where that has no files; pairs with
            equal sources are on one side.
        train_examples: training pairs to make; this and the next seven are of ``date_pairs`` and ``task_pairs``, None
            is what those have, and pairs in files take none of them.
        validation_examples: validation pairs to make.
        test_examples: test pairs to make.
        locales: of dates.
        years: of dates, first and last.
        min_length: shortest word of a task, in symbols.
        max_length: longest word of a task, in symbols.
        num_symbols: different symbols of a task.
        split_seed: chooses the share for validation, or draws the pairs that are made.
        length: tokens that a side of a training pair has at most, end included; longer pairs are left out. None = all
            are kept.
        batching: "bucketed": by length, in groups of one shape; "padded": all in one shape, a pair a row; "packed":
            several pairs a row, whose wider side has length tokens, or those of the longest text.
        num_buckets: groups at most, of "bucketed".

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, a file cannot be read, or no pair is left.
    """
    if batching not in BATCHINGS:
        raise ValueError(f"batching is {batching!r}; must be one of {', '.join(BATCHINGS)}.")
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, must be at least 1.")
    if length is not None and length < 1:
        raise ValueError(f"length is {length}, must be at least 1 token, or None.")
    paths = {"train": train, "validation": validation, "test": test}
    numbers = {
        "train_examples": train_examples,
        "validation_examples": validation_examples,
        "test_examples": test_examples,
        "locales": tuple(locales) or None,
        "years": years,
        "min_length": min_length,
        "max_length": max_length,
        "num_symbols": num_symbols,
    }
    numbers = {argument: value for argument, value in numbers.items() if value is not None}
    if name in PAIR_MAKERS:
        splits, own = _make(name, paths, numbers, (tokenizer, source_tokenizer), split_seed)
        both = (own, own)
    else:
        _refuse(name, numbers)
        splits = _read(name, paths, fields, validation_fraction, split_seed)
        both = _tokenizers("bytes" if tokenizer is None else tokenizer, source_tokenizer)
    examples = {split: _encode(name, pairs, *both) for split, pairs in splits.items()}
    return _lay_out(splits["train"], examples, *both, length, batching, num_buckets)


def _refuse(name: str, arguments: Mapping[str, Any]) -> None:
    for argument, value in arguments.items():
        raise ValueError(f"pairs {name!r} take no {argument}, got {value!r}.")


def _make(
    name: str,
    paths: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Any],
    tokenizers: Sequence[str | Tokenizer | None],
    seed: int,
) -> MadePairs:
    """Pairs that are made, and their tokenizer for both sides; what they take not is refused."""
    _refuse(name, {split: given for split, given in paths.items() if given})
    known = inspect.signature(PAIR_MAKERS[name]).parameters
    _refuse(name, {argument: value for argument, value in numbers.items() if argument not in known})
    made = PAIR_MAKERS[name](**numbers, split_seed=seed)
    for argument, given in zip(("tokenizer", "source_tokenizer"), tokenizers, strict=True):
        if given is not None and (load_tokenizer(given) if isinstance(given, str) else given) != made.tokenizer:
            raise ValueError(f"pairs {name!r} bring their own tokenizer; {argument} is {given!r}, must be None.")
    return made


def _read(
    name: str, paths: Mapping[str, Sequence[str]], fields: tuple[str, str], fraction: float, seed: int
) -> dict[str, Pairs]:
    """Pairs in files, those of training without blanks; a share of these where there is no file for validation."""
    if name in PAIR_FILES and not paths["train"]:
        raise ValueError(f"pairs {name!r} need train: the paths of their files.")
    splits = {
        split: load_pairs(name, paths=_of_split(name, given, split), fields=fields)
        for split, given in paths.items()
        if given or split == "train"
    }
    splits["train"] = splits["train"].without_blank()
    if not len(splits["train"]):
        raise ValueError(f"{splits['train'].source}: a side of every training pair is blank.")
    return splits if "validation" in splits else splits | _hold_out(splits["train"], fraction, seed)


def _of_split(name: str, paths: Sequence[str], split: str) -> Sequence[str]:
    """The paths; on the Hugging Face Hub those of a split that is not named are that of the same name."""
    if name != "huggingface_pairs" or isinstance(paths, str):
        return paths
    return [path if "@" in path else f"{path}@{split}" for path in paths]


def _hold_out(pairs: Pairs, fraction: float, seed: int) -> dict[str, Pairs]:
    """Training and validation pairs, told apart by the hash of the source."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_fraction is {fraction}; must be above 0 and below 1.")
    training, held_out = split_indices(pairs.sources, fraction, seed=seed)
    if not held_out:
        raise ValueError(f"{pairs.source}: there are not two different sources to split; give validation.")
    return {"train": pairs.take(training, pairs.skipped), "validation": pairs.take(held_out)}


def _tokenizers(tokenizer: str | Tokenizer, source: str | Tokenizer | None) -> tuple[Tokenizer, Tokenizer]:
    """Of sources and of targets; one object where the same is meant."""
    target = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if source is None or source == tokenizer:
        source = target
    source = load_tokenizer(source) if isinstance(source, str) else source
    for argument, loaded in (("source_tokenizer", source), ("tokenizer", target)):
        if loaded.eos_id is None:
            raise ValueError(f"{argument} {loaded.name!r} has no end token, which every text of a pair ends with.")
    return source, target


def _encode(name: str, pairs: Pairs, source_tokenizer: Tokenizer, tokenizer: Tokenizer) -> PairExamples:
    """Ids of both sides, each ended."""
    sources, targets = (
        [
            np.array([*ids.tolist(), loaded.eos_id], np.int32)
            for ids in encode_texts(loaded, texts, names=pairs.names, dataset=name)
        ]
        for loaded, texts in ((source_tokenizer, pairs.sources), (tokenizer, pairs.targets))
    )
    return PairExamples(sources, targets, pairs.sources, pairs.targets, pairs.labels)


def _lay_out(
    pairs: Pairs,
    examples: dict[str, PairExamples],
    source_tokenizer: Tokenizer,
    tokenizer: Tokenizer,
    length: int | None,
    batching: str,
    num_buckets: int,
) -> PairData:
    """Rows of all splits in the widths that fit training, and what is said of the pairs."""
    train = examples.pop("train")
    kept = train if length is None else train.up_to(length)
    if not len(kept):
        what = f"with at most length = {length} tokens on a side " if len(train) else ""
        raise ValueError(f"{pairs.source}: there is no training pair {what}({pairs.skipped} with a blank side).")
    start = decoder_start(tokenizer)
    if batching == "packed":
        widths: tuple[Widths, ...] = (packed_widths(kept.sources, kept.targets, length),)
    else:
        widths = bucket_widths(kept.sources, kept.targets, num_buckets if batching == "bucketed" else 1)

    def rows(split: PairExamples) -> PairRows | PackedPairRows:
        ids = (start, source_tokenizer.pad_id, tokenizer.pad_id)
        fitting = fitting_widths(split.sources, split.targets, widths)
        if batching == "packed":
            return PackedPairRows(split.sources, split.targets, fitting[-1], *ids)
        return PairRows(split.sources, split.targets, fitting, *ids)

    left_out = [(pairs.skipped, "with a blank side"), (len(train) - len(kept), f"of more than {length} tokens")]
    said = " and ".join(f"{count:,} {what}" for count, what in left_out if count)
    return PairData(
        rows(kept),
        rows(examples["validation"]),
        rows(examples["test"]) if "test" in examples else None,
        tokenizer,
        source_tokenizer,
        start,
        examples,
        pairs.source + (f" (left out of training: {said})" if said else ""),
        {"training": len(kept), **{split: len(pairs) for split, pairs in examples.items()}},
    )
