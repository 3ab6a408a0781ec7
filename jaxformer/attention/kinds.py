"""What there is to know about one kind of attention, as data."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention: its functions, what it honours, what it costs and where it comes from.

    Attributes:
      name: the function's name without `_attention`.
      function: arrays in, output out.
      weights: the implied matrix [B, N, T, S], or None where there is none.
      init_cache: an empty decoding state, or None if the kind cannot decode.
      step: (state, query, key, value, ..) to (output, state), or None if the kind cannot decode.
      cost: time and memory, as in "O(T S) time, O(T + S) memory".
      causal, cross, grouped_heads, positions, segments, bias, dropout: what the function honours; cross means that
        queries and keys may be different tokens, T != S.
      paper: authors, year, title and arXiv number.
      summary: one line on what each query sees.
    """

    name: str
    function: Callable
    weights: Callable | None
    init_cache: Callable | None
    step: Callable | None
    cost: str
    causal: bool
    cross: bool
    grouped_heads: bool
    positions: bool
    segments: bool
    bias: bool
    dropout: bool
    paper: str
    summary: str

    @property
    def decodes(self) -> bool:
        """Whether cached decoding is defined."""
        return self.step is not None
