"""Data of the Hugging Face Hub, through its `datasets` library (extra ``datasets``)."""

from collections.abc import Sequence
from typing import Any


def load_hub_rows(path: str, what: str) -> Any:
    """Rows of a dataset of the Hub.

    Args:
        path: ``owner/name[:config][@split]``; a split that is not named is "train".
        what: what asks for them, for messages.

    Returns:
        The library's table, which knows its ``column_names`` and ``features``.

    Raises:
        ValueError: the library is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what} need the datasets package: pip install 'jaxformer[datasets]'.") from error
    whole, _, split = path.partition("@")
    name, _, config = whole.partition(":")
    return datasets.load_dataset(name, config or None, split=split or "train")


def hub_column(rows: Any, column: str, path: str) -> list[Any]:
    """A column of a table. Raises ValueError if it has none of that name."""
    if column not in rows.column_names:
        raise ValueError(f"data {path!r} have no column {column!r}; they have {', '.join(rows.column_names)}.")
    return list(rows[column])


def paths_of_split(name: str, paths: Sequence[str], split: str) -> Sequence[str]:
    """The paths; those of the Hub, of whatever name begins with "huggingface", name their split if they did not."""
    if not name.startswith("huggingface") or isinstance(paths, str):
        return paths
    return [path if "@" in path else f"{path}@{split}" for path in paths]
