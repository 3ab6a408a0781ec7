"""What a run tells its user, on stderr: sentences, and a bar on a terminal or plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Reports a run; use as a context. Silent where `quiet`, as in all processes but the first.

    Args:
      quiet: say nothing.
    """

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._total = 0
        self._last_line = 0.0
        self._began = (0, 0.0)

    def say(self, text: str) -> None:
        """Prints text on stderr, above the bar where there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def start(self, step: int, total: int) -> None:
        """Begins to show progress from `step` of `total` updates."""
        self._total, self._began, self._last_line = total, (step, time.monotonic()), time.monotonic()
        if self._quiet or not sys.stderr.isatty():
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task("train", total=total, completed=step, figures="compiling")

    def update(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the figures of a step: loss in nats per token, speed in tokens per second where it is known."""
        figures = f"loss {loss:.4f}" + (f"  {tokens_per_second:,.0f} tokens/s" if tokens_per_second else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or step == self._total:
            self._last_line = now
            self.say(f"step {step}/{self._total}  {figures}  ETA {self._remaining(step, now)}")

    def _remaining(self, step: int, now: float) -> str:
        first, began = self._began
        seconds = int((now - began) / max(step - first, 1) * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.stop()
