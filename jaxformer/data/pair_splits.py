"""Pairs of each split, read or made, and their ids."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.data.dates import date_pairs
from jaxformer.data.hub import paths_of_split
from jaxformer.data.pair_data import PairExamples
from jaxformer.data.pairs import PAIR_FILES, MadePairs, Pairs, load_pairs
from jaxformer.data.splits import split_indices
from jaxformer.data.task_pairs import PAIR_TASKS
from jaxformer.data.tokenizers import Tokenizer, encode_texts, load_tokenizer

PAIR_MAKERS: dict[str, Callable[..., MadePairs]] = {"dates": date_pairs, **PAIR_TASKS}
"""Pairs that are made by name; each takes its own numbers."""


def refuse(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for the first of arguments that pairs take not."""
    for argument, value in arguments.items():
        raise ValueError(f"pairs {name!r} take no {argument}, got {value!r}.")


def make_pairs(
    name: str,
    paths: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Any],
    tokenizers: Sequence[str | Tokenizer | None],
    seed: int,
) -> MadePairs:
    """Pairs that are made, and their tokenizer for both sides; what they take not is refused."""
    refuse(name, {split: given for split, given in paths.items() if given})
    known = inspect.signature(PAIR_MAKERS[name]).parameters
    refuse(name, {argument: value for argument, value in numbers.items() if argument not in known})
    made = PAIR_MAKERS[name](**numbers, split_seed=seed)
    for argument, given in zip(("tokenizer", "source_tokenizer"), tokenizers, strict=True):
        if given is not None and (load_tokenizer(given) if isinstance(given, str) else given) != made.tokenizer:
            raise ValueError(f"pairs {name!r} bring their own tokenizer; {argument} is {given!r}, must be None.")
    return made


def read_pairs(
    name: str, paths: Mapping[str, Sequence[str]], fields: tuple[str, str], fraction: float, seed: int
) -> dict[str, Pairs]:
    """Pairs in files, those of training without blanks; a share of these where there is no file for validation."""
    if name in PAIR_FILES and not paths["train"]:
        raise ValueError(f"pairs {name!r} need train: the paths of their files.")
    splits = {
        split: load_pairs(name, paths=paths_of_split(name, given, split), fields=fields)
        for split, given in paths.items()
        if given or split == "train"
    }
    splits["train"] = splits["train"].without_blank()
    if not len(splits["train"]):
        raise ValueError(f"{splits['train'].source}: a side of every training pair is blank.")
    return splits if "validation" in splits else splits | _hold_out(splits["train"], fraction, seed)


def _hold_out(pairs: Pairs, fraction: float, seed: int) -> dict[str, Pairs]:
    """Training and validation pairs, told apart by the hash of the source."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_fraction is {fraction}; must be above 0 and below 1.")
    training, held_out = split_indices(pairs.sources, fraction, seed=seed)
    if not held_out:
        raise ValueError(f"{pairs.source}: there are not two different sources to split; give validation.")
    return {"train": pairs.take(training, pairs.skipped), "validation": pairs.take(held_out)}


def pair_tokenizers(tokenizer: str | Tokenizer, source: str | Tokenizer | None) -> tuple[Tokenizer, Tokenizer]:
    """Of sources and of targets; one object where the same is meant."""
    target = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if source is None or source == tokenizer:
        source = target
    source = load_tokenizer(source) if isinstance(source, str) else source
    for argument, loaded in (("source_tokenizer", source), ("tokenizer", target)):
        if loaded.eos_id is None:
            raise ValueError(f"{argument} {loaded.name!r} has no end token, which every text of a pair ends with.")
    return source, target


def encode_pairs(name: str, pairs: Pairs, source_tokenizer: Tokenizer, tokenizer: Tokenizer) -> PairExamples:
    """Ids of both sides, each ended."""
    sources, targets = (
        [
            np.array([*ids.tolist(), loaded.eos_id], np.int32)
            for ids in encode_texts(loaded, texts, names=pairs.names, dataset=name)
        ]
        for loaded, texts in ((source_tokenizer, pairs.sources), (tokenizer, pairs.targets))
    )
    return PairExamples(sources, targets, pairs.sources, pairs.targets, pairs.labels)
