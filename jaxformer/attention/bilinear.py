"""Bilinear attention: a dot product with a learned matrix between query and key."""

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.additive import project
from jaxformer.attention.cache import KeyValueCache, dense_step
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.scores import check_apart, check_array
from jaxformer.functional import compute_dtype


def bilinear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: ArrayLike,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Bilinear attention: each query sees every key it may, O(T S) time, O(T + S) memory.

    softmax(queryᵀ W key) value, over the visible keys: dense attention from the projected query, so that queries and
    keys may have different numbers of features. There is no scale; it is up to W. The paper's score "dot" is
    `dense_attention` with scale=1.0, and "concat" is `concat_attention`.
    Luong, Pham, Manning 2015, "Effective Approaches to Attention-based Neural Machine Translation", arXiv:1508.04025,
    section 3.1, the score "general" of equation 8 (there the query stands on the left, too).

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, Hk] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      kernel: floating [H, Hk], or [N, H, Hk] for each head (W).
      key_mask, causal, query_positions, key_positions, query_segments, key_segments: as in `dense_attention`.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, or T > S where positions matter and are not given.
    """
    query, key = check_apart(query, key)
    return dense_attention(
        _project(query, key, kernel),
        key,
        value,
        key_mask=key_mask,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        scale=1.0,
    )


def bilinear_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    kernel: ArrayLike,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `bilinear_attention` gives each value: O(T S) time and memory. For plots and tests.

    Luong, Pham, Manning 2015, arXiv:1508.04025, equation 8.

    Args:
      query, key, kernel, key_mask, causal, query_positions, key_positions, query_segments, key_segments: as in
        `bilinear_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `bilinear_attention`.
    """
    query, key = check_apart(query, key)
    return dense_attention_weights(
        _project(query, key, kernel),
        key,
        key_mask=key_mask,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        scale=1.0,
    )


def bilinear_step(
    cache: KeyValueCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: ArrayLike,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into a cache from `init_cache` and attends from them, causally by position: O(T S) time.

    Equals the last T rows of causal `bilinear_attention` over all tokens so far.
    Luong, Pham, Manning 2015, arXiv:1508.04025, equation 8.

    Args:
      cache: of one layer, or stacked over depth with `layer`, with head_dim Hk.
      query: floating [B, T, N, H].
      key: [B, T, K, Hk].
      value: [B, T, K, Hv].
      kernel: as in `bilinear_attention`.
      layer, positions, key_mask, segments: as in `dense_step`.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or more tokens than free slots.
    """
    query, key = check_apart(query, key)
    return dense_step(
        cache,
        _project(query, key, kernel),
        key,
        value,
        layer=layer,
        positions=positions,
        key_mask=key_mask,
        segments=segments,
        scale=1.0,
    )


def _project(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K Hk"], kernel: ArrayLike
) -> Float[Array, "B T N Hk"]:
    (num_heads, head_dim), key_dim = query.shape[2:], key.shape[3]
    kernel = check_array(kernel, "kernel", (head_dim, key_dim), (num_heads, head_dim, key_dim))
    return project(query, kernel, compute_dtype(query.dtype)).astype(query.dtype)
