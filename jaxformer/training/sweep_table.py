"""The results of a sweep: a row for each run, from the runs' own records; as CSV and as text."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.training.metrics import read_metrics
from jaxformer.training.run_directory import RunDirectory

Row = dict[str, Any]


def result_row(directory: RunDirectory, settings: Mapping[str, object], status: str, **facts: Any) -> Row:
    """The row of a run.

    Args:
      directory: of the run.
      settings: value of each swept field by path.
      status: completed, stopped (at a step that was not finite) or unfinished.
      **facts: further columns.

    Returns:
      run, the settings by path, status, step (the last written), train_loss (of that step), validation_loss (the last),
      best_validation_loss and best_step, skipped (steps that were not finite), and the facts. What is not known, or not
      finite, is None.
    """
    train, validation = _records(directory, "train"), _records(directory, "validation")
    known = [record for record in validation if record.get("loss") is not None]
    best: Mapping[str, Any] = min(known, key=lambda record: record["loss"], default={})
    last, last_validation = train[-1] if train else {}, validation[-1] if validation else {}
    return {
        "run": directory.path.name,
        **settings,
        "status": status,
        "step": last.get("step"),
        "train_loss": last.get("loss"),
        "validation_loss": last_validation.get("loss"),
        "best_validation_loss": best.get("loss"),
        "best_step": best.get("step"),
        "skipped": int(sum(record.get("skipped") or 0 for record in train)),
        **facts,
    }


def _records(directory: RunDirectory, split: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(directory.metrics) if record.get("split") == split]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows of the same columns; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)


def as_text(rows: Sequence[Row], left_out: Iterable[str] = ("run", "best_step", "skipped", "together")) -> str:
    """The rows as aligned columns."""
    names = [name for name in rows[0] if name not in set(left_out)]
    lines = [[_heading(name) for name in names], *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _heading(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
