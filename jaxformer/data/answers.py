"""From start and end logits to answers: the best piece of the context over all windows, or none."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxformer.data.squad import END, NEITHER, START, QuestionExamples


@dataclass(frozen=True)
class Candidate:
    """An answer that may be.

    Args:
        text: of the context.
        first: its first character in the context.
        score: the sum of its start and end logit, or of tokens' kinds as ``choose_token_answers`` has it.
    """

    text: str
    first: int
    score: float


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Args:
        name: the question's id.
        text: the answer; empty = the context has none.
        candidates: the best answers, the best one first, whatever is said of there being none.
        null_score: the lowest score, over the windows, of no answer.
    """

    name: str
    text: str
    candidates: tuple[Candidate, ...]
    null_score: float

    @property
    def null_difference(self) -> float:
        """How much no answer is better than the best one; what a threshold is chosen on."""
        return self.null_score - (self.candidates[0].score if self.candidates else -np.inf)


def best_spans(
    starts: Float[np.ndarray, " L"],
    ends: Float[np.ndarray, " L"],
    allowed: np.ndarray,
    singles: Float[np.ndarray, " L"] | None = None,
    *,
    n_best: int,
    most_tokens: int,
) -> list[tuple[float, int, int]]:
    """The best spans of one row: of the n best starts and the n best ends all that are in order and not too long.

    Args:
        starts: logits of each place being the first token.
        ends: logits of each place being the last.
        allowed: places that may be either.
        singles: score of each place being both; None = the sum of its two logits.
        n_best: how many starts, ends and spans at most.
        most_tokens: tokens of a span at most.

    Returns:
        Score, first and last place of each, the best first; of equal ones the earliest.
    """
    places = np.flatnonzero(allowed)
    firsts, lasts = (places[np.argsort(-logits[places], kind="stable")[:n_best]] for logits in (starts, ends))
    found = [
        (float(starts[first]) + float(ends[last]), int(first), int(last))
        for first in firsts
        for last in lasts
        if first + (singles is not None) <= last < first + most_tokens
    ]
    if singles is not None:
        best = places[np.argsort(-singles[places], kind="stable")[:n_best]]
        found += [(float(singles[place]), int(place), int(place)) for place in best]
    return sorted(found, key=lambda span: (-span[0], span[1], span[2]))[:n_best]


def choose_answers(
    examples: QuestionExamples,
    starts: Sequence[Float[np.ndarray, " _"]],
    ends: Sequence[Float[np.ndarray, " _"]],
    *,
    n_best: int = 20,
    most_tokens: int = 30,
    threshold: float | None = None,
) -> list[Answer]:
    """An answer to each question, from the logits of all its rows (Devlin et al. 2019, arXiv:1810.04805, 4.2 and 4.3).

    Args:
        examples: the questions.
        starts: start logits of each row of ``examples.rows``, in order; longer where rows were filled up.
        ends: end logits.
        n_best: candidates at most.
        most_tokens: tokens of an answer at most.
        threshold: there is no answer if that is better than the best one by more than so much; None = there always is
            one (SQuAD 1.1).

    Returns:
        The answers, in the order of the questions.

    Raises:
        ValueError: there are not as many logits as rows, or a number is out of range.
    """
    if not len(starts) == len(ends) == len(examples.rows):
        raise ValueError(
            f"starts and ends are {(len(starts), len(ends))}; must be {len(examples.rows)}, one for a row."
        )
    nulls = [float(start[0]) + float(end[0]) for start, end in zip(starts, ends)]
    return _choose(examples, starts, ends, None, nulls, n_best, most_tokens, threshold)


def choose_token_answers(
    examples: QuestionExamples,
    logits: Sequence[Float[np.ndarray, "_ 3"]],
    *,
    n_best: int = 20,
    most_tokens: int = 30,
    threshold: float | None = None,
) -> list[Answer]:
    """An answer to each question, from logits of each token being its start, its end, or neither.

    An answer's score is how much likelier its targets (``jaxformer.data.squad.token_targets``) are than those of no
    answer, in nats: start - neither at its first token, and end - neither at its last if that is another. So an answer
    of one token has the score of its start alone, and no answer has the score 0.

    Args:
        examples: the questions.
        logits: start, end and neither of each token of each row of ``examples.rows``, in order; longer where rows were
            filled up.
        n_best: candidates at most.
        most_tokens: tokens of an answer at most.
        threshold: as of ``choose_answers``; 0 = the likeliest, answer or none.

    Returns:
        The answers, in the order of the questions.

    Raises:
        ValueError: there are not as many logits as rows, or a number is out of range.
    """
    if len(logits) != len(examples.rows):
        raise ValueError(f"logits are {len(logits)}; must be {len(examples.rows)}, one for a row.")
    starts, ends = ([row[:, kind] - row[:, NEITHER] for row in logits] for kind in (START, END))
    return _choose(examples, starts, ends, starts, [0.0] * len(logits), n_best, most_tokens, threshold)


def _choose(
    examples: QuestionExamples,
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    singles: Sequence[np.ndarray] | None,
    nulls: Sequence[float],
    n_best: int,
    most_tokens: int,
    threshold: float | None,
) -> list[Answer]:
    """The best candidates of all rows of each question, against no answer at the score ``nulls`` of each row."""
    if n_best < 1 or most_tokens < 1:
        raise ValueError(f"n_best is {n_best} and most_tokens {most_tokens}; both must be at least 1.")
    masks = examples.rows.per_token["answer_mask"][0]
    answers = []
    for question, rows in zip(examples.questions.questions, examples.rows_of):
        found: dict[tuple[int, int], float] = {}
        for row in rows:
            allowed = masks[row].copy()
            allowed[0] = False
            # Blanks alone are no answer.
            place, spans = int(examples.windows.place[row]), examples.windows.spans[row]
            allowed[place : place + len(spans)] &= spans[:, 0] < spans[:, 1]
            single = None if singles is None else singles[row]
            for score, first, last in best_spans(
                starts[row], ends[row], allowed, single, n_best=n_best, most_tokens=most_tokens
            ):
                characters = examples.characters(row, first, last)
                found[characters] = max(score, found.get(characters, -np.inf))
        best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:n_best]
        candidates = tuple(Candidate(question.context[a:b], a, score) for (a, b), score in best)
        answer = Answer(
            question.name, candidates[0].text if candidates else "", candidates, min(nulls[row] for row in rows)
        )
        if threshold is not None and answer.null_difference > threshold:
            answer = dataclasses.replace(answer, text="")
        answers.append(answer)
    return answers
