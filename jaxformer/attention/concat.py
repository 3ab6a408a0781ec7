"""Concatenation attention: additive attention with one kernel over query and key side by side."""

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.additive import additive_attention, additive_attention_weights, additive_step
from jaxformer.attention.cache import KeyValueCache
from jaxformer.attention.scores import BLOCK_SIZE, check_apart, check_array


def concat_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: ArrayLike,
    score_vector: ArrayLike,
    activation: str = "tanh",
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    block_size: int = BLOCK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Concatenation attention: each query sees every key it may, O(T S M) time, O(T + S) memory.

    softmax(v · tanh(W [query; key])) value, over the visible keys. W [query; key] is a sum of a part of each, so that
    this is additive attention. Without the tanh ("identity") the query's part is the same for all keys and cancels.
    Luong, Pham, Manning 2015, "Effective Approaches to Attention-based Neural Machine Translation", arXiv:1508.04025,
    section 3.1, the score "concat" of equation 8.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, Hk] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      kernel: floating [H + Hk, M], first the query's rows.
      score_vector: floating [M], or [N, M] for each head.
      activation, key_mask, causal, query_segments, key_segments, block_size: as in `additive_attention`.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, causal with T > S, or an unknown activation.
    """
    query, key = check_apart(query, key)
    query_kernel, key_kernel = _split(kernel, query, key)
    return additive_attention(
        query,
        key,
        value,
        query_kernel=query_kernel,
        key_kernel=key_kernel,
        score_vector=score_vector,
        activation=activation,
        key_mask=key_mask,
        causal=causal,
        query_segments=query_segments,
        key_segments=key_segments,
        block_size=block_size,
    )


def concat_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    kernel: ArrayLike,
    score_vector: ArrayLike,
    activation: str = "tanh",
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `concat_attention` gives each value: O(T S M) time, O(T S) memory. For plots and tests.

    Luong, Pham, Manning 2015, arXiv:1508.04025, equation 8.

    Args:
      query, key, kernel, score_vector, activation, key_mask, causal, query_segments, key_segments: as in
        `concat_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `concat_attention`.
    """
    query, key = check_apart(query, key)
    query_kernel, key_kernel = _split(kernel, query, key)
    return additive_attention_weights(
        query,
        key,
        query_kernel=query_kernel,
        key_kernel=key_kernel,
        score_vector=score_vector,
        activation=activation,
        key_mask=key_mask,
        causal=causal,
        query_segments=query_segments,
        key_segments=key_segments,
    )


def concat_step(
    cache: KeyValueCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: ArrayLike,
    score_vector: ArrayLike,
    activation: str = "tanh",
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into a cache from `init_cache` and attends from them, causally by position.

    Equals the last T rows of causal `concat_attention` over all tokens so far. O(S M (T + Hk)) time.
    Luong, Pham, Manning 2015, arXiv:1508.04025, equation 8.

    Args:
      cache, query, key, value, layer, positions, key_mask, segments: as in `additive_step`.
      kernel, score_vector, activation: as in `concat_attention`.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or more tokens than free slots.
    """
    query, key = check_apart(query, key)
    query_kernel, key_kernel = _split(kernel, query, key)
    return additive_step(
        cache,
        query,
        key,
        value,
        query_kernel=query_kernel,
        key_kernel=key_kernel,
        score_vector=score_vector,
        activation=activation,
        layer=layer,
        positions=positions,
        key_mask=key_mask,
        segments=segments,
    )


def _split(
    kernel: ArrayLike, query: Float[Array, "B T N H"], key: Float[Array, "B S K Hk"]
) -> tuple[Float[Array, "H M"], Float[Array, "Hk M"]]:
    """The rows of the query and those of the key."""
    head_dim, key_dim = query.shape[3], key.shape[3]
    kernel = check_array(kernel, "kernel", (head_dim + key_dim, "M"))
    return kernel[:head_dim], kernel[head_dim:]
