"""How far two settings can be tuned one after the other: measures of a grid of losses, such as rate by weight decay."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Grid(NamedTuple):
    """The figures of a sweep over two settings, and perhaps over others such as the seed.

    Attributes:
      rows: values of the first setting, ascending.
      columns: values of the second setting, ascending.
      losses: float64 [others, rows, columns]; nan where a run has no figure.
      others: what the other settings of each plane are, by path.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    losses: Float[np.ndarray, "N R C"]
    others: tuple[dict[str, str], ...]


_FIGURES = ("run", "status", "step", "best_step", "skipped", "seconds", "together")


def read_grid(
    table: str | Path,
    *,
    rows: str = "optimizer.learning_rate",
    columns: str = "optimizer.weight_decay",
    value: str = "validation_loss",
) -> Grid:
    """Reads a grid from a sweep's table.

    Args:
      table: the sweep's folder, or its ``sweep.csv``.
      rows: path of the setting that makes the rows.
      columns: path of the setting that makes the columns.
      value: the figure: a column of the table.

    Returns:
      The grid, a plane for each combination of the other settings that were swept over, in the table's order.

    Raises:
      ValueError: the table has no such column; the message lists those it has.
    """
    path = Path(table)
    with (path / "sweep.csv" if path.is_dir() else path).open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    known = list(records[0]) if records else []
    for name, column in (("rows", rows), ("columns", columns), ("value", value)):
        if column not in known:
            raise ValueError(f"{name} is {column!r}, must be a column of {path}: {', '.join(known)}")
    settings = [name for name in known if name not in (*_FIGURES, rows, columns) and not name.endswith("_loss")]
    others = [{name: record[name] for name in settings} for record in records]
    planes = [plane for index, plane in enumerate(others) if plane not in others[:index]]
    ends = [sorted({float(record[name]) for record in records}) for name in (rows, columns)]
    losses = np.full((len(planes), len(ends[0]), len(ends[1])), np.nan)
    for record, plane in zip(records, others):
        place = ends[0].index(float(record[rows])), ends[1].index(float(record[columns]))
        losses[(planes.index(plane), *place)] = float(record[value] or "nan")
    return Grid(tuple(ends[0]), tuple(ends[1]), losses, tuple(planes))


class Separability(NamedTuple):
    """Measures of a grid of final losses over two settings.

    Attributes:
      best: indices of the lowest loss, of the first and the second setting.
      correlation: Pearson's, of the logarithms of both settings over the best quarter of the cells (and those
        equal to its last): about 0 where the
        best region lies along an axis or is round, towards -1 or 1 where it lies along a diagonal; nan where the best
        quarter has one value of a setting only.
      tuning_gap: what is lost, in units of the loss, by tuning the second setting at a value of the first and then
        the first at that value of the second, against tuning both at once; mean over all values to begin with.
      additive_share: share of the variance over cells that the sum of a function of one setting and a function of the
        other explains, 0 to 1; 1 where both are independent of each other.
    """

    best: tuple[int, int]
    correlation: float
    tuning_gap: float
    additive_share: float


def separability(
    losses: Float[np.ndarray, "R C"], rows: Sequence[float], columns: Sequence[float], *, worst: float | None = None
) -> Separability:
    """Measures how far the two settings of a grid of losses depend on each other.

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, figures 1 and 2, show by eye
    that the best region of rate and decay is a diagonal for Adam with L2 and along the axes for AdamW; these figures
    say how much.

    Args:
      losses: final loss of each cell [rows, columns]; not finite = the run diverged.
      rows: values of the first setting, above 0, ascending.
      columns: values of the second setting, above 0, ascending.
      worst: losses above it, and those not finite, count as this; None = the highest finite one. A loss at chance
        keeps diverged corners from deciding ``additive_share``.

    Returns:
      The measures.

    Raises:
      ValueError: the grid has fewer than two rows or columns, sizes differ, values are not above 0 and ascending, or no
        loss is finite.
    """
    losses = np.asarray(losses, np.float64)
    for name, values, size in (("rows", rows, losses.shape[0]), ("columns", columns, losses.shape[1])):
        if len(values) != size or size < 2:
            raise ValueError(f"{name} has {len(values)} values, must be the {size} of losses, at least 2")
        if values[0] <= 0.0 or np.any(np.diff(values) <= 0.0):
            raise ValueError(f"{name} is {tuple(values)}, must be above 0 and ascending")
    finite = np.isfinite(losses)
    if not finite.any():
        raise ValueError("losses has no finite value, must have one at least")
    cap = losses[finite].max() if worst is None else worst
    losses = np.minimum(np.where(finite, losses, cap), cap)
    first, second = np.unravel_index(losses.argmin(), losses.shape)
    return Separability(
        best=(int(first), int(second)),
        correlation=_correlation(losses, np.log(rows), np.log(columns)),
        tuning_gap=_tuning_gap(losses),
        additive_share=_additive_share(losses),
    )


def _correlation(losses: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    count = max(3, round(losses.size / 4))
    row, column = np.nonzero(losses <= np.sort(losses, axis=None)[count - 1])
    x, y = rows[row] - rows[row].mean(), columns[column] - columns[column].mean()
    spread = np.sqrt(np.square(x).sum() * np.square(y).sum())
    return float((x * y).sum() / spread) if spread > 0.0 else float("nan")


def _tuning_gap(losses: np.ndarray) -> float:
    chosen = losses.argmin(1)  # the best second setting at each value of the first
    return float(losses[:, chosen].min(0).mean() - losses.min())


def _additive_share(losses: np.ndarray) -> float:
    centred = losses - losses.mean()
    total = np.square(centred).sum()
    left = centred - centred.mean(1, keepdims=True) - centred.mean(0, keepdims=True)
    return float(1.0 - np.square(left).sum() / total) if total > 0.0 else 1.0
