"""Attention with one projection for queries and keys: what LSH attention approximates, over all pairs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.cache import KeyValueCache, add_tokens, slot_terms
from jaxformer.attention.dense import attend
from jaxformer.attention.inputs import check_key_mask, check_tensor, check_value, hide_missing
from jaxformer.attention.plain import plain_weights
from jaxformer.attention.terms import Terms, make_terms
from jaxformer.attention.unit_length import unit_length


def shared_query_key_attention(
    query_key: ArrayLike,
    value: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Shared-query-key attention: each token sees all other tokens that it may, O(T²) time, O(T) memory by blocks.

    softmax(q_i · q_j / |q_j|) value over the visible tokens j: keys are the queries at unit length, and there is no
    further 1 / sqrt(H). A token sees itself only if it sees nothing else, since its product with itself would outweigh
    all others. The control of LSH attention, which equals it where all tokens share one bucket.
    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2, "What is the
    attention mechanism attending to?". "Itself as the last resort" is a rule, not a penalty on a logit. A token that is
    zero has the key zero, with a finite gradient.

    Args:
      query_key: floating [B, T, N, H].
      value: floating [B, T, N, Hv].
      key_mask: bool or 0/1 int [B or 1, T], True = the token exists. What it holds elsewhere, NaN included, changes
        nothing.
      causal: hide later tokens.
      query_segments, key_segments: int [B or 1, T]: only tokens of equal segments see each other. One serves both.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for padding.

    Raises:
      ValueError: shapes or dtypes that do not fit, or value of other tokens or heads than query_key.
    """
    query_key, key_mask = _check(query_key, key_mask)
    value = hide_missing(check_value(value, query_key), key_mask)
    terms = _terms(query_key, key_mask, causal, query_segments, key_segments)
    return hide_missing(_attend_others(query_key, unit_length(query_key), value, value, terms), key_mask)


def shared_query_key_attention_weights(
    query_key: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B N T T"]:
    """The weights that `shared_query_key_attention` gives each value: O(T²) time and memory. For plots and tests.

    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2.

    Args:
      query_key, key_mask, causal, query_segments, key_segments: as in `shared_query_key_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for padding.

    Raises:
      ValueError: as `shared_query_key_attention`.
    """
    query_key, key_mask = _check(query_key, key_mask)
    terms = _terms(query_key, key_mask, causal, query_segments, key_segments)
    key = unit_length(query_key)
    weights = plain_weights(query_key.astype(key.dtype), key, NotItself(), terms)
    alone = ~_sees_others(terms)[:, None, :, None]
    weights = jnp.where(alone, jnp.eye(query_key.shape[1], dtype=weights.dtype)[None, None], weights)
    return weights if key_mask is None else jnp.where(key_mask[:, None, :, None], weights, 0.0)


def shared_query_key_step(
    cache: KeyValueCache,
    query_key: ArrayLike,
    value: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into a cache from `init_cache` and attends from them, causally by position: O(T S) time.

    Equals the last T rows of causal `shared_query_key_attention` over all tokens so far.
    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2.

    Args:
      cache: of one layer, or stacked over depth with `layer`; it holds the keys at unit length.
      query_key: floating [B, T, N, H].
      value: [B, T, N, Hv].
      layer: int [], which layer of a stacked cache.
      positions: int [B or 1, T], in tokens; by default the numbers of the slots. Two real tokens of a row and segment
        never have one position: they would be the same token.
      key_mask: bool or 0/1 int [B or 1, T], False for padding.
      segments: int [B or 1, T]; only tokens of equal segments see each other. 0 by default.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for padding, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or more tokens than free slots.
    """
    query_key, key_mask = _check(query_key, key_mask)
    value = check_value(value, query_key)
    key = unit_length(query_key)
    cache, now = add_tokens(cache, key, value, layer, positions, segments, key_mask)
    terms, _ = slot_terms(now, query_key.shape)
    keys, values = now.key.swapaxes(1, 2), now.value.swapaxes(1, 2)
    own = hide_missing(value, key_mask)
    output = _attend_others(query_key.astype(keys.dtype), keys, values, own, terms)
    return hide_missing(output, key_mask), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NotItself:
    """A bias that hides each token from itself, block by block."""

    def __call__(
        self, query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
    ) -> Float[Array, "#B 1 T S"]:
        """-inf where the positions are equal."""
        return jnp.where(same_position(query_positions, key_positions), -jnp.inf, jnp.zeros((), jnp.float32))


def same_position(query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]) -> Bool[Array, "#B 1 T S"]:
    """Which pairs are a token and itself."""
    return query_positions[:, None, :, None] == key_positions[:, None, None, :]


def _sees_others(terms: Terms) -> Bool[Array, "#B T"]:
    """Whether each query sees any token but itself: comparisons alone, which are not kept."""
    others = ~same_position(*terms.positions())
    visible = terms.visible()
    return (others if visible is None else others & visible).any(-1)[:, 0]


def _attend_others(
    query_key: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N Hv"],
    own: Float[Array, "B T N Hv"],
    terms: Terms,
) -> Float[Array, "B T N Hv"]:
    """Attention to all tokens but oneself, and one's own value where there is none."""
    output = attend(query_key.astype(key.dtype), key, value, NotItself(), terms).astype(own.dtype)
    return jnp.where(_sees_others(terms)[:, :, None, None], output, own)


def _check(query_key: ArrayLike, key_mask: ArrayLike | None) -> tuple[Array, Array | None]:
    """Query and key with zeros where no token exists, and the mask."""
    query_key = check_tensor(query_key, "query_key", "[batch, tokens, heads, head_dim]")
    if 0 in query_key.shape[2:]:
        raise ValueError(f"query_key has shape {query_key.shape}; it must have heads >= 1 and head_dim >= 1.")
    key_mask = check_key_mask(key_mask, *query_key.shape[:2])
    return hide_missing(query_key, key_mask), key_mask


def _terms(
    query_key: Float[Array, "B T N H"],
    key_mask: Bool[Array, "#B T"] | None,
    causal: bool,
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
) -> Terms:
    batch_size, length, num_heads, _ = query_key.shape
    terms, _ = make_terms(
        (batch_size, num_heads, length, length),
        key_mask=key_mask,
        causal=causal,
        query_positions=None,
        key_positions=None,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=None,
        bias=None,
    )
    return terms
