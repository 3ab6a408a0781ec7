"""Predictions of a finished run: of texts, and of whole files in their own format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.evaluating_tasks import data_task
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.nearest import nearest
from jaxformer.training.output_files import check_target, write_target
from jaxformer.training.overrides import ConfigError
from jaxformer.training.prediction_files import (
    InputFile,
    candidates_of,
    read_json_lines,
    read_questions,
    read_table,
    read_words,
)
from jaxformer.training.predictor import Predictor
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import make_predictor, predicts
from jaxformer.training.sharding import make_mesh

FORMATS = ("tsv", "jsonl", "conll", "squad")
"""Formats of files to predict from."""


def load_predictor(workdir: str | Path, step: str = "latest", **options: Any) -> Predictor:
    """A run that classifies, tags or answers, as a function from texts to predictions.

    Args:
      workdir: the run directory.
      step: which checkpoint: "latest", "best" (lowest validation loss) or a number.
      **options: of ``Predictor`` in place of the run's: batch_size, threshold, n_best, most_tokens, layout.

    Returns:
      A ``Predictor``, with methods ``predict`` and ``predict_examples``.

    Raises:
      ConfigError: no run was started there, or its model has no such head.
      CheckpointError: there is no such checkpoint, or it does not fit the config.
    """
    return _load(Path(workdir), read_run(Path(workdir)), step, options)


def _load(workdir: Path, config: ConfigDict, step: str, options: dict[str, Any]) -> Predictor:
    if not predicts(config):
        raise ConfigError(f"the run in {workdir} has no head that classifies, tags or answers")
    enable_compilation_cache()
    model, params, model_state, _ = load_model(workdir, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    return make_predictor(RunDirectory(workdir), config, model, params, model_state, **options)


def predict_file(
    workdir: str | Path,
    source: str | Path,
    target: str | Path,
    *,
    format: str | None = None,
    fields: Sequence[str] | None = None,
    label: str | None = None,
    step: str = "latest",
    n_best: str | Path | None = None,
    **options: Any,
) -> int:
    """Predicts all examples of a file and writes it in its own format, with predictions where labels stand.

    Args:
      workdir: the run directory.
      source: the file; gzip accepted. It need not have labels, and those that it has are not looked at.
      target: where to; "-" = standard output. Written at once when all is predicted.
      format: one of ``FORMATS``; None = conll to tag words, squad to answer questions, and else jsonl where the name
        or the run's own data say so, or tsv.
      fields: of tsv and jsonl the field of the text, or those of a pair; None = those of the run's data.
      label: that of the label; None = that of the run's data.
      step: which checkpoint: "latest", "best" or a number.
      n_best: a second file for the best answers to each question with their scores; None = none.
      **options: of ``load_predictor``.

    Returns:
      How many examples were predicted.

    Raises:
      ConfigError: no run was started there, its model has no such head, or the format is not that of its task.
      CheckpointError: there is no such checkpoint.
      ValueError: a file cannot be read or written, or it would be written over.
    """
    workdir = Path(workdir)
    for path in (target, n_best):
        check_target(path, source)
    if n_best is not None and Path(n_best) == Path(target):
        raise ValueError(f"n_best is {str(n_best)!r}, the output itself; must be another file")
    config = read_run(workdir)
    if not predicts(config):
        raise ConfigError(f"the run in {workdir} has no head that classifies, tags or answers")
    task = data_task(config.head.task)
    if n_best is not None and task != "answers":
        raise ConfigError(f"n_best is of answers, but the run in {workdir} is of {task}")
    file = read_input(str(source), task, config.get("data", {}), format, fields, label)
    predictor = _load(workdir, config, step, options)
    predictions = predictor.predict_texts(file.given)
    if n_best is not None:
        write_target(n_best, candidates_of(predictions))
    write_target(target, file.filled(predictions))
    return len(predictions)


def read_input(
    source: str,
    task: str,
    data: Any,
    format: str | None = None,
    fields: Sequence[str] | None = None,
    label: str | None = None,
) -> InputFile:
    """Reads a file to predict from.

    Args:
      source: the file.
      task: of the run's data.
      data: `config.data` of the run, or nothing.
      format: as in ``predict_file``.
      fields: as there.
      label: as there.

    Raises:
      ConfigError: the format is unknown, or not that of the task.
      ValueError: the file cannot be read.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format is {format!r}; {nearest(format, FORMATS)}")
    known = {"tagging": ("conll",), "answers": ("squad",)}.get(task, ("tsv", "jsonl"))
    if format is not None and format not in known:
        raise ConfigError(f"format is {format!r}, must be {' or '.join(known)} for {task}")
    if task == "tagging":
        return read_words(source)
    if task == "answers":
        return read_questions(source)
    if format is None:
        ending = Path(source.removesuffix(".gz")).suffix
        by_name = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".tsv": "tsv"}.get(ending)
        format = by_name or ("jsonl" if data.get("name") == "jsonl_labels" else "tsv")
    chosen = tuple(fields or data.get("fields") or ("text",))
    read = read_json_lines if format == "jsonl" else read_table
    return read(source, chosen, label or data.get("label") or "label")
