"""Decoding with routing attention, by a rule of its own: a new query sees the cached keys of its nearest centroid."""

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.bucket_cache import BucketCache, check_room, empty_cache, write_tokens
from jaxformer.attention.inputs import check_key_mask, check_value, hide_missing, scale_query
from jaxformer.attention.products import einsum
from jaxformer.attention.routing_clusters import check_centroids, check_self, nearest_centroids
from jaxformer.attention.stacked import read_layer, write_layer
from jaxformer.functional import compute_dtype, masked_softmax


def init_routing_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> BucketCache:
    """An empty cache of keys, values and the clusters of keys for one layer.

    Args:
      batch_size: B.
      max_length: S, slots per row (tokens, padding included).
      num_kv_heads: N, the heads.
      head_dim: H, of keys.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of the stored keys and values.

    Returns:
      BucketCache with one round, all slots empty.

    Raises:
      ValueError: a size below 1 or a dtype that is not floating.
    """
    return empty_cache(batch_size, max_length, num_kv_heads, head_dim, 1, value_dim, dtype)


def routing_step(
    cache: BucketCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    centroids: ArrayLike,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], BucketCache]:
    """Writes T tokens into the cache and attends from them to all keys of their nearest centroid: O(T (S + C)) time.

    The rule of decoding: a query sees every key at its position and before whose nearest centroid is its own nearest,
    softmax(query keyᵀ / sqrt(H)) value; its own key is one of them, if it is near the same. What tokens were split into
    steps changes nothing. It can't equal `routing_attention` in general, whose clusters take a fixed number of tokens
    from the whole sequence; with one cluster and window >= T both are causal attention over all keys.

    Args:
      cache: from `init_routing_cache`, of one layer, or stacked over depth with `layer`.
      query: floating [B, T, N, H].
      key: [B, T, N, H] in query.dtype.
      value: floating [B, T, N, Hv].
      centroids: floating [N, C, H]; the cache is void if they move.
      layer: int [], which layer of a stacked cache.
      positions: int [B or 1, T], in tokens; by default the numbers of the slots.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which no query sees and which sees nothing.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees no key, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, more tokens than slots, or, where the cache
        is not traced, than free slots.
    """
    query, key = check_self(query, key)
    value = check_value(value, key)
    centroids = check_centroids(centroids, query)
    now = read_layer(cache, layer)
    check_room(now, key, value)
    mask = check_key_mask(key_mask, *key.shape[:2])
    query, key, value = (hide_missing(array, mask) for array in (query, key, value))
    theirs = nearest_centroids(key, centroids)[:, :, None]
    now, positions, exists = write_tokens(now, key, value, theirs, positions, key_mask)
    mine = nearest_centroids(query, centroids)
    earlier = now.positions[:, None, :] <= positions[:, :, None]
    visible = (earlier & now.mask[:, None, :] & exists[:, :, None])[:, None]
    visible &= mine[..., :, None] == now.buckets[:, :, 0, None, :]
    query = scale_query(query, query.shape[3] ** -0.5).astype(now.key.dtype)
    logits = einsum("btnh,bnsh->bnts", query, now.key, compute_dtype(query.dtype))
    weights = masked_softmax(logits, visible).astype(now.value.dtype)
    output = einsum("bnts,bnsv->btnv", weights, now.value, compute_dtype(value.dtype)).astype(value.dtype)
    return output, write_layer(cache, layer, now)
