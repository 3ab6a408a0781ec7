"""Many runs from one config: those that differ in numbers alone are trained together by one program.

Seeds, and the floats of the optimizer and the schedule, differ within a program; runs that differ in anything else are
groups that are trained one after another. Every run has an ordinary run directory, from which it can be evaluated, gone
on with alone, and generated from. Samples, translations and predictions are not drawn in a sweep, but afterwards by the
commands for them.

A run's first loss and gradients are those of the run alone but for the order of sums in a batched product (1e-6), and
so are its next steps at moderate learning rates (float32 on a CPU: 1e-3 after 50 steps); large rates amplify rounding,
whatever its source. A decay rate that is swept is a float32 number, where that of a run alone is one of Python: 1 - b2
then differs by some 1e-5 of itself.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.training.assembly import load_data, tokenizer_name
from jaxformer.training.checkpoint_reading import find_steps
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.config import RunConfig
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.progress import Progress
from jaxformer.training.run_directory import RunDirectory, RunDirectoryError
from jaxformer.training.signals import Interruption, TrainingInterrupted, deferred_interruption
from jaxformer.training.startup import sole_writer
from jaxformer.training.step_log import NonFiniteError
from jaxformer.training.sweep_groups import make_groups
from jaxformer.training.sweep_loop import train_together
from jaxformer.training.sweep_members import Member, check_run, make_member
from jaxformer.training.sweep_parts import check_mesh, check_randomness
from jaxformer.training.sweep_plot import draw_sweep
from jaxformer.training.sweep_record import SweepDirectory, SweepRecord, read_record
from jaxformer.training.sweep_spec import SweepRun, plan_runs
from jaxformer.training.sweep_table import Row, as_text, result_row, write_csv


def run_sweep(
    base: RunConfig, sweep: str, workdir: str | Path, *, separate: bool = False, max_together: int | None = None
) -> list[Row]:
    """Trains the runs of a sweep, those that are not finished, and writes `sweep.csv` and `sweep.png`.

    Args:
      base: the config that all begin with.
      sweep: such as `optimizer.learning_rate=1e-4,1e-3; seed=0..3` (see `parse_sweep`).
      workdir: the sweep's folder, made where it does not exist; the runs stand in `runs` within it.
      separate: trains all runs one after another, each as `train_and_evaluate` does.
      max_together: runs trained together at most, which bounds the memory; None = any number.

    Returns:
      A row for each run, as in `sweep.csv` (see `result_row`): besides, seconds (the time of the training in which it
      was, compilation and evaluation included) and together (how many runs shared that time).

    Raises:
      ValueError: sweep, config, data, folder or checkpoints cannot be used; the message says why.
      TrainingInterrupted: (a KeyboardInterrupt) a signal came; everything is saved.
    """
    runs = plan_runs(base, sweep)
    groups = [[run] for run in runs] if separate else make_groups(runs, max_together)
    if jax.process_count() > 1:
        raise ConfigError(f"a sweep runs in one process, not in {jax.process_count()}")
    if not separate:
        check_randomness()
    directory = SweepDirectory(Path(workdir))
    if RunDirectory(directory.path).exists:
        raise RunDirectoryError(f"workdir {directory.path} holds a run, not a sweep")
    enable_compilation_cache()
    with (
        deferred_interruption() as interruption,
        sole_writer(RunDirectory(directory.path)),
        Progress() as progress,
    ):
        earlier = read_record(directory).runs if directory.record.exists() else {}
        record = SweepRecord(base, sweep, separate, max_together, earlier)
        for run in runs:
            check_run(run, directory.path / "runs")
            if not separate:
                check_mesh(run.given.config)
        record.write(directory)
        progress.say(f"sweep: {len(runs)} runs in {len(groups)} group{'' if len(groups) == 1 else 's'}")
        trainer = _Trainer(directory, record, progress, interruption)
        try:
            for group in groups:
                trainer.train(group, separate)
        except TrainingInterrupted:
            progress.say(f"interrupted; go on with: jaxformer sweep --workdir={workdir}")
            raise
        finally:
            rows = _write_results(directory, record, runs)
        progress.say(as_text(rows))
        progress.say(draw_sweep(directory, runs, rows))
        return rows


class _Trainer:
    """Trains group after group; data that serve the next group too are loaded once."""

    def __init__(self, directory: SweepDirectory, record: SweepRecord, progress: Progress, interruption: Interruption):
        self._directory, self._record, self._progress = directory, record, progress
        self._interruption = interruption
        self._data: tuple[str, Any] = ("", None)

    def train(self, group: Sequence[SweepRun], separate: bool) -> None:
        """Trains the runs of a group that are not finished."""
        open_ones = [run for run in group if not self._is_finished(run)]
        if len(open_ones) < len(group):
            self._progress.say(f"finished before: {len(group) - len(open_ones)} of {len(group)} runs")
        if separate:
            for run in open_ones:
                self._train_alone(run)
        elif open_ones:
            with contextlib.ExitStack() as stack:
                members = [make_member(run, self._directory.path / "runs", stack) for run in open_ones]
                data = self._load(members[0])
                for member in members:
                    member.decide(data)
                for part in at_same_place(members, data):
                    self._train_together(part, data)

    def _is_finished(self, run: SweepRun) -> bool:
        if self._record.runs.get(run.name, {}).get("status") == "stopped":
            return True
        return is_saved(self._directory, run)

    def _load(self, member: Member) -> Any:
        """The data of a run; they are the same for all runs of a group."""
        own = member.directory if member.earlier is not None and tokenizer_name(member.begun) != "bytes" else None
        key = json.dumps([member.begun.data.to_dict(), str(own.path) if own else None], default=str)
        if self._data[0] != key:
            self._data = (key, load_data(member.begun, own))
        return self._data[1]

    def _train_together(self, members: Sequence[Member], data: Any) -> None:
        began, statuses = time.monotonic(), {member.run.name: "unfinished" for member in members}
        try:
            train_together(members, data, self._progress, self._interruption)
            statuses = {name: "completed" for name in statuses}
        finally:
            seconds = time.monotonic() - began
            for member in members:
                status = "stopped" if member.stopped is not None else statuses[member.run.name]
                self._record.note(member.run.name, status, seconds, len(members))
            self._record.write(self._directory)

    def _train_alone(self, run: SweepRun) -> None:
        self._progress.say(f"run {run.name}")
        began, status = time.monotonic(), "unfinished"
        try:
            train_and_evaluate(run.given, self._directory.run(run.name).path)
            status = "completed"
        except NonFiniteError as error:
            status = "stopped"
            self._progress.say(f"{run.name}: {error}")
        finally:
            self._record.note(run.name, status, time.monotonic() - began, 1)
            self._record.write(self._directory)


def is_saved(directory: SweepDirectory, run: SweepRun) -> bool:
    """Whether a run's last step is saved, by whichever command."""
    steps, _ = find_steps(directory.run(run.name).checkpoints)
    return bool(steps) and steps[-1] >= run.given.config.train.steps


def at_same_place(members: Sequence[Member], data: Any) -> list[list[Member]]:
    """Runs that can go on together: from the same step, and where batches differ in shape, with the same seed."""
    from jaxformer.data import GroupedRows

    grouped = isinstance(data.train_rows, GroupedRows)
    parts: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        place = (member.step, member.config.seed if grouped else 0)
        parts.setdefault(place, []).append(member)
    return list(parts.values())


def _write_results(directory: SweepDirectory, record: SweepRecord, runs: Sequence[SweepRun]) -> list[Row]:
    rows = []
    for run in runs:
        known = record.runs.get(run.name, {"status": "unfinished", "seconds": None, "together": None})
        facts = {name: known[name] for name in ("seconds", "together")}
        # The record is older than the checkpoints where the process was killed, or the run went on alone.
        status = "completed" if known["status"] == "unfinished" and is_saved(directory, run) else known["status"]
        rows.append(result_row(directory.run(run.name), run.settings, status, **facts))
    write_csv(directory.table, rows)
    return rows
