"""A picture of a sweep: the curve of every run, and a map of the last validation loss where two settings vary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.training.metrics import read_metrics
from jaxformer.training.sweep_record import SweepDirectory
from jaxformer.training.sweep_spec import SweepRun
from jaxformer.training.sweep_table import Row

_MOST_LABELS = 12
_PAPER = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}  # behind numbers on any colour


def draw_sweep(directory: SweepDirectory, runs: Sequence[SweepRun], rows: Sequence[Row]) -> str:
    """Draws `sweep.png`, where matplotlib is installed.

    Returns:
      What was done, as a sentence.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"results: {directory.table} (no plot: it needs matplotlib, pip install 'jaxformer[plots]')"
    axes = map_axes(rows, list(runs[0].settings))
    figure = Figure(figsize=(13 if axes else 7, 5), layout="constrained")
    places = figure.subplots(1, 2 if axes else 1, squeeze=False)[0]
    _draw_curves(places[0], directory, runs)
    if axes:
        _draw_map(places[1], rows, *axes)
    figure.savefig(directory.plot, dpi=120)
    return f"results: {directory.table}, {directory.plot}"


def map_axes(rows: Sequence[Row], paths: Sequence[str]) -> tuple[str, str] | None:
    """The two swept fields that a map is drawn over: those with the most values, the seed apart; None = not two."""
    counts = {path: len({str(row[path]) for row in rows}) for path in paths if path != "seed"}
    most = sorted((path for path in counts if counts[path] > 1), key=lambda path: -counts[path])[:2]
    return (most[0], most[1]) if len(most) == 2 else None


def mean_map(rows: Sequence[Row], across: str, down: str) -> tuple[list[Any], list[Any], list[list[float]]]:
    """The last validation loss by two fields: the mean over what else varies, NaN where a run has none.

    Returns:
      Values across, values down, and a row of losses for each value down.
    """
    columns, lines = (list(dict.fromkeys(row[path] for row in rows)) for path in (across, down))
    cells: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        loss = row["validation_loss"]
        cells.setdefault((row[across], row[down]), []).append(math.nan if loss is None else loss)
    means = {place: sum(losses) / len(losses) for place, losses in cells.items()}
    return columns, lines, [[means.get((column, line), math.nan) for column in columns] for line in lines]


def _draw_curves(place: Any, directory: SweepDirectory, runs: Sequence[SweepRun]) -> None:
    for index, run in enumerate(runs):
        records: list[Mapping[str, Any]] = list(read_metrics(directory.run(run.name).metrics))
        for split, style in (("train", "-"), ("validation", "o")):
            points = [
                (record["step"], record["loss"])
                for record in records
                if record.get("split") == split and record.get("loss") is not None
            ]
            label = run.name if split == "train" and len(runs) <= _MOST_LABELS else None
            place.plot(*zip(*points) if points else ([], []), style, color=f"C{index % 10}", label=label, markersize=3)
    place.set(xlabel="step", ylabel="loss (nats per token; dots: validation)")
    if len(runs) <= _MOST_LABELS:
        place.legend(fontsize=7)


def _draw_map(place: Any, rows: Sequence[Row], across: str, down: str) -> None:
    columns, lines, losses = mean_map(rows, across, down)
    image = place.imshow(losses, aspect="auto", origin="lower", cmap="viridis_r")
    place.set_xticks(range(len(columns)), [_tick(value) for value in columns])
    place.set_yticks(range(len(lines)), [_tick(value) for value in lines])
    place.set(xlabel=across, ylabel=down, title="last validation loss")
    for row, values in enumerate(losses):
        for column, loss in enumerate(values):
            place.text(column, row, f"{loss:.3f}", ha="center", va="center", fontsize=7, bbox=_PAPER)
    place.figure.colorbar(image, ax=place)


def _tick(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
