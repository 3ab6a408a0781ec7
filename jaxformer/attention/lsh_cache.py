"""Decoding with LSH attention, by a rule of its own: a new token sees the cached tokens that share a bucket with it."""

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.bucket_cache import BucketCache, check_room, empty_cache, shared_rounds, write_tokens
from jaxformer.attention.inputs import check_key_mask, check_tensor, check_value, hide_missing
from jaxformer.attention.lsh_buckets import check_rotations, hash_tokens
from jaxformer.attention.products import einsum
from jaxformer.attention.stacked import read_layer, write_layer
from jaxformer.attention.unit_length import unit_length
from jaxformer.functional import compute_dtype, masked_softmax


def init_lsh_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_hashes: int,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> BucketCache:
    """An empty cache of unit-length keys, values and buckets for one layer.

    Args:
      batch_size: B.
      max_length: S, slots per row (tokens, padding included).
      num_kv_heads: N, the heads; query and key being shared, all have keys of their own.
      head_dim: H, of keys.
      num_hashes: R, rounds of hashing.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of the stored keys and values.

    Returns:
      BucketCache, all slots empty.

    Raises:
      ValueError: a size below 1 or a dtype that is not floating.
    """
    return empty_cache(batch_size, max_length, num_kv_heads, head_dim, num_hashes, value_dim, dtype)


def lsh_step(
    cache: BucketCache,
    query_key: ArrayLike,
    value: ArrayLike,
    *,
    rotations: ArrayLike,
    num_buckets: int | tuple[int, ...] | None = None,
    deduplicate: bool = True,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], BucketCache]:
    """Writes T tokens into the cache and attends from them to all tokens of their buckets: O(T S) time.

    The rule of decoding: a token sees every token at an earlier position that shares a bucket with it in any round, and
    itself if there is none. softmax(q_i · k_j), where without deduplicate log(number of rounds in which both share a
    bucket) is added to the logits. What tokens were split into steps changes nothing.

    It can't equal `lsh_attention` in general: there the chunks that a token sees depend on how many later tokens sort
    before it, which a decoder doesn't know. Where the batched choice doesn't depend on them both are equal: with
    within_bucket and chunk_size >= T, so also if all tokens share one bucket.

    Args:
      cache: from `init_lsh_cache`, of one layer, or stacked over depth with `layer`.
      query_key: floating [B, T, N, H].
      value: floating [B, T, N, Hv].
      rotations: as in `lsh_attention`; the first R rounds are used, R being the cache's num_hashes.
      num_buckets: as in `lsh_attention`.
      deduplicate: count a key once however many buckets it shares.
      layer: int [], which layer of a stacked cache.
      positions: int [B or 1, T], in tokens; by default the numbers of the slots.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which no token sees and which sees nothing.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for padding, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, fewer rounds of rotations than the cache
        has, more tokens than slots, or, where the cache is not traced, than free slots.
    """
    query_key = check_tensor(query_key, "query_key", "[batch, tokens, heads, head_dim]")
    value = check_value(value, query_key)
    num_tokens = query_key.shape[1]
    rotations, factors = check_rotations(rotations, num_buckets, *query_key.shape[2:])
    now = read_layer(cache, layer)
    check_room(now, query_key, value)
    num_hashes = now.buckets.shape[2]
    if rotations.shape[0] < num_hashes:
        raise ValueError(f"rotations have {rotations.shape[0]} rounds; the cache needs {num_hashes}.")
    mask = check_key_mask(key_mask, *query_key.shape[:2])
    query_key, value = hide_missing(query_key, mask), hide_missing(value, mask)
    buckets = hash_tokens(query_key, rotations[:num_hashes], factors, mask)
    slots = now.index + jnp.arange(num_tokens, dtype=jnp.int32)
    now, positions, exists = write_tokens(now, unit_length(query_key), value, buckets, positions, key_mask)
    rounds = shared_rounds(buckets, now.buckets)
    before = now.positions[:, None, :] < positions[:, :, None]
    visible = (before & now.mask[:, None, :] & exists[:, :, None])[:, None] & (rounds > 0)
    itself = jnp.arange(now.mask.shape[1], dtype=jnp.int32)[None] == slots[:, None]
    alone = ~visible.any(-1, keepdims=True) & (itself[None] & exists[:, :, None])[:, None]
    logits = einsum("btnh,bnsh->bnts", query_key.astype(now.key.dtype), now.key, compute_dtype(query_key.dtype))
    if not deduplicate:
        logits = logits + jnp.log(jnp.maximum(rounds, 1).astype(logits.dtype))
    weights = masked_softmax(logits, visible | alone).astype(now.value.dtype)
    output = einsum("bnts,bnsv->btnv", weights, now.value, compute_dtype(value.dtype)).astype(value.dtype)
    return output, write_layer(cache, layer, now)
