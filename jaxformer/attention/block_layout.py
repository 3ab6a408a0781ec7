"""Layouts and slices of blockwise attention: heads before tokens, query heads grouped by the key head they read."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxformer.attention.products import batched_matmul


def by_head(array: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K G T H"]:
    """Heads before tokens, and grouped by the key head they read."""
    batch_size, length, _, head_dim = array.shape
    return array.reshape(batch_size, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def by_token(array: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    """The way back from `by_head`."""
    batch_size, _, _, length, head_dim = array.shape
    return array.transpose(0, 3, 1, 2, 4).reshape(batch_size, length, -1, head_dim)


def group_heads(pairs: Array, num_kv_heads: int, group: int) -> Array:
    """[B, N, T, S] as [B, K, G, T, S]; an axis of one head, shared by all, stays one."""
    batch_size, num_heads, queries, keys = pairs.shape
    heads = (1, 1) if num_heads == 1 else (num_kv_heads, group)
    return pairs.reshape(batch_size, *heads, queries, keys)


def counts_from(start: Array, size: int) -> Bool[Array, "size"]:
    """Which of a block's entries count: those from `start` on."""
    return jnp.arange(size, dtype=jnp.int32) >= start


def cut(array: Array, axis: int, start: Array, size: int) -> Array:
    """`size` entries of one axis; the array itself where that is all of them."""
    return array if array.shape[axis] == size else lax.dynamic_slice_in_dim(array, start, size, axis)


def paste(array: Array, block: Array, axis: int, start: Array) -> Array:
    """The array with the block at `start`; the block itself where that is all of it."""
    return block if array.shape == block.shape else lax.dynamic_update_slice_in_dim(array, block, start, axis)


def rows_times(rows: Float[Array, "B K G q m"], matrix: Float[Array, "B K m s"], dtype: jnp.dtype) -> Array:
    """Product of each row of each group with its key head's matrix: [B, K, G, q, s]."""
    batch_size, num_kv_heads, group, queries, inner = rows.shape
    flat = rows.reshape(batch_size, num_kv_heads, group * queries, inner)
    return batched_matmul(flat, matrix, dtype).reshape(batch_size, num_kv_heads, group, queries, -1)


def across_times(across: Float[Array, "B K m G q"], block: Float[Array, "B K G q s"], dtype: jnp.dtype) -> Array:
    """Sum over groups and rows: [B, K, m, s]."""
    batch_size, num_kv_heads, inner, _, _ = across.shape
    flat = across.reshape(batch_size, num_kv_heads, inner, -1)
    rows = block.reshape(batch_size, num_kv_heads, flat.shape[-1], -1)
    return batched_matmul(flat, rows, dtype)
