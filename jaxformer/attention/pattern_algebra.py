"""What all patterns are: immutable sets of (query position, key position) with union, intersection and components."""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jaxformer.attention.components import Component
from jaxformer.attention.inputs import check_count
from jaxformer.attention.pattern_compile import Piece, compile_pieces, count_component, count_diagonals, count_executed
from jaxformer.attention.pattern_layout import lay_out
from jaxformer.attention.pattern_runs import lay_out_runs
from jaxformer.attention.pattern_spans import Bounds, Spans

# Farther than any two tokens are from each other, and still a number of 32 bits.
FARTHEST = 2**30


class Pattern(ABC):
    """Who sees whom, as a set of pairs of positions: `|` joins, `&` intersects, `~` is all other pairs.

    Nothing depends on the length of a sequence: a longer one only has more pairs.
    """

    # Order among the parts of a union; earlier parts keep the pairs that several have.
    rank = 0
    shift_invariant = False

    @abstractmethod
    def sees(self, query: Any, key: Any) -> Any:
        """`visible` on signed integer arrays of one kind and rank."""

    @abstractmethod
    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """For pairs of blocks: whether any pair of positions may be visible, and whether all surely are."""

    @abstractmethod
    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Layouts that together cover the pattern's pairs among `length` tokens, with what each covers."""

    def __or__(self, other: "Pattern") -> "Pattern":
        return unite(self, other) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: "Pattern") -> "Pattern":
        return intersect(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> "Pattern":
        return Complement(self)

    def visible(self, query_positions: Any, key_positions: Any) -> Any:
        """Which query position sees which key position.

        Args:
          query_positions, key_positions: integers or integer arrays (numpy or JAX, traced too) that broadcast.

        Returns:
          bool array of the common shape, of numpy where both arguments are.
        """
        traced = isinstance(query_positions, jax.Array) or isinstance(key_positions, jax.Array)
        sides = [
            jnp.asarray(positions, jnp.int32) if traced else np.asarray(positions, np.int64)
            for positions in (query_positions, key_positions)
        ]
        rank = max(side.ndim for side in sides)
        return self.sees(*(side.reshape((1,) * (rank - side.ndim) + side.shape) for side in sides))

    def mask(self, length: int) -> Bool[np.ndarray, "T T"]:
        """The whole matrix for `length` tokens, for plots and tests: mask[t, s] says whether t sees s."""
        return self.dense_mask(length, length)

    def dense_mask(self, num_queries: int, num_keys: int) -> Bool[np.ndarray, "T S"]:
        """The matrix whose queries are the last `num_queries` of `num_keys` tokens.

        Raises:
          ValueError: a negative number, or more queries than keys.
        """
        check_count(num_keys, "num_keys", 0)
        if check_count(num_queries, "num_queries", 0) > num_keys:
            raise ValueError(f"num_queries is {num_queries}; it must be from 0 to the number of keys, {num_keys}.")
        queries = np.arange(num_keys - num_queries, num_keys)
        return np.asarray(self.visible(queries[:, None], np.arange(num_keys)[None]))

    def components(self, length: int, causal: bool = False) -> tuple[Component, ...]:
        """The pattern among `length` tokens as disjoint blocks for the engine: O(blocks) time and memory, remembered.

        Args:
          length: tokens.
          causal: leave out keys after the query; the same as `(pattern & causal()).components(length)`.
        """
        return _compile(self, length, causal)

    def executed_pairs(self, length: int, causal: bool = False) -> int:
        """How many (query, key) pairs the engine computes, masked ones included."""
        return sum(component.executed for component in self.components(length, causal))

    def num_pairs(self, length: int, causal: bool = False) -> int:
        """How many (query, key) pairs there are among `length` tokens, without a matrix."""
        return _count(self, length, causal)


@dataclass(frozen=True, repr=False)
class Band(Pattern):
    """Keys at multiples of `dilation` up to `before` of them back and `after` ahead; None means without end."""

    before: int | None
    after: int | None
    dilation: int = 1

    shift_invariant = True

    @property
    def _farthest(self) -> tuple[int | None, int | None]:
        """Distances up to which keys are seen, back and ahead, as 32 bits hold them."""
        before, after = (
            None if side is None else min(side * self.dilation, FARTHEST) for side in (self.before, self.after)
        )
        return before, after

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Bands of neighbours come first: they are the cheapest."""
        return 0 if self.dilation == 1 else 2

    def sees(self, query: Any, key: Any) -> Any:
        """Compares distances, and remainders before they are broadcast."""
        distance = query - key
        if self.dilation > 1:
            seen = query % self.dilation == key % self.dilation
        else:
            seen = distance == distance
        before, after = self._farthest
        if before is not None:
            seen = seen & (distance <= before)
        if after is not None:
            seen = seen & (distance >= -after)
        return seen

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """From the least and the greatest distance, and the remainders where a block has one."""
        least, greatest = query.low - key.high, query.high - key.low
        may, must = np.ones(least.shape, bool), np.ones(least.shape, bool)
        if self.dilation > 1:
            left, right = (side.common(lambda positions: positions % self.dilation) for side in (query, key))
            known = (left >= 0) & (right >= 0)
            may, must = ~known | (left == right), known & (left == right)
        before, after = self._farthest
        if before is not None:
            may, must = may & (least <= before), must & (greatest <= before)
        if after is not None:
            may, must = may & (greatest >= -after), must & (least >= -after)
        return may, must

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Tokens grouped by remainder, so that multiples of the dilation are neighbours."""
        groups = min(self.dilation, length)
        size = -(-length // groups)
        positions = np.arange(size)[None] * groups + np.arange(groups)[:, None]
        positions = np.where(positions < length, positions, -1)
        base, place = np.arange(groups)[:, None] * size, np.arange(size)[None]
        after = 0 if causal else size if self.after is None else self.after
        before = size if self.before is None else self.before
        first = np.maximum(place - before, 0)
        stop = np.minimum(place + after + 1, size)
        name = "banded" if groups == 1 else "permuted"
        runs = lay_out_runs(name, positions, before, after)
        return [(lay_out(name, positions, positions.ravel(), base + first, base + stop, runs), self)]

    def __repr__(self) -> str:
        window = self.before if self.before == self.after else (self.before, self.after)
        if self.dilation > 1:
            return f"dilated({window}, {self.dilation})"
        if window is None:
            return "everything()"
        return "causal()" if window == (None, 0) else f"local({window})"


EVERYTHING, CAUSAL = Band(None, None), Band(None, 0)


@dataclass(frozen=True, repr=False)
class Union(Pattern):
    """Pairs of any part."""

    parts: tuple[Pattern, ...]
    rank = 6

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """Whether all parts are."""
        return all(part.shift_invariant for part in self.parts)

    def sees(self, query: Any, key: Any) -> Any:
        """In any part."""
        return functools.reduce(lambda left, right: left | right, (part.sees(query, key) for part in self.parts))

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """Full where one part is."""
        may, must = zip(*(part.bounds(query, key) for part in self.parts))
        return np.any(may, axis=0), np.any(must, axis=0)

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Those of all parts."""
        return [piece for part in self.parts for piece in part.pieces(length, causal)]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class Intersection(Pattern):
    """Pairs of all parts."""

    parts: tuple[Pattern, ...]
    rank = 7

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """Whether all parts are."""
        return all(part.shift_invariant for part in self.parts)

    def sees(self, query: Any, key: Any) -> Any:
        """In every part."""
        return functools.reduce(lambda left, right: left & right, (part.sees(query, key) for part in self.parts))

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """Empty where one part is."""
        may, must = zip(*(part.bounds(query, key) for part in self.parts))
        return np.all(may, axis=0), np.all(must, axis=0)

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Those of the part that leaves the fewest pairs of blocks to compute, restricted by the others."""
        causal = causal or CAUSAL in self.parts
        choices = []
        for part in self.parts:
            if part != CAUSAL:
                others = [other for other in self.parts if other is not part]
                choices.append([(layout, intersect(region, *others)) for layout, region in part.pieces(length, causal)])
        return min(choices, key=count_executed)

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Union) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Complement(Pattern):
    """All other pairs."""

    part: Pattern
    rank = 8

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """Whether the part is."""
        return self.part.shift_invariant

    def sees(self, query: Any, key: Any) -> Any:
        """Not in the part."""
        return ~self.part.sees(query, key)

    def bounds(self, query: Spans, key: Spans) -> Bounds:
        """Empty where the part is full, and the other way round."""
        may, must = self.part.bounds(query, key)
        return ~must, ~may

    def pieces(self, length: int, causal: bool) -> list[Piece]:
        """Blocks of all tokens, less those where the part is full."""
        return [(layout, self) for layout, _ in EVERYTHING.pieces(length, causal)]

    def __invert__(self) -> Pattern:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})"


def unite(*patterns: Pattern) -> Pattern:
    """The union, flat and in one order, so that equal unions are equal objects."""
    parts = {part for pattern in patterns for part in (pattern.parts if isinstance(pattern, Union) else (pattern,))}
    if EVERYTHING in parts:
        return EVERYTHING
    if len(parts) == 1:
        return parts.pop()
    return Union(tuple(sorted(parts, key=lambda part: (part.rank, repr(part)))))


def intersect(*patterns: Pattern) -> Pattern:
    """The intersection, flat and in one order; bands become one band."""
    parts = {
        part for pattern in patterns for part in (pattern.parts if isinstance(pattern, Intersection) else (pattern,))
    }
    bands = [part for part in parts if isinstance(part, Band)]
    others = sorted(parts.difference(bands), key=lambda part: (-part.rank, repr(part)))
    band = functools.reduce(_meet, bands, EVERYTHING)
    if band != EVERYTHING or not others:
        others.append(band)
    return others[0] if len(others) == 1 else Intersection(tuple(others))


def _meet(left: Band, right: Band) -> Band:
    dilation = min(math.lcm(left.dilation, right.dilation), FARTHEST)

    def reach(*limits: tuple[int | None, int]) -> int | None:
        return min((limit * step // dilation for limit, step in limits if limit is not None), default=None)

    return Band(
        reach((left.before, left.dilation), (right.before, right.dilation)),
        reach((left.after, left.dilation), (right.after, right.dilation)),
        dilation,
    )


@functools.lru_cache(maxsize=128)
def _compile(pattern: Pattern, length: int, causal: bool) -> tuple[Component, ...]:
    check_count(length, "length", 0)
    pieces = pattern.pieces(length, causal) if length else []
    return compile_pieces([(layout, intersect(region, CAUSAL) if causal else region) for layout, region in pieces])


@functools.lru_cache(maxsize=1024)
def _count(pattern: Pattern, length: int, causal: bool) -> int:
    check_count(length, "length", 0)
    whole = intersect(pattern, CAUSAL) if causal else pattern
    if whole.shift_invariant:
        return count_diagonals(whole, length)
    return sum(count_component(component, length) for component in pattern.components(length, causal))
