"""The settings of positions, refused where they do not fit."""

import math
from typing import Any

from jaxformer.layers import check_axes, square_axes

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "relative", "axial", "none")

TABLES = ("learned", "axial")
"""Positions that end at ``max_length``."""

VECTORS = (*TABLES, "sinusoidal")
"""Positions that are vectors added to the embedding."""


def check_positions(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Raises:
      ValueError: as said.
    """
    _check_vectors(config)
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


def _check_vectors(config: Any) -> None:
    """Where the vectors of positions begin, and what they count."""
    offset, skip = config.position_offset, config.positions_skip_padding
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(f"position_offset={offset!r} must be an integer of at least 0")
    if offset and config.positions != "learned":
        raise ValueError(f"position_offset={offset} needs positions='learned', not {config.positions!r}")
    if skip and config.positions not in VECTORS:
        raise ValueError(
            f"positions_skip_padding=True needs positions of {', '.join(VECTORS)}, not {config.positions!r}: the "
            "others depend on distances only"
        )
    if skip and config.architecture != "encoder":
        raise ValueError(
            f"positions_skip_padding=True needs architecture='encoder', not {config.architecture!r}, whose cache does "
            "not know which of its slots are padding; give positions"
        )
