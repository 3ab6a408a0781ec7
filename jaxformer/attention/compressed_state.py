"""What decoding with memory-compressed attention keeps, and how new tokens enter it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.compressed_pool import Windows
from jaxformer.attention.products import einsum

# Of keys and of values; None for means.
Kernels = tuple[Array | None, Array | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CompressedCache:
    """What is left of a sequence: about 1 / stride of its tokens; a stack over depth has a leading layer axis.

    Attributes:
      slot_key: float32 or wider [B, C, K, H], sum (or convolution) of the tokens that each window holds so far.
      slot_value: [B, C, K, Hv], likewise.
      slot_count: int32 [B, C], tokens that each window holds so far.
      recent_key: [B, W, K, H], the token at position p in entry p mod W, W being the window's size.
      recent_value: [B, W, K, Hv], likewise.
      recent_positions: int32 [B, W], position of each of them, -1 in an empty entry.
      index: int32 [], number of tokens so far, padding included: the next position unless positions are given.
    """

    slot_key: Any
    slot_value: Any
    slot_count: Any
    recent_key: Any
    recent_value: Any
    recent_positions: Any
    index: Any


def fill_slots(
    cache: CompressedCache,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    windows: Windows,
    kernels: Kernels,
) -> CompressedCache:
    """The cache with each token added to the windows that hold it."""
    slot_key, slot_value, counts = cache.slot_key, cache.slot_value, cache.slot_count
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    for back in range(-(-windows.size // windows.stride)):
        slot = positions // windows.stride - back
        place = positions - slot * windows.stride
        holds = real & (slot >= 0) & (place < windows.size)
        # What no window holds goes to a slot beyond the last, which is dropped.
        slot = jnp.where(holds, slot, counts.shape[1])
        place = jnp.where(holds, place, 0)
        slot_key = slot_key.at[rows, slot].add(_contribution(key, kernels[0], place, slot_key.dtype), mode="drop")
        slot_value = slot_value.at[rows, slot].add(
            _contribution(value, kernels[1], place, slot_value.dtype), mode="drop"
        )
        counts = counts.at[rows, slot].add(1, mode="drop")
    return replace(cache, slot_key=slot_key, slot_value=slot_value, slot_count=counts)


def _contribution(
    array: Float[Array, "B T K H"], kernel: Float[Array, "..."] | None, place: Int[Array, "B T"], dtype: jnp.dtype
) -> Float[Array, "B T K H"]:
    """What each token adds to a window in which it stands at `place`."""
    array = array.astype(dtype)
    if kernel is None:
        return array
    weights = kernel.astype(dtype)[place]
    if kernel.ndim == 4:
        return einsum("btkh,btkhd->btkd", array, weights, dtype)
    return array * (weights[:, :, None, None] if kernel.ndim == 1 else weights[:, :, None])


def keep_recent(
    cache: CompressedCache,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    windows: Windows,
) -> CompressedCache:
    """The cache with the newest real tokens in its ring, and the chunk counted."""
    newest = jnp.where(real, positions, -1).max(1, keepdims=True, initial=-1)
    kept = real & (positions > newest - windows.size)
    entry = jnp.where(kept, positions % windows.size, windows.size)
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]

    def put(ring: Array, new: Array) -> Array:
        return ring.at[rows, entry].set(new.astype(ring.dtype), mode="drop")

    return replace(
        cache,
        recent_key=put(cache.recent_key, key),
        recent_value=put(cache.recent_value, value),
        recent_positions=put(cache.recent_positions, positions),
        index=cache.index + positions.shape[1],
    )
