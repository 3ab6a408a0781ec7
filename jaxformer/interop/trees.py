"""Parameters as a flat mapping from paths to arrays, and back."""

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by path, joined by ``/``."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *sections, name = path.split("/")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = leaf
    return tree
