"""Decoding state of kinds that choose keys by what they hash to: keys and values of past tokens with their buckets."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import check_count, check_dtype, check_key_mask, check_token_numbers, hide_missing


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class BucketCache:
    """Slots for the tokens of a sequence; a stack over depth has a leading layer axis on every leaf.

    Attributes:
      key: [B, N, S, H], zeros in slots that hold no real token.
      value: [B, N, S, Hv], likewise.
      buckets: int32 [B, N, R, S], the bucket of each key in every round.
      positions: int32 [B, S], position of each token in its sequence.
      mask: bool [B, S], True where a real token stands.
      index: int32 [], the next slot to be written, the same in every row.
    """

    key: Any
    value: Any
    buckets: Any
    positions: Any
    mask: Any
    index: Any


def empty_cache(
    batch_size: int,
    max_length: int,
    num_heads: int,
    head_dim: int,
    num_hashes: int,
    value_dim: int | None,
    dtype: DTypeLike,
) -> BucketCache:
    """A cache of one layer with all slots empty, refused by name where a size or the dtype is unfit."""
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch_size": batch_size, "max_length": max_length, "num_kv_heads": num_heads, "head_dim": head_dim}
    for name, size in {**sizes, "num_hashes": num_hashes, "value_dim": value_dim}.items():
        check_count(size, name)
    check_dtype(dtype)
    return BucketCache(
        key=jnp.zeros((batch_size, num_heads, max_length, head_dim), dtype),
        value=jnp.zeros((batch_size, num_heads, max_length, value_dim), dtype),
        buckets=jnp.zeros((batch_size, num_heads, num_hashes, max_length), jnp.int32),
        positions=jnp.zeros((batch_size, max_length), jnp.int32),
        mask=jnp.zeros((batch_size, max_length), bool),
        index=jnp.zeros((), jnp.int32),
    )


def check_room(cache: BucketCache, key: Float[Array, "B T N H"], value: Float[Array, "B T N Hv"]) -> None:
    """Refuses tokens that do not fit one layer's cache in shape or number."""
    for name, stored, new in (("key", cache.key, key), ("value", cache.value, value)):
        if stored.ndim != 4:
            raise ValueError(f"cache.{name} has shape {stored.shape}; layer goes with a stacked cache only.")
        if (*stored.shape[:2], stored.shape[3]) != (new.shape[0], *new.shape[2:]):
            raise ValueError(
                f"{name} {new.shape} does not fit the cache's {stored.shape} in batch, heads or head size."
            )
    slots = cache.mask.shape[1]
    used = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index)
    if used + key.shape[1] > slots:
        raise ValueError(f"{key.shape[1]} tokens do not fit: {used} of the cache's {slots} slots are taken.")


def write_tokens(
    cache: BucketCache,
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N Hv"],
    buckets: Int[Array, "B N R T"],
    positions: ArrayLike | None,
    key_mask: ArrayLike | None,
) -> tuple[BucketCache, Int[Array, "B T"], Bool[Array, "B T"]]:
    """The cache with the tokens in its next slots, their positions, and which of them exist."""
    shape = key.shape[:2]
    checked, _ = check_token_numbers(positions, None, "positions", shape[0], shape[1], shape[1])
    mask = check_key_mask(key_mask, *shape)
    if checked is None:
        checked = cache.index + jnp.arange(shape[1], dtype=jnp.int32)[None]
    exists = jnp.broadcast_to(jnp.ones((1, 1), bool) if mask is None else mask, shape)
    checked = jnp.broadcast_to(checked, shape)

    def put(stored: Array, new: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), cache.index, axis)

    written = BucketCache(
        key=put(cache.key, hide_missing(key, mask).swapaxes(1, 2), 2),
        value=put(cache.value, hide_missing(value, mask).swapaxes(1, 2), 2),
        buckets=put(cache.buckets, buckets, 3),
        positions=put(cache.positions, checked, 1),
        mask=put(cache.mask, exists, 1),
        index=cache.index + jnp.int32(shape[1]),
    )
    return written, checked, exists


def shared_rounds(buckets: Int[Array, "B N R T"], cached: Int[Array, "B N R S"]) -> Int[Array, "B N T S"]:
    """In how many rounds each query has the bucket of each cached key."""

    def add(count: Int[Array, "B N T S"], round_: tuple) -> tuple[Int[Array, "B N T S"], None]:
        mine, theirs = round_
        return count + (mine[..., :, None] == theirs[..., None, :]).astype(jnp.int32), None

    start = jnp.zeros((*buckets.shape[:2], buckets.shape[3], cached.shape[3]), jnp.int32)
    return lax.scan(add, start, (jnp.moveaxis(buckets, 2, 0), jnp.moveaxis(cached, 2, 0)))[0]
