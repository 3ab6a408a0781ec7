"""Texts, or pairs of texts, with a class or a number each, as files hold them."""

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.data.datasets import text_at
from jaxformer.data.hub import load_hub_rows
from jaxformer.data.pairs import read_lines, tsv_columns
from jaxformer.data.polarity import read_polarity


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels, in the order of the file.

    Args:
        names: what each example is called: file and line.
        texts: the texts, or the first of each pair.
        seconds: the second of each pair; None = single texts.
        labels: class or number of each, as it is written; None = there are none, only to predict.
        source: a line on where they come from.
    """

    names: Sequence[str]
    texts: Sequence[str]
    seconds: Sequence[str] | None
    labels: Sequence[str] | None
    source: str

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> "LabelledTexts":
        """Some of the examples."""
        names, texts, seconds, labels = (
            None if column is None else [column[index] for index in indices]
            for column in (self.names, self.texts, self.seconds, self.labels)
        )
        return LabelledTexts(names or [], texts or [], seconds, labels, self.source)

    @property
    def keys(self) -> list[str]:
        """The text of each example, of both sides."""
        return [*self.texts] if self.seconds is None else [f"{a}\0{b}" for a, b in zip(self.texts, self.seconds)]


def load_labelled(
    name: str, path: str, fields: Sequence[str] = ("text",), label: str | None = "label"
) -> LabelledTexts:
    """Reads labelled texts.

    Args:
        name: one of ``LABEL_FILES``.
        path: the file; of huggingface_labels `owner/name[:config][@split]`.
        fields: the field, or column, of the text, or of the two texts of a pair; columns of a table by name or by
            number from 0. "a.b" is field b of a. Not used by sentence_polarity.
        label: that of the label; None = there is none.

    Returns:
        The examples.

    Raises:
        ValueError: unknown name, a file that cannot be read or does not hold what it must, or no example.
    """
    if name not in LABEL_FILES:
        near = difflib.get_close_matches(name, LABEL_FILES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"labelled texts {name!r} are unknown; there are {', '.join(LABEL_FILES)}.{hint}")
    if isinstance(fields, str) or len(fields) not in (1, 2):
        raise ValueError(f"fields is {fields!r}; must be one, the text's, or two, those of a pair.")
    read = LABEL_FILES[name](path, tuple(fields), label)
    if not len(read):
        raise ValueError(f"labelled texts {name!r}: there is no example in {path}.")
    return read


def _labelled(names: Sequence[str], columns: Sequence[Sequence[str]], fields: int, source: str) -> LabelledTexts:
    """Columns of texts, and of labels where there is one more than texts."""
    seconds = columns[1] if fields == 2 else None
    return LabelledTexts(names, columns[0], seconds, columns[fields] if len(columns) > fields else None, source)


def tsv_labels(path: str, fields: tuple[str, ...], label: str | None) -> LabelledTexts:
    """A table with tabs between columns, named by the first line or by number; quotation marks are text."""
    wanted = fields if label is None else (*fields, label)
    names, columns = tsv_columns(path, wanted)
    return _labelled(names, columns, len(fields), path)


def jsonl_labels(path: str, fields: tuple[str, ...], label: str | None) -> LabelledTexts:
    """A JSON-lines file, each line an object; a label may be text, a number, or true or false."""
    file = Path(path).name
    names, entries = [], []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error}).") from error
        names.append(f"{file}:{number}")
    return _of_entries(names, entries, fields, label, path)


def huggingface_labels(path: str, fields: tuple[str, ...], label: str | None) -> LabelledTexts:
    """Data of the Hugging Face Hub, ``owner/name[:config][@split]``; labels by their names where they have any."""
    rows = load_hub_rows(path, "labelled texts 'huggingface_labels'")
    entries = [dict(row) for row in rows]
    names_of = getattr(rows.features.get(label), "names", None) if label else None
    if label and names_of:
        # -1 is what tests without labels have.
        entries = [{**entry, label: names_of[entry[label]] if entry[label] >= 0 else ""} for entry in entries]
    return _of_entries([f"{path}:{index}" for index in range(len(entries))], entries, fields, label, path)


def sentence_polarity(path: str, fields: tuple[str, ...], label: str | None) -> LabelledTexts:
    """The zip of the sentence-polarity data: one text file of positive and one of negative sentences, latin-1."""
    names, texts, labels = map(list, zip(*read_polarity(path)))
    return LabelledTexts(names, texts, None, labels if label else None, path)


def _of_entries(
    names: list[str], entries: list[Any], fields: tuple[str, ...], label: str | None, source: str
) -> LabelledTexts:
    columns = [[text_at(entry, field, name) for name, entry in zip(names, entries)] for field in fields]
    if label is not None:
        columns.append([_label_at(entry, label, name) for name, entry in zip(names, entries)])
    return _labelled(names, columns, len(fields), source)


def _label_at(entry: Any, label: str, where: str) -> str:
    """A label as text, as JSON writes it. Raises ValueError if there is none."""
    value = entry.get(label) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        if isinstance(value, bool):
            return json.dumps(value)
        raise ValueError(f"{where}: no label {label!r}, or one that is neither text nor a number.")
    return value if isinstance(value, str) else repr(value)


LABEL_FILES: dict[str, Callable[[str, tuple[str, ...], str | None], LabelledTexts]] = {
    "tsv_labels": tsv_labels,
    "jsonl_labels": jsonl_labels,
    "huggingface_labels": huggingface_labels,
    "sentence_polarity": sentence_polarity,
}
"""Labelled texts by name; each takes a path, the fields of texts and that of the label."""
