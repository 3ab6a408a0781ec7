"""Files to predict from, and the same files with the predictions in them."""

import collections
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.data import LabelledTexts, TaggedSentences, load_questions
from jaxformer.data.conll import OUTSIDE
from jaxformer.data.datasets import text_at
from jaxformer.data.pairs import read_lines, tsv_columns
from jaxformer.training.output_files import one_line
from jaxformer.training.predictor import Given


class InputFile(NamedTuple):
    """What a file holds, and how it looks with predictions.

    Attributes:
      given: its texts, sentences or questions.
      filled: from the predictions of these, in order, to the content of the output.
    """

    given: Given
    filled: Callable[[Sequence[Any]], str]


def read_table(path: str, fields: Sequence[str], label: str) -> InputFile:
    """Lines of columns with tabs between them, as `jaxformer.data.tsv_labels` has them.

    In the output the label's column holds the prediction; where there is no such column, it comes last. All else,
    empty lines too, stays as it is.

    Args:
      path: the file.
      fields: the column of the text, or those of a pair: names in the first line, or numbers from 0.
      label: that of the label; of columns by number also any name, for one that comes last.

    Raises:
      ValueError: the file cannot be read, or a column of a text is missing.
    """
    _check_fields(fields)
    names, columns = tsv_columns(path, fields)
    lines = [line.split("\t") for line in read_lines(path)]
    headed = not all(field.isdecimal() for field in fields)
    filled_lines = [place for place, line in enumerate(lines) if line != [""]][headed:]
    widest = max((len(lines[place]) for place in filled_lines), default=0)
    header = next((line for line in lines if line != [""]), []) if headed else []
    if label in header:
        column = header.index(label)
    elif not headed and label.isdecimal():
        column = int(label)
        if widest and column > widest:
            raise ValueError(f"label is column {label}, but {Path(path).name} has {widest}; must be at most {widest}.")
    else:
        column = max(widest, len(header))

    def filled(predictions: Sequence[Any]) -> str:
        output = [list(line) for line in lines]
        if headed and header and label not in header:
            first = next(line for line in output if line != [""])
            first += [""] * (column - len(first)) + [label]
        for place, prediction in zip(filled_lines, predictions, strict=True):
            line = output[place]
            line += [""] * (column + 1 - len(line))
            line[column] = _one_cell(_written(prediction))
        return "".join("\t".join(line) + "\n" for line in output)

    return InputFile(_labelled(names, columns, path), filled)


def read_json_lines(path: str, fields: Sequence[str], label: str) -> InputFile:
    """An object a line, with the texts in fields ("a.b" is field b of a).

    In the output the label's field holds the prediction, as text or a number as it was before, and of classes
    ``probability`` that of the class.

    Raises:
      ValueError: the file cannot be read, or a text is missing.
    """
    _check_fields(fields)
    file = Path(path).name
    lines = read_lines(path)
    entries: dict[int, Any] = {}
    for place, line in enumerate(lines):
        if line.strip():
            try:
                entries[place] = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {place + 1}: not JSON ({error}).") from error
    names = [f"{file}:{place + 1}" for place in entries]
    columns = [[text_at(entry, field, name) for name, entry in zip(names, entries.values())] for field in fields]

    def filled(predictions: Sequence[Any]) -> str:
        output = list(lines)
        for (place, entry), prediction in zip(entries.items(), predictions, strict=True):
            output[place] = one_line({**entry, **_filled_fields(prediction, label, entry.get(label))})
        return "".join(line + "\n" for line in output)

    return InputFile(_labelled(names, columns, path), filled)


def read_words(path: str) -> InputFile:
    """A word a line, sentences with blank lines between them, as `jaxformer.data.load_tagged` has them.

    A line may have further columns, with tabs or else blanks between them. In the output the last of several columns
    holds the tag, if it held tags or nothing in the whole file; otherwise the tag comes behind a tab. Blank lines,
    those of ``-DOCSTART-`` and comments, which begin with "# ", have no tab and don't end with a tag, stay as they are.

    Raises:
      ValueError: the file cannot be read.
    """
    file, lines = Path(path).name, read_lines(path)
    names: list[str] = []
    sentences: list[list[str]] = []
    places: list[int] = []
    going = False
    for place, line in enumerate(lines):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            going = False
            continue
        if _is_comment(line):
            continue
        if not going:
            names.append(f"{file}:{place + 1}")
            sentences.append([])
            going = True
        sentences[-1].append(_columns(line)[0])
        places.append(place)
    rows = {place: _columns(lines[place]) for place in places}
    tagged = bool(rows) and all(len(row) > 1 and (not row[-1].strip() or _is_tag(row[-1])) for row in rows.values())

    def filled(predictions: Sequence[Any]) -> str:
        output = list(lines)
        tags = [tag for of_sentence in predictions for tag in of_sentence]
        for (place, row), tag in zip(rows.items(), tags, strict=True):
            between = "\t" if "\t" in lines[place] else " "
            output[place] = between.join([*row[:-1], tag]) if tagged else f"{lines[place]}\t{tag}"
        return "".join(line + "\n" for line in output)

    return InputFile(TaggedSentences(names, sentences, None, path), filled)


def read_questions(path: str) -> InputFile:
    """SQuAD's JSON; the output is that of predictions, an object of texts by the questions' ids.

    Raises:
      ValueError: the file cannot be read, or two questions have one id.
    """
    questions = load_questions(path)
    (name, count), *_ = collections.Counter(question.name for question in questions.questions).most_common(1)
    if count > 1:
        raise ValueError(f"{Path(path).name} has {count} questions with the id {name!r}, must have one.")

    def filled(predictions: Sequence[Any]) -> str:
        return json.dumps({answer.name: answer.text for answer in predictions}, ensure_ascii=False, indent=2) + "\n"

    return InputFile(questions, filled)


def candidates_of(predictions: Sequence[Any]) -> str:
    """The best answers to each question, and none ("") among them, by its id.

    Each has its text, the character of the context where it starts (null of none), its score and its probability, a
    softmax over the scores of all that are listed.
    """
    listed = {}
    for answer in predictions:
        found = [{"text": best.text, "start": best.first, "score": best.score} for best in answer.candidates]
        found.append({"text": "", "start": None, "score": answer.null_score})
        found.sort(key=lambda candidate: -candidate["score"])
        shares = [math.exp(candidate["score"] - found[0]["score"]) for candidate in found]
        listed[answer.name] = [
            {**candidate, "probability": share / sum(shares)} for candidate, share in zip(found, shares)
        ]
    return json.dumps(listed, ensure_ascii=False, indent=2) + "\n"


def _check_fields(fields: Sequence[str]) -> None:
    if isinstance(fields, str) or len(fields) not in (1, 2):
        raise ValueError(f"fields is {fields!r}; must be one, the text's, or two, those of a pair.")


def _labelled(names: list[str], columns: list[list[str]], path: str) -> LabelledTexts:
    return LabelledTexts(names, columns[0], columns[1] if len(columns) > 1 else None, None, path)


def _written(prediction: Any) -> str:
    """A class, or a number to seven digits, which a float32 has."""
    return f"{prediction:.7g}" if isinstance(prediction, float) else prediction.label


def _one_cell(text: str) -> str:
    """Text without what would begin another cell or line."""
    return text.replace("\t", " ").replace("\n", " ")


def _filled_fields(prediction: Any, label: str, before: Any) -> dict[str, Any]:
    """The fields that a prediction sets; ``before`` is the label that stood there."""
    if isinstance(prediction, float):
        return {label: float(_written(prediction)) if math.isfinite(prediction) else None}
    value: Any = prediction.label
    if isinstance(before, bool | int | float):
        # Labels that are no text are read as JSON writes them.
        value = _as_json(value)
    return {label: value, "probability": prediction.probability}


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _columns(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split(" ")


def _is_tag(text: str) -> bool:
    return text.strip() == OUTSIDE or text.strip().startswith(("B-", "I-"))


def _is_comment(line: str) -> bool:
    return line.startswith("# ") and "\t" not in line and not _is_tag(line.split(" ")[-1])
