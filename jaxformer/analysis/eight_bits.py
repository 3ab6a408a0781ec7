"""Attention weights in 8 bits each, such that rows that sum to 1 still do."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

UNIT = 255
"""What a row of a distribution sums to."""

_MIDDLE = 128
# How far from 1 the sum of a row of float32 weights may be.
_TOLERANCE = 1e-2
# Multiples of these spread evenly over the plane (Roberts 2018, "The Unreasonable Effectiveness of Quasirandom
# Sequences"): the reciprocals of the plastic number and of its square.
_SPREAD = (0.7548776662466927, 0.5698402909980532)
# Far above the rounding of a remainder, far below what tells two of them apart.
_TIE = 1e-6


class EightBits(NamedTuple):
    """Weights as bytes.

    Attributes:
      values: uint8 [layers, N, T, S].
      scales: float32 [layers, N]. 0 where a head's rows are distributions: the weight is value / 255. Elsewhere the
        size of the head's largest weight: the weight is (value - 128) / 127 times it.
    """

    values: UInt8[np.ndarray, "layers N T S"]
    scales: Float[np.ndarray, "layers N"]

    def weights(self) -> Float[np.ndarray, "layers N T S"]:
        """The weights that the bytes stand for, float32."""
        values = self.values.astype(np.float32)
        scales = self.scales[:, :, None, None]
        signed = (values - _MIDDLE) / np.float32(_MIDDLE - 1) * scales
        return np.where(scales == 0, values / np.float32(UNIT), signed)


def eight_bits(weights: Float[np.ndarray, "layers N T S"]) -> EightBits:
    """Weights as bytes: those of heads whose rows are distributions by largest remainder, others by rounding.

    Where no weight of a head is negative and each of its rows sums to 1 or is 0 throughout, each row's 255 units go to
    its weights: rounded down first, and what is left over to those that lost most (of equal ones to some spread over
    the row: an even row of 1,000 weights is no row of 255). So rows sum to 255 exactly, rows of zeros stay zero, and
    no weight is off by 1/255 or more. The weights of other heads are rounded to 1/127 of the largest of their head.

    Args:
      weights: finite, any float dtype.

    Returns:
      ``EightBits``.

    Raises:
      ValueError: a weight that is not finite.
    """
    if not np.isfinite(weights).all():
        raise ValueError("weights must be finite; some are not")
    values = np.zeros(weights.shape, np.uint8)
    scales = np.zeros(weights.shape[:2], np.float32)
    for index in np.ndindex(*scales.shape):  # one head at a time, in memory of that size
        head = weights[index]
        sums = head.sum(-1, dtype=np.float64)
        if _are_distributions(head, sums):
            values[index] = _largest_remainder(head, sums)
        else:
            scales[index] = np.abs(head).max()
            values[index] = np.rint(head / scales[index] * (_MIDDLE - 1)) + _MIDDLE
    return EightBits(values, scales)


def _are_distributions(head: Float[np.ndarray, "T S"], sums: Float[np.ndarray, "T"]) -> bool:
    return bool((head >= 0).all() and (~head.any(-1) | (np.abs(sums - 1) <= _TOLERANCE)).all())


def _largest_remainder(head: Float[np.ndarray, "T S"], sums: Float[np.ndarray, "T"]) -> UInt8[np.ndarray, "T S"]:
    """Bytes of one head whose rows sum to 255, or to 0 where they are empty."""
    exact = head * (UNIT / np.where(sums == 0, 1, sums))[:, None]
    low = np.floor(exact)
    missing = np.where(sums == 0, 0, UNIT) - low.sum(-1)
    rows, columns = (np.arange(size) * step for size, step in zip(head.shape, _SPREAD))
    order = np.argsort(low - exact + _TIE * ((rows[:, None] + columns) % 1), axis=-1)
    extra = np.zeros(head.shape, bool)
    np.put_along_axis(extra, order, np.arange(head.shape[-1]) < missing[:, None], axis=-1)
    return (low + extra).astype(np.uint8)
