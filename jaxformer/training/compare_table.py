"""A comparison as text, as CSV and as a picture."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from jaxformer.analysis.plots import draw_curves, new_figure
from jaxformer.training.compare import Row
from jaxformer.training.compare_cell import Measured
from jaxformer.training.cost_table import columns, short

_PANELS = (
    ("milliseconds of an update", lambda measured: 1000 * measured.seconds, "log"),
    ("bytes of a training step", lambda measured: measured.memory_bytes, "log"),
    ("loss per token", lambda measured: measured.loss, "linear"),
)


def compare_figures(row: Row) -> dict[str, Any]:
    """A row as one mapping, the same names for all rows; what is not known is None."""
    names = [field.name for field in dataclasses.fields(Measured)]
    own = dict.fromkeys(names) if row.measured is None else dataclasses.asdict(row.measured)
    return {
        "attention": row.attention,
        "length": row.length,
        "batch_size": row.batch_size,
        **own,
        "refusal": row.refusal,
    }


def compare_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header; None is an empty cell."""
    text = io.StringIO()
    figures = [compare_figures(row) for row in rows]
    writer = csv.DictWriter(text, list(figures[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures)
    return text.getvalue()


def compare_table(rows: Sequence[Row]) -> str:
    """A line for each row; why there is none stands below."""
    steps = next((row.measured.steps for row in rows if row.measured is not None), 0)
    table = [["attention", "length", "rows", "parameters", "update", "tokens/s", "memory", f"loss after {steps}"]]
    for row in rows:
        start = [row.attention, f"{row.length:,}", "-" if row.batch_size is None else str(row.batch_size)]
        measured = row.measured
        if measured is None:
            table.append([*start, *["-"] * 5])
            continue
        table.append(
            [
                *start,
                short(measured.parameters),
                short(measured.seconds, "s"),
                short(measured.tokens_per_second),
                short(measured.memory_bytes, "B"),
                "not finite" if measured.loss is None else f"{measured.loss:.4f}",
            ]
        )
    refused = [f"{row.attention} at {row.length:,}: {row.refusal}" for row in rows if row.refusal is not None]
    return "\n".join([columns(table), *refused])


def compare_figure(rows: Sequence[Row]) -> Any:
    """Time, memory and loss over lengths, a line for each attention that has any; what was refused is a gap.

    Raises:
      ValueError: no row was measured.
      ImportError: matplotlib is not installed.
    """
    if all(row.measured is None for row in rows):
        raise ValueError("nothing was measured, so that there is nothing to plot")
    lengths = sorted({row.length for row in rows})
    cells = {(row.attention, row.length): row.measured for row in rows}
    figure, panels = new_figure(1, len(_PANELS))
    for panel, (label, number, scale) in zip(panels, _PANELS):
        curves = {
            name: [None if cells.get((name, length)) is None else number(cells[name, length]) for length in lengths]
            for name in dict.fromkeys(row.attention for row in rows if row.measured is not None)
        }
        draw_curves(panel, curves, lengths, xlabel="length in tokens", ylabel=label, yscale=scale)
    panels[0].legend(fontsize="small")
    return figure
