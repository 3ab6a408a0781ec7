"""Examples of a task as rows of few shapes: ids, and what belongs to each token and to each row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from jaxformer.data.packing import Batch
from jaxformer.data.pair_rows import bucket_widths, fitting_widths


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """Rows in groups of one width each: a ``GroupedRows``. A row is in the narrowest group that holds it.

    Args:
        tokens: ids of each row.
        widths: tokens of the rows of each group, from the narrowest on.
        pad_id: fills rows.
        per_token: by key of the batch, an array of each row, as long as its ids, and what fills it up.
        per_row: by key of the batch, the values of all rows [N], and that of a row that only fills up a batch.

    Raises:
        ValueError: a row is longer than every group.
    """

    tokens: Sequence[Int32[np.ndarray, " _"]]
    widths: tuple[int, ...]
    pad_id: int
    per_token: Mapping[str, tuple[Sequence[np.ndarray], Any]] = field(default_factory=dict)
    per_row: Mapping[str, tuple[np.ndarray, Any]] = field(default_factory=dict)

    def __post_init__(self):
        longest = max(map(len, self.tokens), default=0)
        if longest > max(self.widths):
            raise ValueError(f"a row has {longest} tokens; widths is {self.widths!r}.")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of the widest row."""
        return max(self.widths)

    @cached_property
    def groups(self) -> tuple[Int64[np.ndarray, " _"], ...]:
        """The rows of each group, in order."""
        lengths = np.array([len(ids) for ids in self.tokens], np.int64)
        group = np.searchsorted(np.array(self.widths), lengths)
        return tuple(np.flatnonzero(group == index) for index in range(len(self.widths)))

    def batch(self, indices: Integer[np.ndarray, " B"], group: int) -> Batch:
        """Rows by index, as the training step takes them.

        Args:
            indices: rows wanted [B], of that group; ``len(self)`` or more gives a row that is all padding.
            group: whose width the rows have.

        Returns:
            tokens int32 and key_mask bool [B, width], and by their keys ``per_token`` [B, width] and ``per_row`` [B].
        """
        shape = (len(indices), self.widths[group])
        batch = {"tokens": np.full(shape, self.pad_id, np.int32), "key_mask": np.zeros(shape, bool)}
        for name, (values, filling) in self.per_token.items():
            batch[name] = np.full(shape, filling, values[0].dtype if len(values) else np.int32)
        for name, (column, filling) in self.per_row.items():
            batch[name] = np.full(shape[:1], filling, column.dtype)
        for row, index in enumerate(indices.tolist()):
            if index >= len(self):
                continue
            size = len(self.tokens[index])
            batch["tokens"][row, :size], batch["key_mask"][row, :size] = self.tokens[index], True
            for name, (values, _) in self.per_token.items():
                batch[name][row, :size] = values[index]
            for name, (column, _) in self.per_row.items():
                batch[name][row] = column[index]
        return batch

    def widened(self, widths: tuple[int, ...], most: int) -> "ExampleRows":
        """The same rows, of at most ``most`` tokens, in groups of these widths, and of one more if a row needs it."""
        pairs = fitting_widths(self.tokens, self.tokens, tuple((width, width) for width in widths))
        capped = tuple(min(width, most) for width, _ in pairs)
        return ExampleRows(self.tokens, capped, self.pad_id, self.per_token, self.per_row)


def row_widths(tokens: Sequence[Integer[np.ndarray, " _"]], num_buckets: int) -> tuple[int, ...]:
    """Widths of at most so many groups such that rows hold little padding (see ``bucket_widths``)."""
    return tuple(width for width, _ in bucket_widths(tokens, tokens, num_buckets))
