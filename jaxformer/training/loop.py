"""One run from start to end: mesh, data, model and optimizer, restore or init, steps, close."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.training.assembly import Parts, load_data, make_parts
from jaxformer.training.buckets import evaluate_buckets, say_buckets
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.config import RunConfig, resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.drawing import draw_sample
from jaxformer.training.evaluate import EvalStep, batches_of, evaluate
from jaxformer.training.evaluating_tasks import check_predictions
from jaxformer.training.example_figures import example_figures
from jaxformer.training.metrics import MetricsWriter, read_metrics
from jaxformer.training.pondering import write_ponder_maps
from jaxformer.training.progress import Progress
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import predicts, record_task
from jaxformer.training.sharding import make_mesh, shard_batch
from jaxformer.training.signals import Interruption, TrainingInterrupted, deferred_interruption
from jaxformer.training.starting import start_values
from jaxformer.training.startup import (
    check_batches,
    check_config,
    check_sample,
    earlier_run,
    introduce,
    open_records,
    restore_or_init,
    sole_writer,
    training_batches,
)
from jaxformer.training.state import TrainState
from jaxformer.training.step import make_eval_step
from jaxformer.training.step_log import StepLog


def train_and_evaluate(config: RunConfig | ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains to the end of a config, from the last checkpoint where the run directory has one.

    The same config, data and machine give the same parameters bit for bit, however often the run was interrupted.
    SIGTERM and Ctrl-C let the running step finish and save it; a second Ctrl-C ends at once.

    Args:
      config: from `load_config`, or a ConfigDict like those.
      workdir: the run directory; made where it does not exist.

    Returns:
      The last figures: status "completed", step, training loss, and the validation figures of `evaluate`.

    Raises:
      ValueError: config, data, run directory or checkpoint cannot be used; the message says why.
      TrainingInterrupted: (a KeyboardInterrupt) a signal came; everything is saved.
    """
    given = config if isinstance(config, RunConfig) else RunConfig(config)
    directory = RunDirectory(Path(workdir))
    enable_compilation_cache()
    with (
        deferred_interruption() as interruption,
        sole_writer(directory),
        Progress(quiet=jax.process_index() > 0) as progress,
    ):
        mesh = make_mesh(**given.config.mesh)
        earlier = earlier_run(directory)
        check_config(given.config, earlier[0].config if earlier else None, directory.path)
        check_batches(given.config, mesh)
        started = start_values(given.config, earlier[1] if earlier else None)
        begun = resolve(given.config, started)
        data = load_data(begun, directory if earlier else None)
        decided = earlier[1] if earlier else {**started, **decided_values(begun, data)}
        config = resolve(given.config, decided)
        check_sample(config, data)
        check_predictions(config)
        parts = make_parts(config, mesh)
        introduce(progress, config, mesh, data, parts)
        keep = {"keep_latest": config.checkpoint.keep_latest, "keep_best": config.checkpoint.keep_best}
        with Checkpoints(directory.checkpoints, **keep) as checkpoints:
            for note in checkpoints.notes:
                progress.say(note)
            batches = training_batches(config, data, mesh)
            state, start = restore_or_init(config, parts, checkpoints, batches, data, progress)
            with open_records(directory, given, decided, data, start) as metrics:
                if predicts(config) and metrics is not None:
                    record_task(directory, data)
                run = _Run(config, workdir, mesh, data, parts, checkpoints, metrics, progress, interruption)
                return _train(run, state, start, batches)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What stays the same from step to step."""

    config: ConfigDict
    workdir: str | Path
    mesh: Mesh
    data: Any
    parts: Parts
    checkpoints: Checkpoints
    metrics: MetricsWriter | None
    progress: Progress
    interruption: Interruption


def _train(run: _Run, state: TrainState, start: int, batches: Any) -> dict[str, Any]:
    """The steps from `start` to the last, with what is due between them."""
    config, last = run.config, run.config.train.steps
    if start >= last:
        return _already_done(run, state, start)
    eval_step = jax.jit(make_eval_step(run.parts.model, run.parts.objective))
    log = StepLog(run.metrics, run.progress, stop=config.train.non_finite == "stop")
    saved, figures = start, {}
    run.progress.start(start, last)
    for step in range(start + 1, last + 1):
        _stop_if_asked(run, log, state, step - 1, saved, batches)
        state, step_metrics = run.parts.train_step(state, shard_batch(next(batches), run.mesh))
        log.add(step, step_metrics)
        evaluating, saving = due(step, config.eval.every_steps, last), due(step, config.checkpoint.every_steps, last)
        if evaluating or saving or due(step, config.log.every_steps, last):
            log.write()
        if evaluating:
            figures = _evaluate(run, eval_step, state, step)
            saving |= run.checkpoints.is_best(figures["loss"])
        if saving:
            run.checkpoints.save(step, state, batches, _facts(run, figures if evaluating else {}))
            saved = step
        if evaluating:
            _draw_sample(run, state, step)
        if evaluating or saving:
            log.restart_clock()
    _write_ponder_maps(run, state, last)
    run.checkpoints.wait()
    return _result(last, log.last["loss"], figures)


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps (0 = never but at the last) is due."""
    return step == last or (every > 0 and step % every == 0)


def _result(step: int, loss: float | None, figures: Mapping[str, Any]) -> dict[str, Any]:
    validation = {name if name != "loss" else "validation_loss": value for name, value in figures.items()}
    return {"status": "completed", "step": step, "train_loss": loss, **validation}


def _already_done(run: _Run, state: TrainState, step: int) -> dict[str, Any]:
    """The figures of a run that has nothing left to do."""
    run.progress.say(f"nothing to do: step {step} is saved and train.steps is {run.config.train.steps}")
    records = [record for record in read_metrics(RunDirectory(Path(run.workdir)).metrics) if record.pop("step") == step]
    figures = {record.pop("split"): record for record in records}
    validation = figures.get("validation")
    if validation is None:
        eval_step = jax.jit(make_eval_step(run.parts.model, run.parts.objective))
        validation = _evaluate(run, eval_step, state, step)
        _draw_sample(run, state, step)
    else:
        validation |= {"buckets": {name: figures[name] for name in run.data.buckets}} if run.data.buckets else {}
    return _result(step, figures.get("train", {}).get("loss"), validation)


def _facts(run: _Run, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds besides arrays and data position."""
    return {"loss": figures.get("loss"), "data_hash": run.data.hash}


def _evaluate(run: _Run, eval_step: EvalStep, state: TrainState, step: int) -> dict[str, Any]:
    """Evaluates on the validation data, and on those that are kept apart, and writes the figures."""
    batches = batches_of(run.data.validation_rows, run.config, run.mesh)
    figures = evaluate(eval_step, state.evaluation_params, state.model_state, batches, run.mesh, run.data.bits_per)
    bits = "".join(f"  {figures[name]:.4f} {name.replace('_', ' ')}" for name in run.data.bits_per)
    run.progress.say(
        f"step {step}  validation loss {figures['loss']:.4f}  perplexity {figures['perplexity']:.4g}{bits}"
    )
    buckets = evaluate_buckets(
        eval_step, run.parts.model, state.evaluation_params, state.model_state, run.config, run.data, run.mesh
    )
    say_buckets(run.progress.say, buckets)
    directory = RunDirectory(Path(run.workdir))
    of_texts = example_figures(directory, run.config, run.parts.model, state, run.data, run.mesh)
    if of_texts:
        run.progress.say("  " + "  ".join(f"{name.replace('_', ' ')} {of_texts[name]:.4g}" for name in of_texts))
    figures |= of_texts
    if run.metrics is not None:
        run.metrics.write(step, "validation", **figures)
        for name, values in buckets.items():
            run.metrics.write(step, name, **values)
    return {**figures, "buckets": buckets} if buckets else figures


def _draw_sample(run: _Run, state: TrainState, step: int) -> None:
    """Writes a sample, where the config asks for one."""
    # One process draws the sample; the parameters of several are spread out of its reach.
    if run.metrics is not None and jax.process_count() == 1:
        directory = RunDirectory(Path(run.workdir))
        sample = draw_sample(
            run.parts.model, state.evaluation_params, state.model_state, run.data, run.config, step, directory
        )
        if sample is not None:
            run.metrics.write(step, "sample", **sample)
            run.progress.say("sample:\n" + "".join(sample.values()))


def _write_ponder_maps(run: _Run, state: TrainState, step: int) -> None:
    """Writes how many steps every token made, where tokens halt by themselves."""
    directory = RunDirectory(Path(run.workdir))
    model, data = run.parts.model, run.data
    folder = write_ponder_maps(
        directory, step, model, state.evaluation_params, state.model_state, run.config, data, run.mesh
    )
    if folder is not None:
        run.progress.say(f"ponder maps: {folder}")


def _stop_if_asked(run: _Run, log: StepLog, state: TrainState, step: int, saved: int, batches: Any) -> None:
    """Saves and raises if a signal has come to this process or another.

    Raises:
      TrainingInterrupted: a signal came.
    """
    name = run.interruption.signal_name
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        if multihost_utils.process_allgather(name is not None).any():
            name = name or "SIGTERM"
    if name is None:
        return
    run.progress.stop()
    log.fetch()
    if step > saved:
        run.checkpoints.save(step, state, batches, _facts(run, {}))
    run.checkpoints.wait()
    run.progress.say(
        f"interrupted by {name} after step {step}, which is saved; go on with: jaxformer train --workdir={run.workdir}"
    )
    raise TrainingInterrupted(step, name)
