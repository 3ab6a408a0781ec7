"""Performer attention: softmax attention estimated by random features, in linear time."""

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.inputs import check_count, check_query_key, check_value
from jaxformer.attention.linear import attend_kernel, weigh_kernel
from jaxformer.attention.linear_cache import LinearCache, check_state_sizes, new_cache, step_features
from jaxformer.attention.linear_chunks import CHUNK_SIZE
from jaxformer.attention.random_features import check_features, check_projection, num_outputs, random_kernel


def performer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    projection: ArrayLike,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    features: str = "positive",
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Performer attention: each query sees every key it may, O((T + S) F) time, O((T + S) F) memory.

    Linear attention with phi(query) phi(key) an unbiased estimate of exp(query key / sqrt(H)) (FAVOR+). With
    x = query / H^(1/4) or key / H^(1/4) and the rows w of `projection`, drawn by `draw_features`: phi(x) is
    exp(w x - |x|²/2) ("positive"), exp(|x|²/2) (cos w x, sin w x) ("trigonometric") or max(w x, 0) ("relu", which
    estimates another kernel). The error falls as 1 / sqrt(F) and grows fast with the norms of x: at unit variance and
    H = 64 it is an attention of its own more than a softmax. To prefer where softmax attention is wanted at lengths
    that it cannot have.
    Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794, lemma 1 and section 2.
    Deviations: nothing is added to features or denominators. What keeps exponentials in range is each token's own
    largest feature: the query's cancels, and the key's is a weight below the largest so far, so that no later token
    changes what came before.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      projection: floating [F, H], or [K, F, H] for directions of its own for each key head: state, not a parameter,
        though it has gradients.
      key_mask, causal, query_segments, key_segments: as in `linear_attention`.
      features: "positive", "trigonometric" or "relu"; static. The estimate of "trigonometric" may be negative: a query
        whose sum of weights is not positive gets zeros, and one whose sum is small gets large outputs. A "relu" query
        without a feature in common with any key gets zeros. So does a "positive" one where all products of features
        underflow, which takes queries and keys that oppose each other at several times unit variance.
      form, chunk_size: as in `linear_attention`.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; causal with T > S; segments with T != S that are not causal; unknown
        features or form.
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    kernel = random_kernel(check_projection(projection, *key.shape[2:]), check_features(features))
    return attend_kernel(kernel, query, key, value, key_mask, causal, query_segments, key_segments, form, chunk_size)


def performer_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    projection: ArrayLike,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    features: str = "positive",
) -> Float[Array, "B N T S"]:
    """The weights that `performer_attention` gives each value: O(T S) time and memory.

    phi(query) phi(key) over its sum on the visible keys. For plots and tests.
    Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794, equation 4.

    Args:
      query, key, projection, key_mask, causal, query_segments, key_segments, features: as in `performer_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key. Not
      negative but for "trigonometric".

    Raises:
      ValueError: as `performer_attention`.
    """
    query, key = check_query_key(query, key)
    kernel = random_kernel(check_projection(projection, *key.shape[2:]), check_features(features))
    return weigh_kernel(kernel, query, key, key_mask, causal, query_segments, key_segments)


def init_performer_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
    num_features: int = 256,
    features: str = "positive",
) -> LinearCache:
    """The state before the first token, for one layer: F (Hv + 1) numbers a head, whatever the length.

    Args:
      batch_size: B.
      max_length: tokens that will come, at least 1; the state serves any number of them.
      num_kv_heads: K.
      head_dim: H, of keys.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of keys and values; the state is float32, or float64 where they are.
      num_features: F, directions of the projection.
      features: as in `performer_attention`.

    Returns:
      LinearCache without any key.

    Raises:
      ValueError: a size below 1, a dtype that is not floating, or unknown features.
    """
    check_state_sizes(batch_size, max_length, num_kv_heads, head_dim, value_dim, dtype)
    check_count(num_features, "num_features")
    made = num_outputs(num_features, check_features(features))
    return new_cache(batch_size, num_kv_heads, made, value_dim or head_dim, dtype)


def performer_step(
    cache: LinearCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    projection: ArrayLike,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    features: str = "positive",
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B T N Hv"], LinearCache]:
    """Adds T tokens to the state, each reading it after itself: O(T F) time whatever came before.

    Equals the last T rows of causal `performer_attention` over all tokens so far with the same projection, whatever the
    tokens were split into.
    Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794, appendix B.1.

    Args:
      cache, query, key, value, layer, positions, key_mask, chunk_size: as in `linear_step`.
      projection, features: as in `performer_attention`; the cache holds as many features.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or unknown features.
    """
    query, key = check_query_key(query, key)
    kernel = random_kernel(check_projection(projection, *key.shape[2:]), check_features(features))
    return step_features(kernel, cache, query, key, value, layer, positions, key_mask, chunk_size)
