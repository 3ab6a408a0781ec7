"""The figures of steps of many runs: fetched together and late, written run by run."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxformer.training.progress import Progress
from jaxformer.training.step_log import PendingSteps, step_record
from jaxformer.training.sweep_members import Member


class SweepLog(PendingSteps):
    """Collects the figures [R] of steps.

    Args:
      members: the runs, in the order of the figures.
      progress: who is told.
      stop: whether a run stops at a step that is not finite; otherwise it goes on without that step.
    """

    def __init__(self, members: Sequence[Member], progress: Progress, *, stop: bool):
        super().__init__()
        self._members, self._progress, self._stop = members, progress, stop
        self._fetched: list[tuple[int, dict[str, np.ndarray]]] = []
        self._told: set[str] = set()

    def fetch(self) -> None:
        """Fetches the figures of all steps so far; of each run, its first step that was not finite is told."""
        for step, figures in jax.device_get(self._pending):
            self._fetched.append((step, figures))
            for index in np.flatnonzero(figures["skipped"]).tolist():
                if "overflowed" not in figures or not figures["overflowed"][index]:  # that is how a loss scale is found
                    self._tell_skipped(self._members[index], step, float(figures["loss"][index]))
        self._pending = []

    def write(self) -> None:
        """Writes the figures of the last step of each run that goes on, with its speed and the steps it skipped."""
        self.fetch()
        step, figures = self._fetched[-1]
        timed = [figures["weight_sum"] for step, figures in self._fetched if step > self._timed_after]
        seconds = time.monotonic() - self._clock if self._clock and timed else None
        skipped = np.sum([figures["skipped"] for _, figures in self._fetched], axis=0)
        tokens = np.sum(timed, axis=0) if timed else np.zeros(len(self._members))
        for index, member in enumerate(self._members):
            if member.stopped is None:
                own = {name: float(values[index]) for name, values in figures.items()}
                speed = round(float(tokens[index]) / seconds, 1) if seconds else None
                member.write_step(step, step_record(own, float(skipped[index])), speed)
        losses = [own for own in figures["loss"] if np.isfinite(own)]
        total = float(np.sum(tokens)) / seconds if seconds else None
        self._progress.update(step, float(np.mean(losses)) if losses else float("nan"), total)
        self._fetched, self._timed_after = [], step
        self.restart_clock()

    def _tell_skipped(self, member: Member, step: int, loss: float) -> None:
        if member.stopped is not None:
            return
        if self._stop:
            member.stopped = step
        if member.run.name not in self._told:
            self._told.add(member.run.name)
            what = (
                "the run stops, as config.train.non_finite says"
                if self._stop
                else "skipped; later ones are counted, not told"
            )
            self._progress.say(f"{member.run.name}: step {step}: loss {loss}: not finite, {what}")
