"""From the name of pairs to the rows and texts of a model that reads a source and writes a target."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxformer.data.pair_data import PairData, PairExamples, decoder_start
from jaxformer.data.pair_rows import PairRows, bucket_widths, fitting_widths
from jaxformer.data.pairs import PAIR_FILES, Pairs, load_pairs
from jaxformer.data.splits import split_indices
from jaxformer.data.tokenizers import Tokenizer, encode_texts, load_tokenizer

BATCHINGS = ("bucketed", "padded")

PAIR_DATASETS: dict[str, Callable[..., Any]] = {**PAIR_FILES}
"""All pairs that a config may name."""


def load_pair_data(
    *,
    name: str = "parallel",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    fields: tuple[str, str] = ("source", "target"),
    tokenizer: str | Tokenizer | None = None,
    source_tokenizer: str | Tokenizer | None = None,
    length: int | None = None,
    batching: str = "bucketed",
    num_buckets: int = 4,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
) -> PairData:
    """Loads pairs, turns both sides into ids that end with the end id, and lays them out in rows.

    Pairs with a blank side are left out of training. Evaluation pairs are never left out: a blank source there is the
    end id alone.

    Args:
        name: pairs of ``PAIR_DATASETS``.
        train: files of the training pairs: source and target (parallel), or the one of both.
        validation: files of the validation pairs; none = a share of the training pairs.
        test: files of the test pairs; none = no test.
        fields: which fields hold source and target, where a file holds both.
        tokenizer: of the targets, or of both sides: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer; None =
            bytes.
        source_tokenizer: of the sources; None = the same.
        length: tokens that a side of a training pair has at most, end included; longer pairs are left out. None = all
            are kept.
        batching: "bucketed": by length, in groups of one shape; "padded": all in one shape.
        num_buckets: groups at most, of "bucketed".
        validation_fraction: share of the training pairs for validation, in (0, 1), where that has no files; pairs with
            equal sources are on one side.
        split_seed: chooses that share.

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, a file cannot be read, or no pair is left.
    """
    if batching not in BATCHINGS:
        raise ValueError(f"batching is {batching!r}; must be one of {', '.join(BATCHINGS)}.")
    if length is not None and length < 1:
        raise ValueError(f"length is {length}, must be at least 1 token, or None.")
    splits = _read_splits(name, {"train": train, "validation": validation, "test": test}, fields)
    if "validation" not in splits:
        splits |= _hold_out(splits["train"], validation_fraction, split_seed)
    both = _tokenizers(tokenizer or "bytes", source_tokenizer)
    examples = {split: _encode(name, pairs, *both) for split, pairs in splits.items()}
    return _lay_out(splits["train"], examples, *both, length, 1 if batching == "padded" else num_buckets)


def _read_splits(name: str, paths: dict[str, Sequence[str]], fields: tuple[str, str]) -> dict[str, Pairs]:
    """The pairs of each split that has paths; those of training without blanks."""
    if not paths["train"]:
        raise ValueError(f"pairs {name!r} need train: the paths of their files.")
    splits = {split: load_pairs(name, paths=given, fields=fields) for split, given in paths.items() if given}
    splits["train"] = splits["train"].without_blank()
    return splits


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
    num_buckets: int,
) -> PairData:
    """Rows of all splits in the widths that fit training, and what is said of the pairs."""
    train = examples.pop("train")
    kept = train if length is None else train.up_to(length)
    if not len(kept):
        what = f"with at most length = {length} tokens on a side " if len(train) else ""
        raise ValueError(f"{pairs.source}: there is no training pair {what}({pairs.skipped} with a blank side).")
    start = decoder_start(tokenizer)
    widths = bucket_widths(kept.sources, kept.targets, num_buckets)

    def rows(split: PairExamples) -> PairRows:
        fitting = fitting_widths(split.sources, split.targets, widths)
        return PairRows(split.sources, split.targets, fitting, start, source_tokenizer.pad_id, tokenizer.pad_id)

    left_out = [(pairs.skipped, "with a blank side"), (len(train) - len(kept), f"of more than {length} tokens")]
    said = " and ".join(f"{count:,} {what}" for count, what in left_out if count)
    return PairData(
        rows(kept),
        rows(examples["validation"]),
        {"test": rows(examples["test"])} if "test" in examples else {},
        tokenizer,
        source_tokenizer,
        start,
        examples,
        pairs.source + (f" (left out of training: {said})" if said else ""),
        {"training": len(kept), **{split: len(pairs) for split, pairs in examples.items()}},
    )
