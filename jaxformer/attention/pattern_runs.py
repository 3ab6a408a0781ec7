"""Layouts whose blocks are computed in runs: many small blocks in one step, where they lie along diagonals."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from jaxformer.attention.pattern_layout import Layout, make_layout, pad_groups, split_evenly

# About so many pairs of tokens are computed at once, in blocks of about so many tokens.
RUN_AREA = 2**16
BLOCKS = (16, 32, 48, 64, 96, 128)
LARGEST_BLOCK = 256


def lay_out_runs(name: str, groups: Int[np.ndarray, "G m"], before: int, after: int) -> Iterator[Layout]:
    """Layouts in which each token of a group meets those up to `before` places back and `after` places ahead in it.

    All first blocks of the groups come first, then all second blocks, and so on: blocks of one group that are a certain
    number of places apart are then a diagonal of all pairs of blocks, which has no gap.

    Args:
      name: of the layouts.
      groups: position of the token in each place of a group, -1 for none.
      before, after: at least 0.
    """
    number, size = groups.shape
    for block in dict.fromkeys(split_evenly(size, min(most, size))[1] for most in BLOCKS):
        parts = -(-size // block)
        furthest = min(parts - 1, -(-before // block))
        diagonals = number * np.arange(-min(parts - 1, -(-after // block)), furthest + 1)
        yield _make_runs(name, pad_groups(groups, parts * block).reshape(number, parts, block), diagonals)


def lay_out_block_runs(name: str, blocks: Int[np.ndarray, "n b"], before: int, after: int) -> Iterator[Layout]:
    """Layouts in which each block meets those up to `before` blocks back and `after` blocks ahead, as a whole."""
    parts, size = blocks.shape
    if size <= LARGEST_BLOCK:
        yield _make_runs(name, blocks[None], np.arange(-min(after, parts - 1), min(before, parts - 1) + 1))


def _make_runs(name: str, blocks: Int[np.ndarray, "G n b"], diagonals: Int[np.ndarray, "D"]) -> Layout:
    number, parts, size = blocks.shape
    total = number * parts
    counts = total - abs(diagonals)
    most = max(1, min(int(counts.min()), RUN_AREA // size**2))
    run = min(range(most, most // 2, -1), key=lambda run: int((-(-counts // run) * run).sum()))
    pairs, skips = [], []
    for diagonal, count in zip(diagonals, counts):
        wanted = run * np.arange(-(-count // run))
        start = np.minimum(wanted, count - run)  # The last run ends where the diagonal does.
        pairs.append(np.stack([start + max(diagonal, 0), start + max(-diagonal, 0)], 1))
        skips.append(wanted - start)
    order = blocks.transpose(1, 0, 2).ravel()
    return make_layout(name, order, order, np.concatenate(pairs) * size, size, size, run, np.concatenate(skips))
