"""Interruptions: SIGTERM and Ctrl-C let the running step finish; a second Ctrl-C ends at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class TrainingInterrupted(KeyboardInterrupt):
    """A run that stopped because it was asked to, with everything saved.

    Attributes:
      step: updates done and saved.
      signal_name: "SIGTERM" or "SIGINT".
    """

    def __init__(self, step: int, signal_name: str):
        super().__init__(f"interrupted by {signal_name} after step {step}")
        self.step = step
        self.signal_name = signal_name


class Interruption:
    """Whether a signal has come, and which."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal; raises KeyboardInterrupt at the second Ctrl-C."""
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


_active: list[Interruption] = []


@contextlib.contextmanager
def deferred_interruption() -> Iterator[Interruption]:
    """Catches SIGTERM and SIGINT for the time of the block; inside another such block, shares that one's.

    Outside the main thread, where Python allows no handlers, nothing is caught.
    """
    if _active:
        yield _active[-1]
        return
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {number: signal.signal(number, interruption.handle) for number in (signal.SIGTERM, signal.SIGINT)}
    _active.append(interruption)
    try:
        yield interruption
    finally:
        _active.remove(interruption)
        for number, handler in previous.items():
            signal.signal(number, handler)
