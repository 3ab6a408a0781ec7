"""Layouts whose blocks are computed in runs: many small blocks in one step, where they lie along diagonals."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from jaxformer.attention.pattern_layout import Layout, make_layout, pad_groups, split_evenly

# About so many pairs of tokens are computed at once, in blocks of about so many tokens.
RUN_AREA = 2**15
BLOCKS = (16, 32, 48, 64, 96, 128)
LARGEST_BLOCK = 256


def lay_out_runs(name: str, groups: Int[np.ndarray, "G m"], before: int, after: int) -> Iterator[Layout]:
    """Layouts in which each token of a group meets those up to `before` places back and `after` places ahead in it.

    Args:
      name: of the layouts.
      groups: position of the token in each place of a group, -1 for none; of several groups, i G + g in [g, i].
      before, after: at least 0.
    """
    number, size = groups.shape
    for block in dict.fromkeys(split_evenly(size, min(most, size))[1] for most in BLOCKS):
        parts = -(-size // block)
        diagonals = np.arange(-min(parts - 1, -(-after // block)), min(parts - 1, -(-before // block)) + 1)
        yield _make_runs(name, pad_groups(groups, parts * block).reshape(number, parts, block), diagonals)


def lay_out_block_runs(name: str, blocks: Int[np.ndarray, "n b"], before: int, after: int) -> Iterator[Layout]:
    """Layouts in which each block meets those up to `before` blocks back and `after` blocks ahead, as a whole."""
    parts, size = blocks.shape
    if size <= LARGEST_BLOCK:
        yield _make_runs(name, blocks[None], np.arange(-min(after, parts - 1), min(before, parts - 1) + 1))


def _make_runs(name: str, blocks: Int[np.ndarray, "G n b"], diagonals: Int[np.ndarray, "D"]) -> Layout:
    """Blocks of one group are in one run with the next along a diagonal; of several, with those of the next groups."""
    number, parts, size = blocks.shape
    first = [(max(diagonal, 0), max(-diagonal, 0), parts - abs(diagonal)) for diagonal in diagonals]
    if number > 1:
        first = [
            ((query + place) * number, (key + place) * number, number)
            for query, key, count in first
            for place in range(count)
        ]
    counts = np.array([count for _, _, count in first])
    most = max(1, min(int(counts.min()), RUN_AREA // size**2))
    run = min(range(most, most // 2, -1), key=lambda run: int((-(-counts // run) * run).sum()))
    pairs, skips = [], []
    for query, key, count in first:
        wanted = run * np.arange(-(-count // run))
        start = np.minimum(wanted, count - run)  # The last run ends where its diagonal or the groups do.
        pairs.append(np.stack([query + start, key + start], 1))
        skips.append(wanted - start)
    order = blocks.transpose(1, 0, 2).ravel()
    stride = number if number > 1 else None
    pairs = np.concatenate(pairs) * size
    return make_layout(name, order, order, pairs, size, size, run, np.concatenate(skips), stride)
