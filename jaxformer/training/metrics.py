"""Figures of a run on disk: `metrics.jsonl`, one JSON object a line, each step once whatever interrupted the run."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics file in order; a line that a killed writer left unfinished is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def cut_back(path: Path, step: int) -> int:
    """Drops the records after `step`, and unfinished lines, so that a continued run writes each step once.

    Args:
      path: the metrics file; nothing happens where there is none.
      step: the step that was restored, in updates.

    Returns:
      How many lines were dropped.
    """
    if not path.is_file():
        return 0
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    with path.open(encoding="utf-8") as file:
        dropped = sum(1 for _ in file) - len(kept)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(_line(record) for record in kept), encoding="utf-8")
    temporary.replace(path)
    return dropped


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _strict(value) for name, value in record.items()}, ensure_ascii=False) + "\n"


def _strict(value: Any) -> Any:
    """JSON knows no NaN or infinity: such a figure is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    """Appends records to `metrics.jsonl`, and to TensorBoard event files where asked.

    Args:
      path: the metrics file.
      tensorboard: folder of event files; None = no TensorBoard.

    Raises:
      ImportError: `tensorboard` is given and tensorboardX is not installed.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None):
        self._summaries = _summary_writer(tensorboard) if tensorboard is not None else None
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, **figures: float | int | str | None) -> None:
        """Appends one record.

        Args:
          step: updates done.
          split: "train", "validation" or "sample".
          **figures: numbers or text by name.
        """
        # One write of a whole line, flushed: after a kill at most the last line is unfinished.
        self._file.write(_line({"step": step, "split": split, **figures}))
        self._file.flush()
        if self._summaries is not None:
            for name, value in figures.items():
                if isinstance(value, str):
                    self._summaries.add_text(f"{split}/{name}", value, step)
                elif value is not None:
                    self._summaries.add_scalar(f"{split}/{name}", value, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()
        if self._summaries is not None:
            self._summaries.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ImportError(
            "log.tensorboard needs tensorboardX: pip install 'jaxformer[tensorboard]', or set it to false"
        ) from None
    return SummaryWriter(str(folder))
