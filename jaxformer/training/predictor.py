"""A fine-tuned model as a function from texts to classes, numbers, tags or answers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.data import (
    ClassificationExamples,
    ExampleRows,
    LabelledTexts,
    Question,
    QuestionExamples,
    Questions,
    TaggedSentences,
    TaggingExamples,
    encode_labelled,
    encode_questions,
    encode_tagged,
)
from jaxformer.training.objective_parts import model_inputs
from jaxformer.training.row_batches import row_batches
from jaxformer.training.sharding import shard_batch
from jaxformer.training.task_outputs import answers, class_predictions, word_tags

Given = LabelledTexts | TaggedSentences | Questions
Examples = ClassificationExamples | TaggingExamples | QuestionExamples

TASKS = ("classification", "regression", "tagging", "answers", "answer_tokens")
"""What a head may be for."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How texts become rows.

    Attributes:
      length: tokens of a row at most; longer texts are cut, contexts of questions come in several rows.
      separators: how many separators stand between two texts.
      stride: tokens from one row of a context to the next.
      question_length: tokens of a question at most.
    """

    length: int
    separators: int = 1
    stride: int = 128
    question_length: int = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """A model with its variables, tokenizer and classes.

    Attributes:
      model: a ``TaskModel``.
      params: its parameters.
      model_state: its other variables.
      tokenizer: of its texts.
      task: "classification", "regression", "tagging", "answers" or "answer_tokens".
      classes: what each class id stands for; none of regression and answers.
      layout: how texts become rows.
      batch_size: rows that are computed together; the last ones are filled up.
      threshold: of answers: there is none if that is better than the best one by more than so much, a difference of
        sums of two logits; None = there always is one.
      n_best: candidates of an answer at most.
      most_tokens: tokens of an answer at most.
      mesh: over which batches are split; None = they are not.
    """

    model: nn.Module
    params: Any
    model_state: Any
    tokenizer: Any
    task: str
    classes: tuple[str, ...]
    layout: RowLayout
    batch_size: int = 32
    threshold: float | None = None
    n_best: int = 20
    most_tokens: int = 30
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}, must be one of {', '.join(TASKS)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, must be at least 1")

    def predict(self, given: Sequence[Any]) -> list[Any]:
        """Predicts from texts.

        Args:
          given: texts, or pairs of texts; of tagging sentences as sequences of words; of answers ``Question``s, or
            pairs of a question and its context.

        Returns:
          Of each a ``ClassPrediction``, a number, the tags of its words, or an ``Answer``.

        Raises:
          ValueError: what is given is of another kind, or cannot be encoded.
        """
        return self.predict_texts(self._texts(given))

    def predict_texts(self, texts: Given) -> list[Any]:
        """As ``predict``, of texts, sentences or questions as files hold them; their labels are not looked at."""
        return self.predict_examples(self.encode(texts)) if len(texts) else []

    def encode(self, texts: Given) -> Examples:
        """Texts as rows, laid out as in training."""
        length, separators = self.layout.length, self.layout.separators
        if isinstance(texts, Questions):
            longest = min(self.layout.question_length, length - 3 - separators)
            return encode_questions(
                texts,
                self.tokenizer,
                length=length,
                stride=self.layout.stride,
                question_length=longest,
                separators=separators,
            )
        if isinstance(texts, TaggedSentences):
            texts = dataclasses.replace(texts, tags=None)
            return encode_tagged(texts, self.tokenizer, length=length, classes=self.classes)
        texts = dataclasses.replace(texts, labels=None)
        return encode_labelled(texts, self.tokenizer, length=length, classes=self.classes, separators=separators)

    def predict_examples(self, examples: Examples) -> list[Any]:
        """As ``predict``, of rows with their texts."""
        logits = self._logits(examples.rows)
        if isinstance(examples, TaggingExamples):
            return word_tags(examples, logits, self.classes)
        if isinstance(examples, QuestionExamples):
            options = {"threshold": self.threshold, "n_best": self.n_best, "most_tokens": self.most_tokens}
            return answers(examples, logits, **options)
        return list(map(float, logits)) if self.task == "regression" else class_predictions(logits, self.classes)

    def _logits(self, rows: ExampleRows) -> list[Any]:
        """The logits of each row in order; of tokens also those of what fills the row up."""
        found: list[Any] = [None] * len(rows)
        variables = {"params": self.params, **self.model_state}
        for indices, batch in row_batches(rows, self.batch_size, self.layout.length):
            logits = np.asarray(_apply(self.model, variables, self._inputs(batch)), np.float32)
            for index, row in zip(indices.tolist(), logits):
                found[index] = row
        return found

    def _inputs(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        inputs = model_inputs(batch, self.model)
        return inputs if self.mesh is None else shard_batch(inputs, self.mesh)

    def _texts(self, given: Sequence[Any]) -> Given:
        """What is given as a file would hold it."""
        if isinstance(given, str):
            raise ValueError(f"given is the text {given!r}, must be a sequence: [text]")
        names = [str(place) for place in range(len(given))]
        if self.task == "tagging":
            for place, words in enumerate(given):
                if isinstance(words, str) or not all(isinstance(word, str) for word in words):
                    raise ValueError(f"given[{place}] is {words!r}, must be the words of a sentence")
            return TaggedSentences(names, [list(words) for words in given], None, "given")
        if self.task in ("answers", "answer_tokens"):
            asked = []
            for name, entry in zip(names, given):
                if not isinstance(entry, Question) and not _is_pair(entry):
                    raise ValueError(f"given[{name}] is {entry!r}, must be a Question, or a question and its context")
                asked.append(entry if isinstance(entry, Question) else Question(name, *entry))
            return Questions(asked, "given")
        single = [isinstance(entry, str) for entry in given]
        if all(single):
            return LabelledTexts(names, list(given), None, None, "given")
        if any(single) or not all(_is_pair(entry) for entry in given):
            wrong = next(entry for entry, is_text in zip(given, single) if is_text or not _is_pair(entry))
            raise ValueError(f"given holds {wrong!r}, must be texts, or pairs of texts")
        return LabelledTexts(names, [a for a, _ in given], [b for _, b in given], None, "given")


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)


@functools.partial(jax.jit, static_argnames=("model",))
def _apply(model: nn.Module, variables: Any, inputs: Mapping[str, Any]) -> Any:
    """The model's logits, compiled once for each width."""
    output: Any = model.apply(variables, **inputs, deterministic=True)
    return output.logits
