"""What the presets of models with published sizes have in common."""

from collections.abc import Mapping
from typing import Any


def preset_fields(
    size: str | None,
    sizes: Mapping[str, Mapping[str, Any]],
    family: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of a config: those given, over those of the size, over those of the family.

    Args:
      size: a key of ``sizes``; None = the given fields have every size.
      sizes: fields by name of a size.
      family: fields that all sizes share.
      fields: those given.

    Raises:
      ValueError: an unknown size.
    """
    if size is not None and size not in sizes:
        raise ValueError(f"size={size!r} must be one of {', '.join(sizes)}")
    return {**family, **(sizes[size] if size else {}), **fields}
