"""The predictor of a run: what its directory keeps of its task, and how its texts become rows."""

import json
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from jaxformer.data import QuestionExamples, load_tokenizer
from jaxformer.models.position_settings import TABLES
from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.predictor import Predictor, RowLayout
from jaxformer.training.run_directory import RunDirectory, write_json

# Tokens of rows of a model that sets no limit and was not fine-tuned here.
_LENGTH = 512


def predicts(config: ConfigDict) -> bool:
    """Whether a run is of a task: its model has a head that classifies, tags or answers."""
    return config.get("head") is not None


def record_task(directory: RunDirectory, data: Any) -> None:
    """Writes what predictions need to know of a run's `jaxformer.data.TaskData`."""
    train = data.splits["train"]
    asked = train.questions.questions if isinstance(train, QuestionExamples) else ()
    write_task(directory, data.task, data.classes, any(not question.answers for question in asked))


def write_task(directory: RunDirectory, task: str, classes: Sequence[str], may_lack_answers: bool = False) -> None:
    """Writes into a run directory what its head says.

    Args:
      directory: of the run.
      task: one of ``TASKS``.
      classes: what each class id stands for; none of regression and answers.
      may_lack_answers: whether there are questions without an answer, so that predictions may say so.
    """
    write_json(directory.task, {"task": task, "classes": list(classes), "may_lack_answers": may_lack_answers})


def make_predictor(
    directory: RunDirectory,
    config: ConfigDict,
    model: nn.Module,
    params: Any,
    model_state: Any,
    tokenizer: Any = None,
    **options: Any,
) -> Predictor:
    """The predictor of a run's model, with the tokenizer and the classes that the run keeps.

    Args:
      directory: of the run.
      config: its config with all values decided.
      model: its ``TaskModel``.
      params: its parameters.
      model_state: its other variables.
      tokenizer: None = read from the run directory.
      **options: of ``Predictor`` in place of the run's: batch_size, threshold, n_best, most_tokens, mesh.
    """
    facts: dict[str, Any] = json.loads(directory.task.read_text()) if directory.task.is_file() else {}
    settings = config.get("eval", {})
    threshold = settings.get("no_answer_threshold")
    if threshold is None and facts.get("may_lack_answers"):
        threshold = 0.0
    own = {"batch_size": settings.get("batch_size", 32), "threshold": threshold}
    if settings.get("most_answer_tokens") is not None:
        own["most_tokens"] = settings.most_answer_tokens
    task = config.head.task
    counted = config.head.get("num_classes") or 0 if task in ("classification", "tagging") else 0
    classes = tuple(facts.get("classes") or map(str, range(counted)))
    if tokenizer is None:
        tokenizer = load_tokenizer(directory.tokenizer(tokenizer_name(config)))
    return Predictor(
        model, params, model_state, tokenizer, task, classes, row_layout(config, model), **{**own, **options}
    )


def row_layout(config: ConfigDict, model: Any) -> RowLayout:
    """How a run's texts become rows, none longer than the model's table of positions."""
    data = config.get("data", {})
    limit = model.config.max_length if model.config.positions in TABLES else None
    length = data.get("length") or limit or _LENGTH
    names = ("separators", "stride", "question_length")
    given = {name: data.get(name) for name in names if data.get(name) is not None}
    return RowLayout(length if limit is None else min(length, limit), **given)
