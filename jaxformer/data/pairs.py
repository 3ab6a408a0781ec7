"""Pairs of a source and a target text, and the files that hold them."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from jaxformer.data.datasets import decode_utf8, json_texts, read_bytes, text_at
from jaxformer.data.hub import hub_column, load_hub_rows
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
    needed = 2 if name == "parallel" else 1
    if isinstance(paths, str) or len(paths) != needed:
        wanted = "two files: the source's and the target's" if needed == 2 else "one file"
        raise ValueError(f"pairs {name!r} are read from {wanted}; paths is {paths!r}.")
    if isinstance(fields, str) or len(fields) != 2:
        raise ValueError(f"fields is {fields!r}; must be two: the source's and the target's.")
    pairs = PAIR_FILES[name](tuple(paths), fields)
    if not len(pairs):
        raise ValueError(f"pairs {name!r}: no pair in {pairs.source}.")
    return pairs


def parallel(paths: tuple[str, ...], fields: tuple[str, str]) -> Pairs:
    """Two text files in UTF-8 (gzip accepted), a line of one for a line of the other."""
    sources, targets = (read_lines(path) for path in paths)
    if len(sources) != len(targets):
        raise ValueError(
            f"{paths[0]} has {len(sources)} lines and {paths[1]} {len(targets)}: a line of one must stand for a line "
            "of the other."
        )
    return Pairs(_line_names(paths[0], len(sources)), sources, targets, f"{paths[0]} and {paths[1]}")


def tsv_pairs(paths: tuple[str, ...], fields: tuple[str, str]) -> Pairs:
    """A file of lines with tabs between columns (gzip accepted), chosen by number from 0 or by the first line's names.

    Tabs are all that separates: quotation marks are text. Empty lines are passed over.
    """
    names, (sources, targets) = tsv_columns(paths[0], fields)
    return Pairs(names, sources, targets, f"{paths[0]}, columns {_and(fields)}")


def tsv_columns(path: str, fields: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The name of each line of a table that is not empty, and of each field its column, as ``tsv_pairs`` has them.

    Raises:
        ValueError: the file cannot be read, or has no such column.
    """
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1) if line]
    name = Path(path).name
    if all(field.isdecimal() for field in fields):
        columns = [int(field) for field in fields]
    else:
        header = lines.pop(0)[1] if lines else []
        missing = [field for field in fields if field not in header]
        if missing:
            raise ValueError(
                f"{name}, line 1: no column {missing[0]!r}; there is {', '.join(map(repr, header)) or 'nothing'}. "
                "Without names of columns there, fields must be their numbers, as ('0', '1')."
            )
        columns = [header.index(field) for field in fields]
    for number, line in lines:
        if len(line) <= max(columns):
            raise ValueError(f"{name}, line {number}: no column {max(columns)} (from 0); there are {len(line)}.")
    columns_of = [[line[column] for _, line in lines] for column in columns]
    return [f"{name}:{number}" for number, _ in lines], columns_of


def jsonl_pairs(paths: tuple[str, ...], fields: tuple[str, str]) -> Pairs:
    """A JSON-lines file (gzip accepted), each line an object with the texts in two fields; "a.b" is field b of a."""
    name = Path(paths[0]).name
    names, sources, targets = [], [], []
    for number, line in enumerate(read_lines(paths[0]), start=1):
        if not line.strip():
            continue
        source, target = json_texts(line, fields, f"{name}, line {number}")
        names.append(f"{name}:{number}")
        sources.append(source)
        targets.append(target)
    return Pairs(names, sources, targets, f"{paths[0]}, fields {_and(fields)}")


def huggingface_pairs(paths: tuple[str, ...], fields: tuple[str, str]) -> Pairs:
    """Data of the Hugging Face Hub, ``owner/name[:config][@split]``, in two columns ("a.b" is field b of column a)."""
    rows = load_hub_rows(paths[0], "pairs 'huggingface_pairs'")
    sides = []
    for field in fields:
        head = field if field in rows.column_names else field.partition(".")[0]
        entries = ({head: entry} for entry in hub_column(rows, head, paths[0]))
        sides.append([text_at(entry, field, f"{paths[0]}, row {index}") for index, entry in enumerate(entries)])
    names = [f"{paths[0]}:{index}" for index in range(len(sides[0]))]
    return Pairs(names, sides[0], sides[1], f"{paths[0]}, columns {_and(fields)}")


def _and(fields: tuple[str, str]) -> str:
    return f"{fields[0]!r} and {fields[1]!r}"


def read_lines(path: str) -> list[str]:
    """The lines of a file without their ends, LF or CR LF; other characters that break lines are text."""
    file = Path(path).expanduser()
    lines = decode_utf8(read_bytes(file), file.name).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _line_names(path: str, count: int) -> list[str]:
    return [f"{name}:{number}" for name, number in zip(repeat(Path(path).name), range(1, count + 1))]


PAIR_FILES: dict[str, Callable[[tuple[str, ...], tuple[str, str]], Pairs]] = {
    "parallel": parallel,
    "tsv_pairs": tsv_pairs,
    "jsonl_pairs": jsonl_pairs,
    "huggingface_pairs": huggingface_pairs,
}
"""Pairs in files by name; each takes paths and fields."""
