"""The settings of positions that are vectors of rows and columns, refused where they do not fit."""

import math
from typing import Any

from jaxformer.layers import check_axes, square_axes

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "relative", "axial", "none")

TABLES = ("learned", "axial")
"""Positions that end at ``max_length``."""


def check_positions(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Raises:
      ValueError: as said.
    """
    if config.positions != "axial":
        for name in ("axial_shape", "axial_dims"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}={getattr(config, name)!r} needs positions='axial', not {config.positions!r}")
        return
    shape = axial_shape(config)
    check_axes(shape, config.axial_dims, config.embed_dim)
    if math.prod(shape) < config.max_length:
        raise ValueError(
            f"axial_shape={shape!r} has {math.prod(shape)} positions, fewer than max_length={config.max_length}"
        )


def axial_shape(config: Any) -> tuple[int, ...]:
    """The config's ``axial_shape``, or one that holds ``max_length`` positions."""
    return square_axes(config.max_length) if config.axial_shape is None else config.axial_shape
