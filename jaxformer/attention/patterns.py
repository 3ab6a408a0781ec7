"""Patterns of sparse attention as data: small immutable objects that say which positions see which.

`(local(64) | global_tokens((0,))) & causal()` is a value: it can be compared, hashed, printed, plotted through its
`mask(length)`, counted (`num_pairs`), and given to `sparse_attention`. `|` sees what either sees, `&` what both see,
`~` what one does not. `& causal()` and the `causal` argument of attention mean the same. What a row sees never depends
on the total length.
"""

import operator
from collections.abc import Sequence

from jaxformer.attention.inputs import check_indices
from jaxformer.attention.pattern_algebra import CAUSAL, EVERYTHING, FARTHEST, Band, Pattern
from jaxformer.attention.pattern_parts import BlockBand, Summaries, Tokens
from jaxformer.attention.pattern_random import MOST_BLOCKS, RandomBlocks

__all__ = [
    "Pattern",
    "Window",
    "bigbird",
    "blocks",
    "causal",
    "dilated",
    "everything",
    "fixed",
    "fixed_parts",
    "global_tokens",
    "local",
    "longformer",
    "random_blocks",
    "strided",
    "strided_parts",
    "summaries",
]

# How far back and ahead; None: without end.
Window = int | None | tuple[int | None, int | None]


def everything() -> Pattern:
    """Everyone sees everyone: dense attention."""
    return EVERYTHING


def causal() -> Pattern:
    """Everyone sees itself and what comes before it."""
    return CAUSAL


def local(window: Window) -> Pattern:
    """Neighbours: the token itself and `window` tokens on each side, fewer at the ends.

    Args:
      window: tokens on each side beside the token itself, or (before, after); None for all on that side.

    Raises:
      ValueError: a negative window.

    Examples:
        >>> from jaxformer.attention.patterns import local
        >>> local(1).mask(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    return Band(*_two_sides(window))


def dilated(window: Window, dilation: int) -> Pattern:
    """Neighbours at distance: the token itself and `window` tokens on each side at multiples of `dilation`.

    `dilated(1, stride)` are the neighbours a stride away alone. Beltagy et al. 2020, arXiv:2004.05150, section 3.1.

    Args:
      window: tokens seen on each side beside the token itself, or (before, after); None for all on that side.
      dilation: distance from one to the next, in tokens, at least 1.

    Raises:
      ValueError: a negative window or a dilation below 1.

    Examples:
        >>> from jaxformer.attention.patterns import dilated
        >>> dilated(1, 2).mask(4)[3].tolist()
        [False, True, False, True]
    """
    return Band(*_two_sides(window), _at_least(1, dilation, "dilation"))


def strided(stride: int) -> Pattern:
    """Neighbours closer than `stride`, and all tokens at multiples of `stride`.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section 4.3, both parts
    in one head. A causal query sees the last `stride` tokens, itself included (the paper's formula has one more), and
    every earlier token is two steps away. Best with stride near √length, for data with this period (images).

    Args:
      stride: in tokens, at least 1.

    Examples:
        >>> from jaxformer.attention.patterns import causal, strided
        >>> (strided(3) & causal()).mask(7)[6].tolist()
        [True, False, False, True, True, True, True]
    """
    row, column = strided_parts(stride)
    return row | column


def strided_parts(stride: int) -> tuple[Pattern, Pattern]:
    """(row, column) of `strided`, for one in each head or one in each layer."""
    _at_least(1, stride, "stride")
    return local(stride - 1), dilated(None, stride)


def fixed(stride: int, num_summary: int, *, offset: int = 0) -> Pattern:
    """The own block of `stride` tokens, and the last `num_summary` positions of every block.

    Child et al. 2019, arXiv:1904.10509, section 4.3, both parts in one head: for data without a period, as text.
    Without `causal()` queries see later summaries too; summaries themselves see no more than others. Heads with
    offsets of 0, num_summary, 2 num_summary, … have summaries of their own.

    Args:
      stride: tokens in a block, at least 1.
      num_summary: summary positions in each block (the paper's c), from 1 to stride.
      offset: how many positions before the end of the block the summary ends.

    Raises:
      ValueError: a number out of range, offset + num_summary above stride included.

    Examples:
        >>> from jaxformer.attention.patterns import causal, fixed
        >>> (fixed(3, 1) & causal()).mask(8)[7].tolist()
        [False, False, True, False, False, True, True, True]
    """
    own, summary = fixed_parts(stride, num_summary, offset=offset)
    return own | summary


def fixed_parts(stride: int, num_summary: int, *, offset: int = 0) -> tuple[Pattern, Pattern]:
    """(own block, summary positions) of `fixed`, for one in each head or one in each layer."""
    return blocks(_at_least(1, stride, "stride")), summaries(stride, num_summary, offset=offset)


def summaries(stride: int, num_summary: int, *, offset: int = 0) -> Pattern:
    """The summary positions of `fixed` alone, with its arguments."""
    _at_least(1, stride, "stride")
    _at_least(1, num_summary, "num_summary")
    _at_least(0, offset, "offset")
    if num_summary + offset > stride:
        raise ValueError(
            f"num_summary is {num_summary} and offset {offset}; together they must be at most stride, {stride}."
        )
    return Summaries(stride, num_summary, offset)


def blocks(block_size: int, window: int | tuple[int, int] = 0) -> Pattern:
    """The own block of `block_size` tokens, and `window` whole blocks on each side of it.

    Args:
      block_size: in tokens, at least 1.
      window: blocks on each side, or (before, after).

    Raises:
      ValueError: a block_size below 1 or a negative window.
    """
    before, after = _two_sides(window)
    if before is None or after is None:
        raise ValueError(f"window is {window}; it must be numbers of blocks.")
    return BlockBand(_at_least(1, block_size, "block_size"), before, after)


def global_tokens(indices: Sequence[int], *, columns: bool = True, rows: bool = True) -> Pattern:
    """Chosen positions that everyone sees and that see everyone; under `causal()` they too only look back.

    Args:
      indices: different positions, each at least 0; those beyond the end of a sequence are absent.
      columns: everyone sees them.
      rows: they see everyone.

    Raises:
      ValueError: negative or repeated indices, or neither columns nor rows.

    Examples:
        >>> from jaxformer.attention.patterns import global_tokens
        >>> global_tokens((0,)).mask(3).astype(int).tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    indices = _different(indices, "indices")
    if not (columns or rows):
        raise ValueError("columns and rows are both False; one must be True.")
    return Tokens(indices, bool(columns), bool(rows))


def random_blocks(
    num: int,
    seed: int,
    block_size: int = 64,
    num_blocks: int | None = None,
    *,
    exclude_window: int | None = None,
    exclude_blocks: Sequence[int] = (),
) -> Pattern:
    """Every row of blocks sees `num` different random blocks, the same in training, evaluation and decoding.

    Without num_blocks, row b draws from blocks 0 to b, as causal attention needs: b and the seed alone decide.
    With it, all rows draw from 0 to num_blocks - 1; blocks beyond the end of a sequence are absent.

    Args:
      num: blocks that each row sees, 1 to 256; fewer where fewer are left to draw.
      seed: any int; give layers and heads different ones.
      block_size: in tokens, at least 1.
      num_blocks: of the longest sequence, or None.
      exclude_window: don't draw the own block and those within this number of blocks, at most 256, of it.
      exclude_blocks: don't draw these.

    Raises:
      ValueError: a number out of range.
    """
    return RandomBlocks(
        _at_least(1, num, "num", MOST_BLOCKS),
        _at_least(None, seed, "seed"),
        _at_least(1, block_size, "block_size"),
        None if num_blocks is None else _at_least(1, num_blocks, "num_blocks"),
        None if exclude_window is None else _at_least(0, exclude_window, "exclude_window", MOST_BLOCKS),
        tuple(sorted(_different(exclude_blocks, "exclude_blocks"))),
    )


def bigbird(
    block_size: int = 64,
    num_random: int = 3,
    *,
    seed: int,
    window: int = 1,
    global_blocks: Sequence[int] = (0,),
    num_blocks: int | None = None,
) -> Pattern:
    """Neighbouring blocks, global blocks, and random blocks that are neither.

    Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062, section 2 and appendix D. No
    row is a special case: near the ends there are fewer neighbours, and a short sequence has fewer random blocks. The
    paper's code has global_blocks (0, num_blocks - 1).

    Args:
      block_size: in tokens.
      num_random: random blocks in each row.
      seed: of the random blocks; give layers and heads different ones.
      window: neighbouring blocks on each side of the own block (the paper's w is 2 window + 1).
      global_blocks: blocks that everyone sees and that see everyone.
      num_blocks: of the longest sequence: random blocks are drawn from all of them, or None: from earlier ones alone.

    Raises:
      ValueError: a number out of range.
    """
    _at_least(0, window, "window", MOST_BLOCKS)
    near = blocks(block_size, window)
    global_blocks = _different(global_blocks, "global_blocks")
    pattern = near
    if global_blocks:
        tokens = [block * block_size + place for block in global_blocks for place in range(block_size)]
        pattern = pattern | global_tokens(tokens)
    if _at_least(0, num_random, "num_random"):
        pattern = pattern | random_blocks(
            num_random, seed, block_size, num_blocks, exclude_window=window, exclude_blocks=global_blocks
        )
    return pattern


def longformer(window: Window, global_indices: Sequence[int] = (), *, dilation: int = 1) -> Pattern:
    """A sliding window and global tokens.

    Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150, section 3.1. The window here is
    one-sided: the paper's w is 2 window. Projections of their own for global tokens are the layer's affair.

    Args:
      window: tokens on each side beside the token itself, or (before, after).
      global_indices: positions that everyone sees and that see everyone.
      dilation: distance of neighbours in the window.

    Raises:
      ValueError: as in `dilated` and `global_tokens`.
    """
    near = dilated(window, dilation)
    return near | global_tokens(global_indices) if len(global_indices) else near


def _two_sides(window: Window) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window is {window}; it must be one number or (before, after).")
    before, after = (None if side is None else _at_least(0, side, "window") for side in sides)
    return before, after


def _at_least(least: int | None, number: int, name: str, most: int = FARTHEST) -> int:
    try:
        number = operator.index(None if isinstance(number, bool) else number)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {number!r}; it must be an integer.") from None
    if least is not None and not least <= number <= most:
        bound = f"least {least}" if number < least else f"most {most}"
        raise ValueError(f"{name} is {number}; it must be at {bound}.")
    return number


def _different(indices: Sequence[int], name: str) -> tuple[int, ...]:
    return tuple(sorted(_at_least(0, index, name) for index in check_indices(indices, name)))
