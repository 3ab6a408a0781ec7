"""Additive attention: a small network scores each pair, the first attention of neural translation."""

from collections.abc import Callable
from types import MappingProxyType

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.cache import KeyValueCache
from jaxformer.attention.inputs import check_value
from jaxformer.attention.scores import (
    BLOCK_SIZE,
    Score,
    attend_scores,
    check_apart,
    check_array,
    core_terms,
    hide_keys,
    score_weights,
    step_scores,
)
from jaxformer.functional import compute_dtype

ACTIVATIONS: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {"tanh": jnp.tanh, "identity": lambda array: array}
)


def additive_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_kernel: ArrayLike,
    key_kernel: ArrayLike,
    score_vector: ArrayLike,
    hidden_bias: ArrayLike | None = None,
    activation: str = "tanh",
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    block_size: int = BLOCK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Additive attention: each query sees every key it may, O(T S M) time, O(T + S) memory.

    softmax(v · tanh(W query + U key + b)) value, over the visible keys. Queries and keys may have different numbers of
    features, and no scale is needed; for equal cost a dot product learns as well in wide models, and this one better in
    narrow ones. The T x S x M activations are made block by block and made again for the backward pass.
    Bahdanau, Cho, Bengio 2015, "Neural Machine Translation by Jointly Learning to Align and Translate",
    arXiv:1409.0473, section 3.1 and appendix A.1.2 (which has no b). A query that sees nothing gets zeros.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, Hk] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      query_kernel: floating [H, M], or [N, H, M] for each head (the paper's W).
      key_kernel: floating [Hk, M], or [K, Hk, M] for each key head (U).
      score_vector: floating [M], or [N, M] for each head (v).
      hidden_bias: floating [M], or [N, M], added before the activation.
      activation: "tanh" or "identity", with which the query cancels and all queries have one row of weights.
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys after the query, the queries being the last T of the S keys.
      query_segments, key_segments: int [B or 1, T] and [B or 1, S]: only tokens of equal segments see each other. One
        alone serves both if T = S.
      block_size: tokens on each side of a block of pairs.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, causal with T > S, or an unknown activation.
    """
    query, key = check_apart(query, key)
    value = check_value(value, key)
    terms = core_terms(query, key, key_mask, causal, query_segments, key_segments)
    key, value = hide_keys(key, value, terms)
    prepared = _prepare(query, key, query_kernel, key_kernel, score_vector, hidden_bias, activation)
    return attend_scores(*prepared, value, terms, block_size)


def additive_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    query_kernel: ArrayLike,
    key_kernel: ArrayLike,
    score_vector: ArrayLike,
    hidden_bias: ArrayLike | None = None,
    activation: str = "tanh",
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `additive_attention` gives each value: O(T S M) time, O(T S) memory. For plots and tests.

    Bahdanau, Cho, Bengio 2015, arXiv:1409.0473, section 3.1.

    Args:
      query, key, query_kernel, key_kernel, score_vector, hidden_bias, activation, key_mask, causal, query_segments,
        key_segments: as in `additive_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `additive_attention`.
    """
    query, key = check_apart(query, key)
    terms = core_terms(query, key, key_mask, causal, query_segments, key_segments)
    key, _ = hide_keys(key, key, terms)
    return score_weights(*_prepare(query, key, query_kernel, key_kernel, score_vector, hidden_bias, activation), terms)


def additive_step(
    cache: KeyValueCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    query_kernel: ArrayLike,
    key_kernel: ArrayLike,
    score_vector: ArrayLike,
    hidden_bias: ArrayLike | None = None,
    activation: str = "tanh",
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into a cache from `init_cache` and attends from them, causally by position.

    Equals the last T rows of causal `additive_attention` over all tokens so far. O(S M (T + Hk)) time: the cache holds
    keys as they came, and all are projected at each step.
    Bahdanau, Cho, Bengio 2015, arXiv:1409.0473, section 3.1.

    Args:
      cache: of one layer, or stacked over depth with `layer`, with head_dim Hk.
      query: floating [B, T, N, H].
      key: [B, T, K, Hk].
      value: [B, T, K, Hv].
      query_kernel, key_kernel, score_vector, hidden_bias, activation: as in `additive_attention`.
      layer, positions, key_mask, segments: as in `dense_step`.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or more tokens than free slots.
    """
    query, key = check_apart(query, key)

    def prepare(query: Array, key: Array) -> tuple[Score, Array, Array]:
        return _prepare(query, key, query_kernel, key_kernel, score_vector, hidden_bias, activation)

    return step_scores(prepare, cache, query, key, value, layer, positions, key_mask, segments)


def _prepare(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K Hk"],
    query_kernel: ArrayLike,
    key_kernel: ArrayLike,
    score_vector: ArrayLike,
    hidden_bias: ArrayLike | None,
    activation: str,
) -> tuple[Score, Float[Array, "B T N M"], Float[Array, "B S K M"]]:
    """The score of a block, and the projections that it adds up."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {sorted(ACTIVATIONS)}.")
    (num_heads, head_dim), (num_kv_heads, key_dim) = query.shape[2:], key.shape[2:]
    query_kernel = check_array(query_kernel, "query_kernel", (head_dim, "M"), (num_heads, head_dim, "M"))
    hidden = query_kernel.shape[-1]
    key_kernel = check_array(key_kernel, "key_kernel", (key_dim, hidden), (num_kv_heads, key_dim, hidden))
    score_vector = check_array(score_vector, "score_vector", (hidden,), (num_heads, hidden))
    dtype = compute_dtype(query.dtype)
    queries = project(query, query_kernel, dtype)
    if hidden_bias is not None:
        hidden_bias = check_array(hidden_bias, "hidden_bias", (hidden,), (num_heads, hidden))
        queries = queries + hidden_bias.astype(dtype).reshape(1, 1, -1, hidden)
    group = num_heads // num_kv_heads
    vector = score_vector.astype(dtype)
    vector = jnp.broadcast_to(vector.reshape(-1, hidden), (num_heads, hidden))
    vector = vector.reshape(1, num_kv_heads, group, 1, 1, hidden)

    def score(queries: Float[Array, "B t N M"], keys: Float[Array, "B s K M"]) -> Float[Array, "B N t s"]:
        batch_size, num_queries = queries.shape[:2]
        queries = queries.reshape(batch_size, num_queries, num_kv_heads, group, 1, hidden).transpose(0, 2, 3, 1, 4, 5)
        keys = keys.swapaxes(1, 2)[:, :, None, None]
        scores = (vector * ACTIVATIONS[activation](queries + keys)).sum(-1)
        return scores.reshape(batch_size, num_heads, num_queries, -1)

    return score, queries, project(key, key_kernel, dtype)


def project(array: Float[Array, "B T N H"], kernel: Float[Array, "... H M"], dtype: jnp.dtype) -> Array:
    """[B, T, N, M] in `dtype`: the array times the kernel of all heads or of its head."""
    pattern = "btnh,hm->btnm" if kernel.ndim == 2 else "btnh,nhm->btnm"
    return jnp.einsum(pattern, array.astype(dtype), kernel.astype(dtype), preferred_element_type=dtype)
