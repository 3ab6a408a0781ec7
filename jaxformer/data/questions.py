"""Questions on texts, answered by a piece of the text, as SQuAD's files hold them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.data.datasets import decode_utf8, read_bytes
from jaxformer.data.hub import hub_column, load_hub_rows


@dataclass(frozen=True)
class Question:
    """A question on a text.

    Args:
        name: its id in the file.
        question: the question.
        context: the text.
        answers: texts that answer it, each with the character of the context where it begins; none = the context does
            not answer it, or it is only to be answered.
    """

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions in the order of a file (Rajpurkar et al. 2016, arXiv:1606.05250; 2018, arXiv:1806.03822).

    Args:
        questions: the questions.
        source: the file.
        skipped: answers left out, as they do not stand where the file says.
    """

    questions: Sequence[Question]
    source: str
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.questions)

    def take(self, indices: Sequence[int]) -> "Questions":
        """Some of the questions."""
        return Questions([self.questions[index] for index in indices], self.source, self.skipped)


def load_questions(path: str) -> Questions:
    """Reads SQuAD's JSON, version 1.1 or 2.0 (gzip accepted).

    Raises:
        ValueError: it cannot be read, is not of that form, or has no question.
    """
    file = Path(path).expanduser()
    text = decode_utf8(read_bytes(file), file.name)
    try:
        paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
        found = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
        read = [_question(context, entry) for context, entry in found]
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.name}: not JSON ({error}).") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} is not in the form of SQuAD: {type(error).__name__} {error}.") from error
    if not read:
        raise ValueError(f"{path} holds no question.")
    return Questions([question for question, _ in read], path, sum(skipped for _, skipped in read))


def hub_questions(path: str) -> Questions:
    """Questions of the Hugging Face Hub, ``owner/name[:config][@split]``, in the columns that SQuAD has there.

    These are id, question, context, and answers with lists ``text`` and ``answer_start``, empty where the context does
    not answer; without the last there is nothing but to answer.

    Raises:
        ValueError: the `datasets` library is missing, a column is, or is of another form, or there is no question.
    """
    rows = load_hub_rows(path, "questions 'huggingface_questions'")
    columns = [hub_column(rows, name, path) for name in ("id", "question", "context")]
    given = hub_column(rows, "answers", path) if "answers" in rows.column_names else [None] * len(columns[0])
    try:
        read = []
        for name, question, context, answers in zip(*columns, given):
            pairs = zip(answers["text"], answers["answer_start"], strict=True) if answers else ()
            entry = {"answers": [{"text": text, "answer_start": start} for text, start in pairs]}
            read.append(_question(context, {"id": name, "question": question, **entry}))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"data {path!r}: answers are not in the form of SQuAD ({error}).") from error
    if not read:
        raise ValueError(f"data {path!r} hold no question.")
    return Questions([question for question, _ in read], path, sum(skipped for _, skipped in read))


def _question(context: Any, entry: dict[str, Any]) -> tuple[Question, int]:
    """A question, and how many of its answers do not stand where they should."""
    texts = {"context": context, "question": entry["question"]}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise TypeError(f"{wrong[0]} of {entry['id']!r} is {texts[wrong[0]]!r}, must be text")
    given = [] if entry.get("is_impossible") else entry.get("answers", [])
    answers = [(answer["text"], int(answer["answer_start"])) for answer in given]
    right = tuple((text, start) for text, start in answers if context[start : start + len(text)] == text != "")
    return Question(str(entry["id"]), entry["question"], context, right), len(answers) - len(right)


QUESTION_FILES: dict[str, Callable[[str], Questions]] = {
    "squad": load_questions,
    "huggingface_questions": hub_questions,
}
"""Questions by name; each takes a path."""
