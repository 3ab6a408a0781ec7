"""Where the keys of past tokens are kept while decoding: as few slots as a causal pattern can still come back to."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer.attention.pattern_algebra import CAUSAL, Band, Intersection, Pattern, Union, intersect
from jaxformer.attention.pattern_parts import BlockBand, Summaries, Tokens

Positions = Int[Array, "B T"]


@dataclass(frozen=True, eq=False)
class Region:
    """Slots for the keys of one part of a pattern.

    Attributes:
      pattern: the pairs whose keys are read here; those of other regions are different ones.
      size: number of slots.
      slot: the slot of a position; `size` and above for positions that are not kept.
      ring: whether later positions take the slots of earlier ones, which nothing can see any more.
      endless: whether the slots serve any number of tokens.
    """

    pattern: Pattern
    size: int
    slot: Callable[[Positions], Positions]
    ring: bool = False
    endless: bool = False


@functools.lru_cache(maxsize=256)
def find_regions(pattern: Pattern, max_length: int) -> tuple[Region, ...]:
    """The regions of `pattern & causal()` for positions below `max_length` (or any, if all are endless)."""
    pattern = intersect(pattern, CAUSAL)
    regions = _regions(pattern, max_length)
    size = sum(region.size for region in regions)
    # One slot for each position serves as well, unless the parts serve any number of tokens.
    if size > max_length or (size == max_length and not all(region.endless for region in regions)):
        regions = [_all_positions(pattern, max_length)]
    disjoint: list[Region] = []
    for number, region in enumerate(regions):
        own = intersect(region.pattern, CAUSAL)
        earlier = [other.pattern for other in regions[:number]]
        own = intersect(own, *(~pattern for pattern in earlier))
        disjoint.append(replace(region, pattern=own))
    return tuple(disjoint)


def _regions(pattern: Pattern, max_length: int) -> list[Region]:
    match pattern:
        case Band(before=int(before), dilation=dilation):
            return [_ring(pattern, before * dilation + 1, max_length)]
        case BlockBand(block_size=size, before=before):
            return [_ring(pattern, (before + 1) * size, max_length)]
        case Tokens(rows=True, indices=indices):
            # A chosen row sees all that came before it.
            return [Region(pattern, min(max(indices, default=-1) + 1, max_length), _same)]
        case Tokens(indices=indices):
            kept = tuple(index for index in indices if index < max_length)
            return [Region(pattern, len(kept), functools.partial(_number_of, kept))]
        case Summaries(stride=stride, num_summary=num_summary):
            return [Region(pattern, -(-max_length // stride) * num_summary, functools.partial(_summary_slot, pattern))]
        case Union(parts=parts):
            return [region for part in parts for region in _regions(part, max_length)]
        case Intersection(parts=parts):
            choices = [_restricted(part, parts, max_length) for part in parts if part != CAUSAL]
            return min(choices, key=lambda regions: sum(region.size for region in regions))
        case _:
            return [_all_positions(pattern, max_length)]


def _restricted(part: Pattern, parts: tuple[Pattern, ...], max_length: int) -> list[Region]:
    return [replace(region, pattern=intersect(region.pattern, *parts)) for region in _regions(part, max_length)]


def _all_positions(pattern: Pattern, max_length: int) -> Region:
    return Region(pattern, max_length, _same)


def _ring(pattern: Pattern, size: int, max_length: int) -> Region:
    endless = size <= max_length
    size = min(size, max_length)
    return Region(pattern, size, lambda positions: positions % size, ring=True, endless=endless)


def _same(positions: Positions) -> Positions:
    return positions


def _number_of(indices: tuple[int, ...], positions: Positions) -> Positions:
    found = positions[:, :, None] == np.asarray(indices, np.int32).reshape(1, 1, -1)
    number = jnp.argmax(found, -1).astype(jnp.int32) if indices else positions
    return jnp.where(found.any(-1), number, jnp.int32(len(indices)))


def _summary_slot(pattern: Summaries, positions: Positions) -> Positions:
    first = pattern.stride - pattern.offset - pattern.num_summary
    place = positions % pattern.stride - first
    slot = positions // pattern.stride * pattern.num_summary + place
    return jnp.where((place >= 0) & (place < pattern.num_summary), slot, jnp.int32(2**30))
