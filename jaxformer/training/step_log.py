"""The figures of training steps: fetched late, so that the device never waits, and written once each."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxformer.training.metrics import MetricsWriter
from jaxformer.training.progress import Progress

# Steps that may be under way at once: enough to keep the device busy, few enough to stop soon.
_IN_FLIGHT = 2


class NonFiniteError(ValueError):
    """A step without a finite loss or gradient, in a run that is to stop there."""


def step_record(figures: Mapping[str, float], skipped: float) -> dict[str, float]:
    """What is written of a step, from its figures and the number of steps skipped since the one written before."""
    record = {name: value for name, value in figures.items() if name not in ("loss_sum", "weight_sum")}
    return record | {"tokens": figures["weight_sum"], "skipped": skipped}


class PendingSteps:
    """The figures of steps that are on the device still, and since when their speed is measured."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._clock: float | None = None
        self._timed_after = 0

    def add(self, step: int, figures: dict[str, Any]) -> None:
        """Takes a step's figures as they are on the device, and waits for the step but one before."""
        self._pending.append((step, figures))
        if self._clock is None:  # the first step compiles, which would spoil the speed
            jax.block_until_ready(figures)
            self.restart_clock()
        elif len(self._pending) >= _IN_FLIGHT:
            jax.block_until_ready(self._pending[-_IN_FLIGHT][1]["loss"])

    def restart_clock(self) -> None:
        """Leaves the time until now, and the steps in it, out of the speed."""
        self._clock = time.monotonic()
        self._timed_after = self._pending[-1][0] if self._pending else self._timed_after


class StepLog(PendingSteps):
    """Collects the device scalars of steps.

    Args:
      metrics: where the figures go; None = nowhere.
      progress: who is told.
      stop: whether a step that is not finite ends the run; otherwise it is told and the run goes on.

    Attributes:
      last: the figures of the last step written.
    """

    def __init__(self, metrics: MetricsWriter | None, progress: Progress, *, stop: bool):
        super().__init__()
        self._metrics, self._progress, self._stop = metrics, progress, stop
        self._fetched: list[tuple[int, dict[str, float]]] = []
        self.last: dict[str, float] = {}

    def fetch(self) -> None:
        """Fetches the figures of all steps so far, and tells which were not finite.

        Raises:
          NonFiniteError: one was not, and the run is to stop there.
        """
        for step, figures in jax.device_get(self._pending):
            self._fetched.append((step, {name: float(value) for name, value in figures.items()}))
            if figures["skipped"]:
                self._tell_skipped(*self._fetched[-1])
        self._pending = []

    def write(self) -> None:
        """Writes the figures of the last step, with the speed and the steps skipped since those written before.

        Raises:
          NonFiniteError: a step was not finite, and the run is to stop there.
        """
        self.fetch()
        step, figures = self._fetched[-1]
        tokens = sum(figures["weight_sum"] for step, figures in self._fetched if step > self._timed_after)
        speed = round(tokens / (time.monotonic() - self._clock), 1) if tokens and self._clock else None
        skipped = sum(figures["skipped"] for _, figures in self._fetched)
        self.last = step_record(figures, skipped)
        if self._metrics is not None:
            self._metrics.write(step, "train", **self.last, tokens_per_second=speed)
        self._progress.update(step, figures["loss"], speed)
        self._fetched, self._timed_after = [], step
        self.restart_clock()

    def _tell_skipped(self, step: int, figures: dict[str, float]) -> None:
        if figures.get("overflowed"):  # how a dynamic loss scale finds its place: no error
            self._progress.say(f"step {step}: the gradient overflowed at loss scale {figures['loss_scale']:g}, skipped")
            return
        what = f"step {step}: loss {figures['loss']}, gradient norm {figures['gradient_norm']}"
        if self._stop:
            raise NonFiniteError(f"{what}: not finite, and config.train.non_finite is stop; nothing of it was applied")
        self._progress.say(f"{what}: not finite, skipped")
