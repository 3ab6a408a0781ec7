"""One of several runs trained together: its directory, records and checkpoints, as those of a run trained alone."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxformer.training.checkpoint_reading import CheckpointError, find_steps
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.metrics import MetricsWriter
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.run_predictor import predicts, record_task
from jaxformer.training.starting import start_values
from jaxformer.training.startup import check_config, earlier_run, open_records, sole_writer
from jaxformer.training.state import TrainState
from jaxformer.training.sweep_spec import SweepRun


@dataclasses.dataclass
class Member:
    """A run among those trained together.

    Attributes:
      run: its name, settings and config as given.
      directory: its run directory.
      begun: its config with what its start decides.
      earlier: what it decided when it began; None of a new run.
      config: with all values decided, once the data are known.
      decided: those values.
      stopped: the step that was not finite, of a run that stops there.
      figures: of the last evaluation.
      evaluated: the step of that evaluation.
    """

    run: SweepRun
    directory: RunDirectory
    begun: ConfigDict
    earlier: dict[str, object] | None
    config: ConfigDict
    decided: dict[str, object] = dataclasses.field(default_factory=dict)
    stopped: int | None = None
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated: int = 0
    _metrics: MetricsWriter | None = None
    _checkpoints: Checkpoints | None = None

    @property
    def step(self) -> int:
        """The last step that is saved; 0 of a new run."""
        steps, _ = find_steps(self.directory.checkpoints)
        return steps[-1] if steps else 0

    def decide(self, data: Any) -> None:
        """Decides the values that the config leaves to the data."""
        started = start_values(self.run.given.config, self.earlier)
        self.decided = self.earlier or {**started, **decided_values(self.begun, data)}
        self.config = resolve(self.run.given.config, self.decided)

    def open(self, data: Any, start: int, stack: contextlib.ExitStack) -> None:
        """Opens records and checkpoints for the time of a stack of contexts, as a run that begins or goes on."""
        keep = {"keep_latest": self.config.checkpoint.keep_latest, "keep_best": self.config.checkpoint.keep_best}
        self._checkpoints = stack.enter_context(Checkpoints(self.directory.checkpoints, **keep))
        self._metrics = stack.enter_context(open_records(self.directory, self.run.given, self.decided, data, start))
        if predicts(self.config):
            record_task(self.directory, data)

    def restore(self, abstract: TrainState, step: int, batches: Any, data: Any) -> TrainState:
        """The state of a step saved; the batches then stand where they stood.

        Raises:
          CheckpointError: the checkpoint does not fit the model, or the data have changed since.
        """
        checkpoints = self._opened()
        saved = checkpoints.facts(step).get("data_hash")
        if saved != data.hash:
            raise CheckpointError(
                f"{self.run.name}: the training data have changed since step {step} was saved (hash {saved} then, "
                f"{data.hash} now): the run cannot go on; begin another sweep in a new workdir"
            )
        return checkpoints.restore(step, abstract, batches)

    def write_step(self, step: int, record: Mapping[str, float], tokens_per_second: float | None) -> None:
        """Writes a step's figures; the speed is of this run's own tokens in the time of all."""
        if self._metrics is not None:
            self._metrics.write(step, "train", **record, tokens_per_second=tokens_per_second)

    def write_evaluation(self, step: int, figures: dict[str, Any], buckets: Mapping[str, Mapping[str, float]]) -> None:
        """Writes the figures of an evaluation, and of those of rows that are kept apart."""
        self.figures, self.evaluated = figures, step
        if self._metrics is not None:
            self._metrics.write(step, "validation", **figures)
            for name, values in buckets.items():
                self._metrics.write(step, name, **values)

    def is_best(self, loss: float) -> bool:
        """Whether a step of this loss would be among the best that are kept."""
        return self._opened().is_best(loss)

    def save(self, step: int, state: TrainState, batches: Any, facts: Mapping[str, Any]) -> None:
        """Starts to save a step, unless it is saved."""
        if step not in self._opened().steps:
            self._opened().save(step, state, batches, facts)

    def _opened(self) -> Checkpoints:
        assert self._checkpoints is not None, "opened before it is used"
        return self._checkpoints


def check_run(run: SweepRun, folder: Path) -> None:
    """Refuses a run before anything is loaded, a finished one too.

    Raises:
      ConfigError: the config cannot be used, or the run began with another.
    """
    directory = RunDirectory(folder / run.name)
    earlier = earlier_run(directory)
    check_config(run.given.config, earlier[0].config if earlier else None, directory.path)


def make_member(run: SweepRun, folder: Path, stack: contextlib.ExitStack) -> Member:
    """Makes or finds a run's directory and holds it for the time of a stack of contexts.

    Raises:
      RunDirectoryError: the folder cannot be written, or another process writes to it.
    """
    directory = RunDirectory(folder / run.name)
    stack.enter_context(sole_writer(directory))
    earlier = earlier_run(directory)
    started = start_values(run.given.config, earlier[1] if earlier else None)
    begun = resolve(run.given.config, started)
    return Member(run, directory, begun, earlier[1] if earlier else None, begun)
