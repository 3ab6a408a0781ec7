"""How far two settings can be tuned one after the other: measures of a grid of losses, such as rate by weight decay."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


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
