"""Rows that are read once, in batches of few shapes."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from jaxformer.data import Batch, ExampleRows

# Tokens of the narrowest rows; each width is twice the one before.
_NARROWEST = 16


def row_batches(
    rows: ExampleRows, batch_size: int, most: int | None = None
) -> Iterator[tuple[Int64[np.ndarray, " _"], Batch]]:
    """All rows once, from the shortest on, in batches of one size; the last of each width is filled up with padding.

    Args:
      rows: the rows; their own groups are not looked at.
      batch_size: rows of a batch.
      most: tokens of a row at most where that is known, so that the last width is the same for all rows.

    Yields:
      The rows in a batch, as many as it has that are no padding, and the batch.
    """
    longest = max(map(len, rows.tokens), default=1)
    most = max(longest, most or 0) if most is not None else None
    widths = [_NARROWEST if most is None else min(_NARROWEST, most)]
    while widths[-1] < longest:
        widths.append(2 * widths[-1] if most is None else min(2 * widths[-1], most))
    grouped = ExampleRows(rows.tokens, tuple(widths), rows.pad_id, rows.per_token, rows.per_row)
    for group, members in enumerate(grouped.groups):
        for start in range(0, len(members), batch_size):
            indices = members[start : start + batch_size]
            wanted = np.full(batch_size, len(rows), np.int64)
            wanted[: len(indices)] = indices
            yield indices, grouped.batch(wanted, group)
