"""Patterns that a config may name beside the kinds of attention, as data."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxformer.attention.patterns import bigbird, dilated, fixed, global_tokens, random_blocks, strided


@dataclass(frozen=True, kw_only=True)
class PatternKind:
    """One named pattern of `sparse_attention`.

    Attributes:
      name: the constructor's name.
      constructor: integers and tuples in, a pattern (or a tuple of them, one for each group of heads) out.
      cost: time and memory.
      causal: it can be causal.
      bidirectional: it can be other than causal.
      packing: packed documents are as alone, since the pattern depends on differences of positions only.
      paper: authors, year, title and arXiv number.
      summary: one line on what each query sees.
    """

    name: str
    constructor: Callable
    cost: str
    causal: bool = True
    bidirectional: bool = True
    packing: bool = False
    paper: str
    summary: str


PATTERNS: dict[str, PatternKind] = {
    "dilated": PatternKind(
        name="dilated",
        constructor=dilated,
        cost="O(T window) time, O(T) memory",
        packing=True,
        paper='Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150',
        summary="each query sees neighbours at multiples of a distance",
    ),
    "strided": PatternKind(
        name="strided",
        constructor=strided,
        cost="O(T (stride + T / stride)) time, O(T) memory",
        packing=True,
        paper='Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509',
        summary="each query sees the tokens within a stride, and those at multiples of it",
    ),
    "fixed": PatternKind(
        name="fixed",
        constructor=fixed,
        cost="O(T (stride + T num_summary / stride)) time, O(T) memory",
        paper='Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509',
        summary="each query sees its own block, and the last positions of every block",
    ),
    "bigbird": PatternKind(
        name="bigbird",
        constructor=bigbird,
        cost="O(T block_size (num_random + 2 window + 1)) time, O(T) memory",
        paper='Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062',
        summary="each query sees neighbouring, random and global blocks",
    ),
    "random_blocks": PatternKind(
        name="random_blocks",
        constructor=random_blocks,
        cost="O(T block_size num) time, O(T) memory",
        paper='Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062',
        summary="each query sees a few random blocks",
    ),
    "global_tokens": PatternKind(
        name="global_tokens",
        constructor=global_tokens,
        cost="O(T indices) time, O(T) memory",
        paper='Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150',
        summary="chosen tokens see all and are seen by all",
    ),
}
