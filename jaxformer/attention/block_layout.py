"""Layouts and slices of blockwise attention: heads before tokens, query heads grouped by the key head they read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float

from jaxformer.attention.products import batched_matmul

# Entries of a block that is worth turning round.
MOST_TURNED = 40_000


def by_head(array: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K G T H"]:
    """Heads before tokens, and grouped by the key head they read."""
    return rearranged(split_heads(array, num_kv_heads))


def split_heads(array: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K G T H"]:
    """`by_head` for what rearranges the array anyhow."""
    batch_size, length, _, head_dim = array.shape
    return array.reshape(batch_size, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def by_token(array: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    """The way back from `by_head`."""
    batch_size, _, _, length, head_dim = array.shape
    return rearranged(array.transpose(0, 3, 1, 2, 4)).reshape(batch_size, length, -1, head_dim)


def heads_for_tokens(array: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    """Tokens and heads change places; also the way back."""
    return rearranged(array.swapaxes(1, 2))


def rearranged(array: Array) -> Array:
    """The array, whose axes were just moved, written out in their new order at once.

    Else XLA for CPUs first copies it in the old order, at several times the cost.
    """
    if jax.default_backend() != "cpu":
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


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


def cut_beyond(array: Array, axis: int, start: Array, size: int) -> Array:
    """`size` entries of one axis, with zeros behind the array's last: filled up as a whole, it would be copied."""
    array = filled(array, axis, max(size, array.shape[axis]))
    first = jnp.minimum(start, array.shape[axis] - size)
    part = cut(array, axis, first, size)
    return lax.dynamic_slice_in_dim(filled(part, axis, 2 * size), start - first, size, axis)


def paste(array: Array, block: Array, axis: int, start: Array) -> Array:
    """The array with the block at `start`; the block itself where that is all of it."""
    return block if array.shape == block.shape else lax.dynamic_update_slice_in_dim(array, block, start, axis)


def filled(array: Array, axis: int, size: int) -> Array:
    """The array with zeros (or False) behind its entries of an axis, `size` in all."""
    behind = [(0, 0)] * array.ndim
    behind[axis] = (0, size - array.shape[axis])
    return array if array.shape[axis] == size else jnp.pad(array, behind)


def rows_times(rows: Float[Array, "B K G q m"], matrix: Float[Array, "B K m s"], dtype: jnp.dtype) -> Array:
    """Product of each row of each group with its key head's matrix: [B, K, G, q, s]."""
    *shape, inner = rows.shape
    return batched_matmul(rows.reshape(*shape[:2], -1, inner), matrix, dtype).reshape(*shape, -1)


def rows_by_keys(rows: Float[Array, "B K G q m"], keys: Float[Array, "B K s m"], dtype: jnp.dtype) -> Array:
    """Product of each row of each group with each of its key head's rows: [B, K, G, q, s]."""
    *shape, inner = rows.shape
    return batched_matmul(rows.reshape(*shape[:2], -1, inner), keys, dtype, (-1, -1)).reshape(*shape, -1)


def keys_by_rows(keys: Float[Array, "B K s m"], rows: Float[Array, "B K G q m"], dtype: jnp.dtype) -> Array:
    """`rows_by_keys` with keys before rows: [B, K, s, G, q]."""
    flat = rows.reshape(*rows.shape[:2], -1, rows.shape[4])
    return batched_matmul(keys, flat, dtype, (-1, -1)).reshape(*keys.shape[:3], *rows.shape[2:4])


def over_rows(block: Float[Array, "B K s G q"], rows: Float[Array, "B K G q m"], dtype: jnp.dtype) -> Array:
    """Product of each key's entries with the rows of its groups: [B, K, s, m]."""
    return batched_matmul(block.reshape(*block.shape[:3], -1), rows.reshape(*rows.shape[:2], -1, rows.shape[4]), dtype)


def over_keys(block: Float[Array, "B K s G q"], keys: Float[Array, "B K s m"], dtype: jnp.dtype) -> Array:
    """Sum over keys of their entries times the keys: [B, K, G, q, m]."""
    flat = block.reshape(*block.shape[:3], -1)
    # Summing over rows of both operands takes CPUs twice as long: small blocks are turned round within the cache.
    if flat.shape[2] * flat.shape[3] <= MOST_TURNED:
        product = batched_matmul(rearranged(flat.swapaxes(2, 3)), keys, dtype)
    else:
        product = batched_matmul(flat, keys, dtype, (-2, -2))
    return product.reshape(*block.shape[:2], *block.shape[3:], -1)
