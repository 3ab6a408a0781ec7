"""Pairs of a source and a target text, and the files that hold them."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from jaxformer.data.datasets import decode_utf8, read_bytes
from jaxformer.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Pairs:
    """Source and target texts with their names, in a fixed order.

    Args:
        names: what each pair is called: file and line, or a number.
        sources: what is given.
        targets: what is to be written.
        source: a line on where they come from.
        labels: of each pair, what its figures are told apart by (its locale); None = nothing.
        skipped: pairs left out: a side is blank.

    Raises:
        ValueError: the numbers of names, sources, targets and labels differ.
    """

    names: Sequence[str]
    sources: Sequence[str]
    targets: Sequence[str]
    source: str
    labels: Sequence[str] | None = None
    skipped: int = 0

    def __post_init__(self):
        counts = [len(self.names), len(self.sources), len(self.targets)]
        counts += [] if self.labels is None else [len(self.labels)]
        if len(set(counts)) > 1:
            raise ValueError(f"names, sources, targets and labels are {counts} in number; must be as many of each.")

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: Sequence[int], skipped: int = 0) -> "Pairs":
        """Some of the pairs, and how many were left out."""
        labels = None if self.labels is None else [self.labels[index] for index in indices]
        names, sources, targets = (
            [texts[index] for index in indices] for texts in (self.names, self.sources, self.targets)
        )
        return Pairs(names, sources, targets, self.source, labels, skipped)

    def without_blank(self) -> "Pairs":
        """The pairs with something on both sides; the others are counted as skipped."""
        kept = [index for index in range(len(self)) if self.sources[index].strip() and self.targets[index].strip()]
        return self.take(kept, self.skipped + len(self) - len(kept))


class MadePairs(NamedTuple):
    """Pairs that are made and not read, with the tokenizer that they bring.

    Attributes:
        splits: pairs of "train", "validation" and "test".
        tokenizer: of both sides.
    """

    splits: Mapping[str, Pairs]
    tokenizer: Tokenizer


def load_pairs(name: str, *, paths: Sequence[str], fields: tuple[str, str] = ("source", "target")) -> Pairs:
    """Loads all pairs of a dataset, those with a blank side too (``Pairs.without_blank`` leaves them out).

    Args:
        name: one of ``PAIR_FILES``.
        paths: the source's and the target's file (parallel), or the one file of both.
        fields: which fields hold source and target, where a file holds both.

    Returns:
        The pairs in the order of the file.

    Raises:
        ValueError: unknown name, a file that cannot be read or does not hold what it must, or no pair.
    """
    if name not in PAIR_FILES:
        near = difflib.get_close_matches(name, PAIR_FILES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"pairs {name!r} are unknown; there are {', '.join(PAIR_FILES)}.{hint}")
    if isinstance(paths, str) or len(paths) != (needed := 2 if name == "parallel" else 1):
        wanted = "two files: the source's and the target's" if needed == 2 else "one file"
        raise ValueError(f"pairs {name!r} are read from {wanted}; paths is {paths!r}.")
    if not isinstance(fields, tuple) or len(fields) != 2:
        raise ValueError(f"fields is {fields!r}; must be two: the source's and the target's.")
    pairs = PAIR_FILES[name](tuple(paths), fields)
    if not len(pairs):
        raise ValueError(f"pairs {name!r}: no pair in {pairs.source}.")
    return pairs


def parallel(paths: tuple[str, ...], fields: tuple[str, str]) -> Pairs:
    """Two text files in UTF-8 (gzip accepted), a line of one for a line of the other."""
    sources, targets = (_read_lines(path) for path in paths)
    if len(sources) != len(targets):
        raise ValueError(
            f"{paths[0]} has {len(sources)} lines and {paths[1]} {len(targets)}: a line of one must stand for a line "
            "of the other."
        )
    return Pairs(_line_names(paths[0], len(sources)), sources, targets, f"{paths[0]} and {paths[1]}")


def _read_lines(path: str) -> list[str]:
    """The lines of a file without their ends, LF or CR LF; other characters that break lines are text."""
    file = Path(path).expanduser()
    lines = decode_utf8(read_bytes(file), file.name).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _line_names(path: str, count: int) -> list[str]:
    return [f"{name}:{number}" for name, number in zip(repeat(Path(path).name), range(1, count + 1))]


PAIR_FILES: dict[str, Callable[[tuple[str, ...], tuple[str, str]], Pairs]] = {"parallel": parallel}
"""Pairs in files by name; each takes paths and fields."""
