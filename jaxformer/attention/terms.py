"""All that shapes attention beside queries, keys and values, cut block by block and never length x length."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import check_broadcast, check_flag, check_key_mask, check_token_numbers
from jaxformer.functional import as_mask, causal_mask, combine_masks, padding_mask, segment_mask

# An array that broadcasts to [B, N, T, S], or a pytree that is a function of query and key positions.
Bias: TypeAlias = Any
Index: TypeAlias = int | Int[Array, ""]


def static(default: Any) -> Any:
    """A dataclass field that is part of the tree's structure."""
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Terms:
    """Who sees whom, of a whole attention or of one block of it. None: no such restriction.

    Attributes:
      key_mask: bool [B or 1, S], True where the key exists.
      query_positions, key_positions: int32 [B or 1, T] and [.., S]; None: `query_start` + arange, `key_start` + arange.
      query_segments, key_segments: int32; tokens of different segments do not see each other.
      mask: bool [B or 1, N or 1, T or 1, S or 1], True = may attend.
      query_start, key_start: position of the first query and key where positions are None.
      num_queries, num_keys: T and S.
      causal: keys at later positions than the query are hidden.
    """

    key_mask: Any = None
    query_positions: Any = None
    key_positions: Any = None
    query_segments: Any = None
    key_segments: Any = None
    mask: Any = None
    query_start: Any = 0
    key_start: Any = 0
    num_queries: int = static(1)
    num_keys: int = static(1)
    causal: bool = static(False)

    @property
    def has_default_positions(self) -> bool:
        """Whether which pairs the causal rule hides is known before anything runs."""
        return self.query_positions is None

    def positions(self) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """Positions of the queries and keys, as arrays."""
        if self.query_positions is not None:
            return self.query_positions, self.key_positions
        queries = self.query_start + jnp.arange(self.num_queries, dtype=jnp.int32)[None]
        return queries, self.key_start + jnp.arange(self.num_keys, dtype=jnp.int32)[None]

    def block(self, query_start: Index, num_queries: int, key_start: Index, num_keys: int) -> "Terms":
        """The terms of `num_queries` queries from `query_start` on and `num_keys` keys from `key_start` on."""
        queries, keys = (query_start, num_queries), (key_start, num_keys)
        return replace(
            self,
            key_mask=slice_axis(self.key_mask, 1, *keys),
            query_positions=slice_axis(self.query_positions, 1, *queries),
            key_positions=slice_axis(self.key_positions, 1, *keys),
            query_segments=slice_axis(self.query_segments, 1, *queries),
            key_segments=slice_axis(self.key_segments, 1, *keys),
            mask=slice_pairs(self.mask, *queries, *keys),
            query_start=self.query_start + query_start,
            key_start=self.key_start + key_start,
            num_queries=num_queries,
            num_keys=num_keys,
        )

    def visible(self) -> Bool[Array, "..."] | None:
        """Which pairs may meet: bool that broadcasts to [B, N, T, S], or None for all."""
        return combine_masks(
            causal_mask(*self.positions()) if self.causal else None,
            None if self.key_mask is None else padding_mask(self.key_mask),
            None if self.query_segments is None else segment_mask(self.query_segments, self.key_segments),
            self.mask,
        )

    def added(self, bias: Bias) -> Float[Array, "..."] | None:
        """The bias of these pairs, broadcasting to [B, N, T, S]; an array must have been sliced to them."""
        return bias(*self.positions()) if callable(bias) else bias


def slice_axis(array: Array | None, axis: int, start: Index, size: int) -> Array | None:
    """A part of one axis; an axis of one entry is shared by all and stays."""
    if array is None or array.shape[axis] in (1, size):
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def slice_pairs(array: Array | None, query_start: Index, queries: int, key_start: Index, keys: int) -> Array | None:
    """The block of an array over [B, N, T, S], any axis of which may be 1."""
    return slice_axis(slice_axis(array, 2, query_start, queries), 3, key_start, keys)


def make_terms(
    shape: tuple[int, int, int, int],
    *,
    key_mask: ArrayLike | None,
    causal: bool,
    query_positions: ArrayLike | None,
    key_positions: ArrayLike | None,
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
    mask: ArrayLike | None,
    bias: ArrayLike | Callable | None,
) -> tuple[Terms, Bias]:
    """The checked terms and bias of an attention over `shape` = (B, N, T, S)."""
    batch_size, _, num_queries, num_keys = shape
    sizes = (batch_size, num_queries, num_keys)
    causal = check_flag(causal, "causal")
    query_positions, key_positions = check_token_numbers(query_positions, key_positions, "positions", *sizes)
    query_segments, key_segments = check_token_numbers(query_segments, key_segments, "segments", *sizes)
    if query_positions is None and num_queries > num_keys and (causal or callable(bias)):
        raise ValueError(
            f"{num_queries} queries over {num_keys} keys: the queries are taken as the last of the keys, so there can "
            "be no more of them; give query_positions and key_positions."
        )
    terms = Terms(
        key_mask=check_key_mask(key_mask, batch_size, num_keys),
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=_check_mask(mask, shape),
        query_start=num_keys - num_queries,
        num_queries=num_queries,
        num_keys=num_keys,
        causal=causal,
    )
    return terms, _check_bias(bias, shape, terms)


def _check_mask(mask: ArrayLike | None, shape: tuple[int, int, int, int]) -> Bool[Array, "#B #N #T #S"] | None:
    if mask is None:
        return None
    mask = as_mask(mask)
    return mask.reshape(check_broadcast(mask.shape, "mask", shape))


def _check_bias(bias: ArrayLike | Callable | None, shape: tuple[int, int, int, int], terms: Terms) -> Bias:
    if bias is None:
        return None
    if callable(bias):
        check_broadcast(jax.eval_shape(bias, *terms.positions()).shape, "the bias's result", shape)
        return bias
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias is {bias.dtype}; it must be floating (a mask of bools goes into mask).")
    return bias.reshape(check_broadcast(bias.shape, "bias", shape))
