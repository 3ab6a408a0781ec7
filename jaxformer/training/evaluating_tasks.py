"""A fine-tuned model's predictions on a run's examples: figures, and files of predictions beside what is right."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.data import QuestionExamples, Questions, TaggedSentences, TaggingExamples
from jaxformer.training.evaluate import EvalStep, batches_of, evaluate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.predictor import Examples, Given, Predictor
from jaxformer.training.run_directory import write_json
from jaxformer.training.run_predictor import predicts
from jaxformer.training.task_metrics import (
    answer_metrics,
    best_threshold,
    check_task_metrics,
    classification_metrics,
    entity_metrics,
    regression_metrics,
)

_SHOWN_CANDIDATES = 5


class Predicted(NamedTuple):
    """Some examples with what is predicted of them.

    Attributes:
      predictions: of each example, in order.
      figures: of those that have a label: the task's.
    """

    predictions: list[Any]
    figures: dict[str, float]


def check_predictions(config: ConfigDict) -> None:
    """Refuses, before training, figures that cannot be had.

    Raises:
      ConfigError: `eval.predict_examples` is negative, or the library that computes the figures is not installed.
    """
    if not predicts(config):
        return
    count = config.eval.get("predict_examples")
    if count is not None and count < 0:
        raise ConfigError(f"config.eval.predict_examples is {count}, must be at least 0, or None for all")
    if count != 0:
        check_task_metrics(data_task(config.head.task))


def data_task(task: str) -> str:
    """The task of the data that a head is for."""
    return "answers" if task == "answer_tokens" else task


def predict_split(predictor: Predictor, examples: Examples, count: int | None = None) -> Predicted:
    """Predicts examples and compares them with what is right.

    Args:
      predictor: the model.
      examples: of a split.
      count: how many, from the first on; None = all.
    """
    given = texts_of(examples)
    if count is None or count >= len(given):
        predictions = predictor.predict_examples(examples)
    else:
        given = given.take(range(count))
        predictions = predictor.predict_texts(given)
    return Predicted(predictions, task_figures(given, predictions))


def texts_of(examples: Examples) -> Given:
    """The texts of examples, with their labels."""
    if isinstance(examples, QuestionExamples):
        return examples.questions
    return examples.sentences if isinstance(examples, TaggingExamples) else examples.texts


def task_figures(given: Given, predictions: Sequence[Any]) -> dict[str, float]:
    """The task's figures over all that have a label; none where nothing has.

    Of questions of which some have no answer also best_f1, that of the best threshold, and best_threshold.
    """
    if not _has_labels(given):
        return {}
    if isinstance(given, TaggedSentences):
        return entity_metrics(predictions, given.tags or ())
    if isinstance(given, Questions):
        return _answer_figures(given, predictions)
    pairs = [(ours, label) for ours, label in zip(predictions, given.labels or ()) if label]
    if isinstance(predictions[0], float):
        numbers = np.array([(ours, float(label)) for ours, label in pairs])
        numbers = numbers[np.isfinite(numbers[:, 1])]
        return regression_metrics(numbers[:, 0], numbers[:, 1]) if len(numbers) else {}
    return classification_metrics([ours.label for ours, _ in pairs], [label for _, label in pairs])


def _answer_figures(given: Questions, predictions: Sequence[Any]) -> dict[str, float]:
    right = [[text for text, _ in question.answers] for question in given.questions]
    figures = answer_metrics([answer.text for answer in predictions], right)
    if not all(right):
        best = [answer.candidates[0].text if answer.candidates else "" for answer in predictions]
        differences = [answer.null_difference for answer in predictions]
        figures["best_threshold"], figures["best_f1"] = best_threshold(differences, best, right)
    return figures


def evaluate_splits(
    folder: Path,
    predictor: Predictor,
    eval_step: EvalStep,
    figures: dict[str, Any],
    config: ConfigDict,
    data: Any,
    mesh: Mesh,
) -> dict[str, Any]:
    """Predicts all validation and test examples, and writes predictions and figures.

    Args:
      folder: where to, of the step.
      predictor: the model.
      eval_step: jitted, from `make_eval_step`.
      figures: of `evaluate` on the validation rows.
      config: the whole config.
      data: a `jaxformer.data.TaskData`.
      mesh: the mesh.

    Returns:
      The figures with the task's, those of the test under ``test``; predictions stand in the files named so.
    """
    if tuple(data.classes) != predictor.classes and data.classes:
        raise ConfigError(
            f"the data have classes {', '.join(data.classes)}, must have the run's: {', '.join(predictor.classes)}"
        )
    for name, examples in data.splits.items():
        if name == "train":
            continue
        own = figures if name == "validation" else {}
        if name != "validation" and _has_labels(texts_of(examples)):
            batches = batches_of(data.rows[name], config, mesh)
            own = evaluate(eval_step, predictor.params, predictor.model_state, batches, mesh, {})
        predicted = predict_split(predictor, examples)
        own = {**own, **predicted.figures}
        own["predictions"] = str(write_predictions(folder, name, texts_of(examples), predicted.predictions, own))
        figures = own if name == "validation" else {**figures, name: own}
    return figures


def _has_labels(given: Given) -> bool:
    if isinstance(given, Questions):
        return any(question.answers for question in given.questions)
    return any((given.tags if isinstance(given, TaggedSentences) else given.labels) or ())


def write_predictions(
    folder: Path, split: str, given: Given, predictions: Sequence[Any], figures: Mapping[str, Any]
) -> Path:
    """Writes predictions, an example a line, and beside them the figures, as JSON.

    Returns:
      The JSON-lines file: of each example its name, its texts, what is predicted (of classes with probabilities, of
      answers with the best candidates) and, where it has one, what is right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = (json.dumps(record, ensure_ascii=False) + "\n" for record in _records(given, predictions))
    file = folder / f"{split}.jsonl"
    file.write_text("".join(records), encoding="utf-8")
    # JSON knows no NaN, which a correlation with a constant is.
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
    write_json(folder / f"{split}.json", known)
    return file


def _records(given: Given, predictions: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for place, ours in enumerate(predictions):
        if isinstance(given, Questions):
            question = given.questions[place]
            best = [dataclasses.asdict(candidate) for candidate in ours.candidates[:_SHOWN_CANDIDATES]]
            yield {
                "id": question.name,
                "question": question.question,
                "prediction": ours.text,
                "answers": [text for text, _ in question.answers],
                "null_score": ours.null_score,
                "candidates": best,
            }
            continue
        record: dict[str, Any] = {"name": given.names[place]}
        if isinstance(given, TaggedSentences):
            labels: Any = given.tags
            record |= {"words": list(given.words[place]), "prediction": ours}
        else:
            labels = given.labels
            record["text"] = given.texts[place]
            if given.seconds is not None:
                record["second"] = given.seconds[place]
            record["prediction"] = ours if isinstance(ours, float) else ours.label
            if not isinstance(ours, float):
                record["probabilities"] = dict(ours.probabilities)
        if labels is not None:
            record["label"] = labels[place]
        yield record
