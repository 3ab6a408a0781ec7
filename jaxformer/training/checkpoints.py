"""Writing checkpoints: in the background, whole or not at all, the latest and the best kept."""

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from jaxformer.training.checkpoint_reading import (
    ITEMS,
    UNFINISHED,
    CheckpointError,
    best_steps,
    find_steps,
    first_line,
    from_dicts,
    read_facts,
    restore_items,
    to_dicts,
)
from jaxformer.training.state import TrainState

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_SET_ASIDE = "incomplete-"


def _items_of(state: TrainState) -> dict[str, dict[str, Any]]:
    return {item: to_dicts(tree) for item, tree in _trees_of(state).items()}


def _trees_of(state: TrainState) -> dict[str, dict[str, Any]]:
    """The parts of a state by item; what a run doesn't have is None, and leaves nothing on disk."""
    model = ("params", "model_state", "average")
    training = ("opt_state", "step", "rng_data", "loss_scale")
    return {
        "model": {name: getattr(state, name) for name in model},
        "training": {name: getattr(state, name) for name in training},
    }


class _Keep:
    """Orbax's preservation policy: the latest and the best."""

    def __init__(self, latest: int, best: int):
        self.latest, self.best = latest, best
        self.losses: dict[int, float | None] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = sorted(info.step for info in checkpoints)
        best = best_steps({step: self.losses.get(step) for step in steps}, self.best)
        kept = {*steps[-self.latest :], *best}
        return [info.step in kept for info in checkpoints]


class Checkpoints:
    """The checkpoints of a run that this process continues; use as a context.

    Args:
      directory: the folder; made where it does not exist. What an interrupted save left in it is removed, and a
        numbered folder that is no whole checkpoint is set aside under another name.
      keep_latest: how many of the latest steps stay, at least 1.
      keep_best: how many of the steps with the lowest loss stay besides.

    Attributes:
      notes: a sentence for each thing that was removed or set aside.

    Raises:
      ValueError: a number to keep is out of range.
      CheckpointError: the folder cannot be written.
    """

    def __init__(self, directory: Path, *, keep_latest: int, keep_best: int):
        if keep_latest < 1 or keep_best < 0:
            raise ValueError(f"keep_latest is {keep_latest}, keep_best is {keep_best}: must be at least 1 and 0")
        self.directory = directory.absolute()
        self.notes: list[str] = []
        self._keep = _Keep(keep_latest, keep_best)
        self._saving: int | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self.notes = _set_broken_aside(self.directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written to: {error.strerror or error}") from error
        self.steps = find_steps(self.directory)[0]
        self._keep.losses = {step: read_facts(self.directory, step).get("loss") for step in self.steps}
        self._manager = self._open()

    def _open(self) -> "ocp.CheckpointManager":
        import orbax.checkpoint as ocp

        if jax.process_count() > 1:  # no process may look before the first has tidied up
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("checkpoint folder ready")
        options = ocp.CheckpointManagerOptions(preservation_policy=self._keep)
        return ocp.CheckpointManager(self.directory, item_names=ITEMS, options=options)

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON object saved with a step."""
        return read_facts(self.directory, step)

    def is_best(self, loss: float) -> bool:
        """Whether a step of this loss would be among the best that are kept."""
        best = best_steps(self._keep.losses, self._keep.best)
        worst = self._keep.losses[best[-1]] if best else None
        return (
            math.isfinite(loss)
            and self._keep.best > 0
            and (len(best) < self._keep.best or worst is None or loss < worst)
        )

    def save(self, step: int, state: TrainState, iterator: Any, facts: Mapping[str, Any]) -> None:
        """Starts to save a step; the arrays are copied before this returns, the writing goes on in the background.

        An old checkpoint is deleted only after the new one is whole.

        Args:
          step: updates done.
          state: the train state.
          iterator: with grain's `get_state`, standing before the batch of the next step.
          facts: JSON object; its "loss" ranks the step.

        Raises:
          CheckpointError: this save, or the one before it, could not be written.
        """
        import orbax.checkpoint as ocp

        self.wait()
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in _items_of(state).items()}
        # The position is the same in every process, whatever their number: batches given out.
        items["facts"] = ocp.args.JsonSave({**facts, "data_position": iterator.get_state()})
        self._saving = step
        self._keep.losses[step] = facts.get("loss")
        with self._failure_told():
            self._manager.save(step, args=ocp.args.Composite(**items))
        self.steps.append(step)

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
          CheckpointError: it could not be written.
        """
        with self._failure_told():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    @contextlib.contextmanager
    def _failure_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tensorstore reports a full disk as a ValueError, the file system as an OSError
            self._keep.losses = {step: loss for step, loss in self._keep.losses.items() if step != self._saving}
            raise CheckpointError(
                f"the checkpoint of step {self._saving} could not be written to {self.directory}: {first_line(error)}"
            ) from error

    def restore(self, step: int, state: TrainState, iterator: Any) -> TrainState:
        """Restores a step: returns its state, and puts the iterator where it stood.

        Args:
          step: which checkpoint.
          state: tree of `jax.ShapeDtypeStruct` with shardings.
          iterator: over the same data, with grain's `set_state`.

        Raises:
          CheckpointError: the checkpoint does not have exactly these arrays, or cannot be read.
        """
        restored = restore_items(self.directory, step, _items_of(state))
        iterator.set_state(self.facts(step)["data_position"])
        trees = _trees_of(state)
        parts = {item: from_dicts(restored[item], tree) for item, tree in trees.items()}
        return state.replace(**parts["model"], **parts["training"])  # type: ignore[attr-defined]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is KeyboardInterrupt:  # asked to end at once: the save under way is left unfinished
            return
        if error is None:
            self.wait()
        with contextlib.suppress(Exception):  # the failure has been told, by `wait` or by the error under way
            self._manager.close()


def _set_broken_aside(directory: Path) -> list[str]:
    notes = []
    for name in find_steps(directory)[1]:
        if name.endswith(UNFINISHED):
            shutil.rmtree(directory / name)
            notes.append(f"removed {directory / name}, left by an interrupted save")
        else:
            aside = directory / f"{_SET_ASIDE}{name}"
            if aside.exists():
                shutil.rmtree(aside)
            (directory / name).rename(aside)
            notes.append(f"{directory / name} is no whole checkpoint: not used, renamed to {aside.name}")
    return notes
