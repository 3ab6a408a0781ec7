"""From the logits of a task's head to what they say: classes, numbers, tags of words, answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxformer.data import Answer, QuestionExamples, TaggingExamples, choose_answers, choose_token_answers


@dataclasses.dataclass(frozen=True)
class ClassPrediction:
    """The class of a text.

    Attributes:
      label: the likeliest class; of equal ones the first.
      probability: its probability.
      probabilities: that of every class.
    """

    label: str
    probability: float
    probabilities: Mapping[str, float]


def class_predictions(logits: Sequence[Float[np.ndarray, " C"]], classes: Sequence[str]) -> list[ClassPrediction]:
    """The class of each text, by the softmax of its logits.

    Raises:
      ValueError: there are fewer logits than classes; those behind the last class are not looked at.
    """
    found = []
    for row in logits:
        scores = _of_classes(row, classes).astype(np.float64)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        best = int(scores.argmax())
        found.append(ClassPrediction(classes[best], float(shares[best]), dict(zip(classes, shares.tolist()))))
    return found


def word_tags(
    examples: TaggingExamples, logits: Sequence[Float[np.ndarray, "_ C"]], classes: Sequence[str]
) -> list[list[str]]:
    """A tag for each word of each sentence: the likeliest class at its first token, ``O`` where it has none."""
    return examples.tags([_of_classes(row, classes).argmax(-1) for row in logits], classes)


def _of_classes(logits: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    if not 0 < len(classes) <= logits.shape[-1]:
        raise ValueError(f"classes has {len(classes)} names, must have one or more, at most {logits.shape[-1]}")
    return logits[..., : len(classes)]


def answers(examples: QuestionExamples, logits: Sequence[Float[np.ndarray, "_ K"]], **options: Any) -> list[Answer]:
    """The answer to each question over all its rows.

    Args:
      examples: the questions.
      logits: of each row those of start and end [L, 2], or of start, end and neither [L, 3].
      **options: of ``jaxformer.data.choose_answers`` and ``choose_token_answers``, which take two and three logits.
    """
    if logits and logits[0].shape[-1] == 3:
        return choose_token_answers(examples, logits, **options)
    return choose_answers(examples, [row[:, 0] for row in logits], [row[:, 1] for row in logits], **options)
