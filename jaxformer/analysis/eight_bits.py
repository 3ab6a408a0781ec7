"""Attention weights in 8 bits each, such that rows that sum to 1 still do."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

UNIT = 255
"""What a row of a distribution sums to."""

_MIDDLE = 128
# How far from 1 the sum of a row of float32 weights may be.
_TOLERANCE = 1e-2


class EightBits(NamedTuple):
    """Weights as bytes.

    Attributes:
      values: uint8 [layers, N, T, S].
      scales: None where rows are distributions: the weight is value / 255. Else float32 [layers, N]: the weight is
        (value - 128) / 127 times its head's scale, the largest weight's size.
    """

    values: UInt8[np.ndarray, "layers N T S"]
    scales: Float[np.ndarray, "layers N"] | None

    def weights(self) -> Float[np.ndarray, "layers N T S"]:
        """The weights that the bytes stand for, float32."""
        if self.scales is None:
            return self.values.astype(np.float32) / np.float32(UNIT)
        signed = (self.values.astype(np.float32) - _MIDDLE) / np.float32(_MIDDLE - 1)
        return signed * self.scales[:, :, None, None]


def eight_bits(weights: Float[np.ndarray, "layers N T S"]) -> EightBits:
    """Weights as bytes: distributions by largest remainder, others by rounding.

    Where no weight is negative and every row sums to 1 or is 0 throughout, each row's 255 units go to its weights:
    rounded down first, and what is left over to those that lost most. So rows sum to 255 exactly, rows of zeros stay
    zero, and no weight is off by 1/255 or more. Other weights are rounded to 1/127 of the largest of their head.

    Args:
      weights: finite, any float dtype.

    Returns:
      ``EightBits``.

    Raises:
      ValueError: a weight that is not finite.
    """
    if not np.isfinite(weights).all():
        raise ValueError("weights must be finite; some are not")
    sums = weights.sum(-1, dtype=np.float64)
    empty = ~weights.any(-1)
    if (weights >= 0).all() and (empty | (np.abs(sums - 1) <= _TOLERANCE)).all():
        parts = [_largest_remainder(layer, row_sums) for layer, row_sums in zip(weights, sums)]
        return EightBits(np.stack(parts) if parts else np.zeros(weights.shape, np.uint8), None)
    scales = np.abs(weights).max((2, 3)).astype(np.float32)
    relative = weights / np.where(scales == 0, 1, scales)[:, :, None, None]
    return EightBits((np.rint(relative * (_MIDDLE - 1)) + _MIDDLE).astype(np.uint8), scales)


def _largest_remainder(
    weights: Float[np.ndarray, "N T S"], sums: Float[np.ndarray, "N T"]
) -> UInt8[np.ndarray, "N T S"]:
    """Bytes of one layer whose rows sum to 255, or to 0 where they are empty."""
    exact = weights * (UNIT / np.where(sums == 0, 1, sums))[..., None]
    low = np.floor(exact)
    missing = np.where(sums == 0, 0, UNIT) - low.sum(-1)
    order = np.argsort(low - exact, axis=-1, kind="stable")
    extra = np.zeros(weights.shape, bool)
    np.put_along_axis(extra, order, np.arange(weights.shape[-1]) < missing[..., None], axis=-1)
    return (low + extra).astype(np.uint8)
