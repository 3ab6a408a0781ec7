"""Questions on texts as rows, several that overlap where a text is long, and where in the text each token stands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from jaxformer.data.example_rows import ExampleRows
from jaxformer.data.hub import paths_of_split
from jaxformer.data.offsets import encode_with_offsets
from jaxformer.data.packing import IGNORE_LABEL
from jaxformer.data.questions import QUESTION_FILES, Questions
from jaxformer.data.sentence_pairs import pair_layout
from jaxformer.data.task_data import TaskData, in_groups, read_splits, task_tokenizer
from jaxformer.data.tokenizers import Tokenizer

TARGETS = ("spans", "tokens")
"""How a row says where its answer stands: by two places, or by what each token is."""

START, END, NEITHER = range(3)
"""What a token of the context is to an answer."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Which piece of its context each row holds.

    Args:
        question: the number of the row's question [R].
        place: where in the row the context begins [R].
        spans: of each row the characters of the context that each of its context tokens stands for [n, 2].
    """

    question: Int64[np.ndarray, " R"]
    place: Int64[np.ndarray, " R"]
    spans: Sequence[Int64[np.ndarray, "_ 2"]]


@dataclass(frozen=True, eq=False)
class QuestionExamples:
    """Questions as texts and as rows; a long context has several, which overlap.

    Args:
        questions: the questions.
        rows: ``token_types`` (0, and 1 in the context), ``answer_mask`` (True where an answer may begin or end: in the
            context, and at the first token, which means that the row holds no answer), and ``starts`` and ``ends`` [B],
            the places of the first answer's first and last token in the row, 0 if the row does not hold all of it,
            -100 where there is no row. Of targets "tokens" they have ``targets`` too, as ``token_targets`` says.
        windows: which piece of its context each row holds.
    """

    questions: Questions
    rows: ExampleRows
    windows: Windows

    def __len__(self) -> int:
        return len(self.questions)

    @cached_property
    def rows_of(self) -> list[list[int]]:
        """The rows of each question."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for row, question in enumerate(self.windows.question.tolist()):
            found[question].append(row)
        return found

    def characters(self, row: int, start: int, end: int) -> tuple[int, int]:
        """The characters of the context from the token at place ``start`` of a row to that at ``end``, included."""
        spans, place = self.windows.spans[row], int(self.windows.place[row])
        return int(spans[start - place, 0]), int(spans[end - place, 1])


def answer_tokens(spans: Int64[np.ndarray, "n 2"], first: int, end: int) -> tuple[int, int] | None:
    """The first and the last token that has a character from ``first`` to ``end`` - 1; None if there is none."""
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > first) & (spans[:, 0] < spans[:, 1]))
    return (int(inside[0]), int(inside[-1])) if inside.size else None


def token_targets(size: int, context: slice, start: int, end: int) -> Int32[np.ndarray, " size"]:
    """What each token of a row is to its answer: start 0, end 1, neither 2, and -100 outside the context.

    An answer of one token is a start with no end behind it. So the targets of a row without an answer are all 2, and
    each answer has targets of its own (``choose_token_answers`` is the way back).

    Args:
        size: tokens of the row.
        context: where in it the context stands.
        start: the place of the answer's first token; 0 = the row holds no answer.
        end: that of its last token.
    """
    targets = np.full(size, IGNORE_LABEL, np.int32)
    targets[context] = NEITHER
    if start:
        targets[end], targets[start] = END, START
    return targets


def encode_questions(
    questions: Questions,
    tokenizer: Tokenizer,
    *,
    length: int,
    stride: int,
    question_length: int = 64,
    separators: int = 1,
    targets: str = "spans",
) -> QuestionExamples:
    """Rows ``[CLS] question [SEP] context [SEP]``; a context too long for one is cut into windows that overlap.

    Args:
        questions: the questions.
        tokenizer: theirs.
        length: tokens of a row at most.
        stride: tokens from the beginning of a window to that of the next, as BERT's ``doc_stride``; less if a window
            is shorter, so that every token is in one.
        question_length: tokens of a question at most; longer ones are cut at their end.
        separators: how many ``[SEP]`` stand between question and context.
        targets: "spans", or "tokens": rows say of each token of the context whether it is start, end or neither.

    Raises:
        ValueError: a number is out of range, or targets is neither.
    """
    if targets not in TARGETS:
        raise ValueError(f"targets is {targets!r}; must be one of {', '.join(TARGETS)}.")
    least = question_length + 2 + separators + 1
    if question_length < 1 or length < least:
        raise ValueError(f"length is {length}, must be at least {least} with question_length = {question_length}.")
    if stride < 1:
        raise ValueError(f"stride is {stride}, must be at least 1.")
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    marks = {"start_id": tokenizer.bos_id, "end_id": tokenizer.eos_id, "separators": separators}
    contexts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    made: list[tuple[Any, ...]] = []
    for number, question in enumerate(questions.questions):
        if question.context not in contexts:
            contexts[question.context] = encode_with_offsets(tokenizer, question.context)
        ids, spans = contexts[question.context]
        asked = np.array(tokenizer.encode(question.question)[:question_length], np.int64)
        found = None
        if question.answers:
            text, first = question.answers[0]
            found = answer_tokens(spans, first, first + len(text))
        made += [(number, *row) for row in _windows(asked, ids, spans, found, length, stride, marks)]
    owners, places, tokens, types, masks, starts, ends, held = list(zip(*made)) or [()] * 8
    per_token: dict[str, tuple[Sequence[np.ndarray], Any]] = {"token_types": (types, 0), "answer_mask": (masks, False)}
    if targets == "tokens":
        contexts_at = [slice(place, place + len(spans)) for place, spans in zip(places, held)]
        wanted = [token_targets(len(ids), *row) for ids, *row in zip(tokens, contexts_at, starts, ends)]
        per_token["targets"] = (wanted, IGNORE_LABEL)
    rows = ExampleRows(
        tokens,
        (max(map(len, tokens), default=1),),
        tokenizer.pad_id,
        per_token,
        {"starts": (np.array(starts, np.int32), IGNORE_LABEL), "ends": (np.array(ends, np.int32), IGNORE_LABEL)},
    )
    return QuestionExamples(questions, rows, Windows(np.array(owners, np.int64), np.array(places, np.int64), held))


def _windows(
    asked: Int64[np.ndarray, " q"],
    ids: Int64[np.ndarray, " n"],
    spans: Int64[np.ndarray, "n 2"],
    found: tuple[int, int] | None,
    length: int,
    stride: int,
    marks: dict[str, int],
) -> Iterator[tuple[Any, ...]]:
    """Of each row of a question: where its context begins, ids, types, answer mask, start, end, and its spans."""
    place = 1 + len(asked) + marks["separators"]
    room = length - place - 1
    step = min(stride, room)
    # The last window is the first that reaches the end.
    last = max(0, -(-(len(ids) - room) // step)) * step
    for begin in range(0, last + 1, step):
        window = slice(begin, begin + room)
        row, kinds = pair_layout(asked, ids[window], **marks)
        mask = np.zeros(len(row), bool)
        mask[0] = mask[place:-1] = True
        start = end = 0
        if found is not None and begin <= found[0] and found[1] < begin + room:
            start, end = (place + token - begin for token in found)
        yield place, row, kinds, mask, start, end, spans[window]


def load_question_data(
    *,
    name: str = "squad",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    tokenizer: str | Tokenizer = "bytes",
    length: int = 384,
    stride: int = 128,
    question_length: int = 64,
    separators: int = 1,
    targets: str = "spans",
    num_buckets: int = 4,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
) -> TaskData[QuestionExamples]:
    """Loads questions that a piece of a text answers.

    Args:
        name: one of ``QUESTION_FILES``.
        train: the training file; of the Hugging Face Hub `("owner/name[:config][@split]",)`, where a split that is not
            named is train, validation or test by argument.
        validation: the validation file; none = the questions on a share of the training contexts.
        test: the test file; none = no test.
        tokenizer: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer.
        length: tokens of a row at most.
        stride: tokens from the beginning of a window to that of the next.
        question_length: tokens of a question at most.
        separators: how many ``[SEP]`` stand between question and context: 1 of BERT, 2 of RoBERTa.
        targets: "spans": where an answer begins and ends; "tokens": what each token is to it.
        num_buckets: groups of rows of one width at most.
        validation_fraction: share of the training contexts for validation, in (0, 1), where that has no file.
        split_seed: chooses them.

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, or a file cannot be read.
    """
    if name not in QUESTION_FILES:
        raise ValueError(f"name is {name!r}; must be one of {', '.join(QUESTION_FILES)}.")
    loaded = task_tokenizer(tokenizer)
    paths = {"train": train, "validation": validation, "test": test}
    splits = read_splits(
        QUESTION_FILES[name],
        Questions.take,
        lambda questions: [question.context for question in questions.questions],
        {split: paths_of_split(name, given, split) for split, given in paths.items()},
        validation_fraction,
        split_seed,
    )
    numbers = {"length": length, "stride": stride, "question_length": question_length, "separators": separators}
    examples = {
        split: encode_questions(questions, loaded, targets=targets, **numbers) for split, questions in splits.items()
    }
    given = [bool(question.answers) for question in splits["validation"].questions]
    baselines = f"for scale, on validation: no answer to any question has an exact match of {1 - np.mean(given):.4f}"
    skipped = sum(questions.skipped for questions in splits.values())
    source = splits["train"].source + (f" ({skipped} answers left out: not where the file says)" if skipped else "")
    return TaskData("answers", *in_groups(examples, num_buckets, length), loaded, (), examples, source, baselines)
