"""Cached decoding for memory-compressed attention: slots that fill up, and the newest tokens in a ring."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.compressed_pool import Windows, check_kernel
from jaxformer.attention.compressed_state import CompressedCache, Kernels, fill_slots, keep_recent
from jaxformer.attention.inputs import (
    check_count,
    check_dtype,
    check_key_mask,
    check_query_key,
    check_scale,
    check_token_numbers,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.products import einsum
from jaxformer.attention.stacked import read_layer, write_layer
from jaxformer.functional import compute_dtype, masked_softmax

# Tokens of a prompt that are attended from at once.
CHUNK = 128


def init_compressed_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    stride: int,
    window_size: int | None = None,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> CompressedCache:
    """An empty cache for one layer: max_length / stride + window_size entries.

    Args:
      batch_size: B.
      max_length: tokens per row, padding included.
      num_kv_heads: K.
      head_dim: H, of keys.
      stride, window_size: as in `compressed_attention`.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of the recent keys and values; slots are sums, in float32 or wider.

    Returns:
      CompressedCache without any token.

    Raises:
      ValueError: a size below 1, a window_size below the stride, or a dtype that is not floating.
    """
    windows = Windows.checked(stride, window_size, True, True)
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch_size": batch_size, "max_length": max_length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "value_dim": value_dim}.items():
        check_count(size, name)
    check_dtype(dtype)
    slots, ring = (batch_size, windows.num_slots(max_length)), (batch_size, windows.size)
    return CompressedCache(
        slot_key=jnp.zeros((*slots, num_kv_heads, head_dim), compute_dtype(dtype)),
        slot_value=jnp.zeros((*slots, num_kv_heads, value_dim), compute_dtype(dtype)),
        slot_count=jnp.zeros(slots, jnp.int32),
        recent_key=jnp.zeros((*ring, num_kv_heads, head_dim), dtype),
        recent_value=jnp.zeros((*ring, num_kv_heads, value_dim), dtype),
        recent_positions=jnp.full(ring, -1, jnp.int32),
        index=jnp.zeros((), jnp.int32),
    )


def compressed_step(
    cache: CompressedCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    stride: int,
    window_size: int | None = None,
    key_kernel: ArrayLike | None = None,
    value_kernel: ArrayLike | None = None,
    recent: bool = True,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], CompressedCache]:
    """Adds T tokens to the cache and attends from them, causally: O(T max_length / stride) time.

    Equals the last T rows of causal `compressed_attention` over all tokens so far, whatever the tokens were split into;
    windows go by position, so that a left-padded row is as the row alone. Padding is not stored.

    Args:
      cache: of one layer, or stacked over depth with `layer`.
      query: floating [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, Hv].
      stride, window_size, key_kernel, value_kernel, recent, scale: as in `compressed_attention`, the same at each step.
      layer: int [], which layer of a stacked cache.
      positions: int [B or 1, T], in tokens, below max_length and growing along each row's real tokens; by default
        numbered on from the tokens so far, padding included.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which no query sees. What padding's own query holds,
        NaN included, stays in its own row of the output, which means nothing.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or, where the cache is not traced, more
        tokens than it was made for.
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} tokens and key {key.shape[1]}; a step adds the same to both.")
    batch_size, num_tokens, _, head_dim = query.shape
    windows = Windows.checked(stride, window_size, recent, True)
    key_kernel = check_kernel(key_kernel, "key_kernel", windows, *key.shape[2:])
    value_kernel = check_kernel(value_kernel, "value_kernel", windows, *value.shape[2:])
    positions, _ = check_token_numbers(positions, None, "positions", batch_size, num_tokens, num_tokens)
    key_mask = check_key_mask(key_mask, batch_size, num_tokens)
    _check_cache(cache, key, value, layer, windows)
    now = read_layer(cache, layer)
    if positions is None:
        positions = now.index + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    shape = (batch_size, num_tokens)
    real = jnp.ones(shape, bool) if key_mask is None else jnp.broadcast_to(key_mask, shape)
    tokens = (
        scale_query(query, check_scale(scale, head_dim)),
        hide_missing(key, key_mask),
        hide_missing(value, key_mask),
        jnp.broadcast_to(positions, shape),
        real,
    )
    output, new = _in_chunks(now, tokens, windows, (key_kernel, value_kernel))
    return output.astype(value.dtype), write_layer(cache, layer, new)


def _check_cache(
    cache: CompressedCache,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    layer: ArrayLike | None,
    windows: Windows,
) -> None:
    rank = 4 if layer is None else 5
    for name, stored, new in (("key", cache.recent_key, key), ("value", cache.recent_value, value)):
        if stored.ndim != rank:
            advice = "give layer for a stacked cache" if layer is None else "layer goes with a stacked cache"
            raise ValueError(f"cache.recent_{name} has shape {stored.shape}; {advice}.")
        fitting = (new.shape[0], windows.size, *new.shape[2:])
        if stored.shape[-4:] != fitting:
            raise ValueError(f"{name} {new.shape} needs a cache of (.., {fitting}) recent tokens, not {stored.shape}.")
    capacity = cache.slot_count.shape[-1] * windows.stride
    used = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index.max())
    if used + key.shape[1] > capacity:
        raise ValueError(f"{key.shape[1]} tokens do not fit: {used} of the cache's {capacity} are taken.")


Tokens = tuple[Array, Array, Array, Array, Array]


def _in_chunks(
    cache: CompressedCache, tokens: Tokens, windows: Windows, kernels: Kernels
) -> tuple[Float[Array, "B T N Hv"], CompressedCache]:
    """A long prompt some tokens at a time, so that no query meets all of the prompt's keys."""
    num_tokens = tokens[0].shape[1]
    if num_tokens <= CHUNK:
        return _chunk(cache, tokens, windows, kernels)
    num_chunks = -(-num_tokens // CHUNK)

    def split(array: Array) -> Array:
        rest = [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, [(0, 0), (0, num_chunks * CHUNK - num_tokens), *rest])
        return array.reshape(array.shape[0], num_chunks, CHUNK, *array.shape[2:]).swapaxes(0, 1)

    def body(cache: CompressedCache, tokens: Tokens) -> tuple[CompressedCache, Array]:
        output, cache = _chunk(cache, tokens, windows, kernels)
        return cache, output

    new, output = lax.scan(body, cache, jax.tree.map(split, tokens))
    output = output.swapaxes(0, 1)
    output = output.reshape(output.shape[0], num_chunks * CHUNK, *output.shape[3:])
    # The filling counts as padding, which has no index.
    return output[:, :num_tokens], replace(new, index=cache.index + num_tokens)


def _chunk(
    cache: CompressedCache, tokens: Tokens, windows: Windows, kernels: Kernels
) -> tuple[Float[Array, "B T N Hv"], CompressedCache]:
    """Attends from the chunk's queries to the slots, the ring and the chunk itself, and stores its tokens."""
    query, key, value, positions, real = tokens
    filled = fill_slots(cache, key, value, positions, real, windows, kernels)
    # All that may be seen in one row: slots, then the ring as it was, then the chunk.
    dtype = filled.slot_key.dtype
    keys = jnp.concatenate([filled.slot_key, cache.recent_key.astype(dtype), key.astype(dtype)], 1)
    values = jnp.concatenate([filled.slot_value, cache.recent_value.astype(dtype), value.astype(dtype)], 1)
    near_positions = jnp.concatenate([cache.recent_positions, jnp.where(real, positions, -1)], 1)
    near = windows.sees_token(positions[:, :, None], near_positions[:, None]) & (near_positions >= 0)[:, None]
    slots = windows.sees_slot(positions, filled.slot_count.shape[1]) & (filled.slot_count > 0)[:, None]
    seen = jnp.concatenate([slots, near & windows.near], -1)
    batch_size, num_tokens, num_heads, head_dim = query.shape
    grouped = query.reshape(batch_size, num_tokens, keys.shape[2], num_heads // keys.shape[2], head_dim)
    # Sums become means in logits and weights, of which there are far fewer than numbers in all slots.
    counts = jnp.concatenate([jnp.maximum(filled.slot_count, 1), jnp.ones_like(near_positions)], 1)
    counts = counts[:, None, None, None].astype(dtype)
    logits = einsum("btkgh,bskh->bkgts", grouped.astype(dtype), keys, dtype)
    weights = masked_softmax(logits / counts if kernels[0] is None else logits, seen[:, None, None])
    weights = weights / counts if kernels[1] is None else weights
    output = einsum("bkgts,bskv->btkgv", weights, values, dtype)
    output = output.reshape(batch_size, num_tokens, num_heads, values.shape[3])
    return output, keep_recent(filled, key, value, positions, real, windows)
