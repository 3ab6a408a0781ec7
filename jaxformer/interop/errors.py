"""What goes wrong with a published checkpoint, as one kind of error, and how its messages list names."""

from collections.abc import Iterable

_LISTED = 12


class PretrainedError(ValueError):
    """A checkpoint that cannot be read or written; the message says why in one sentence."""


def listed(names: Iterable[str]) -> str:
    """The first dozen names with commas between them, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
