"""What there is to know about one kind of attention, as data."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionKind:
    """One kind of attention: its functions, what it honours, what it costs and where it comes from.

    Attributes:
      name: the function's name without `_attention`.
      function: arrays in, output out.
      weights: the implied matrix [B, N, T, S], or None where there is none.
      init_cache: an empty decoding state, or None if the kind cannot decode.
      step: (state, query, key, value, ..) to (output, state), or None if the kind cannot decode; without key where
        query and key are shared.
      cost: time and memory, as in "O(T S) time, O(T + S) memory".
      causal: it can be causal.
      bidirectional: it can be other than causal.
      cross: queries and keys may be different tokens, T != S.
      cross_segments: then too a query sees keys of its own segment only.
      mixes_queries: then what a query gets depends on the other queries.
      grouped_heads, positions, segments, mask, bias, scale, dropout: the function takes them.
      packing: packed documents are as alone: it takes segments, and nothing depends on where in a row a document lies.
      shared_query_key: the function takes (query_key, value).
      arguments: names of the arrays that it needs beside query, key and value: learned, drawn or state.
      whole_only: arguments of the function that a step can do without: how a whole sequence is computed, and, where
        decoding has a rule of its own, what that rule has no place for. Any other that the step doesn't take either
        excludes decoding once it is set.
      excludes: pairs of an argument of the function and what it excludes once it is set: "causal", "cross" (queries
        and keys of different tokens) or "packing".
      paper: authors, year, title and arXiv number.
      summary: one line on what each query sees.
    """

    name: str
    function: Callable
    weights: Callable | None = None
    init_cache: Callable | None = None
    step: Callable | None = None
    cost: str
    causal: bool = True
    bidirectional: bool = True
    cross: bool = False
    cross_segments: bool = False
    mixes_queries: bool = False
    grouped_heads: bool = False
    positions: bool = False
    segments: bool = False
    mask: bool = False
    bias: bool = False
    scale: bool = False
    dropout: bool = False
    packing: bool = False
    shared_query_key: bool = False
    arguments: tuple[str, ...] = ()
    whole_only: tuple[str, ...] = ()
    excludes: tuple[tuple[str, str], ...] = ()
    paper: str
    summary: str

    def __repr__(self) -> str:
        return f"AttentionKind({self.name!r})"

    @property
    def decodes(self) -> bool:
        """Whether cached decoding is defined."""
        return self.step is not None
