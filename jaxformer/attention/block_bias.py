"""The bias of one block of pairs, and its gradient gathered block by block: never length x length for a function."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxformer.attention.terms import Bias, Terms, slice_pairs
from jaxformer.functional import compute_dtype


def block_bias(
    bias: Bias, block: Terms, pair: Int[Array, "4"], num_queries: int, num_keys: int
) -> Float[Array, "#B #N #q #s"] | None:
    """The bias of the block that starts at query pair[0] and key pair[1]; `block` holds the terms of that block."""
    if bias is None or callable(bias):
        return block.added(bias)
    return slice_pairs(bias, pair[0], num_queries, pair[1], num_keys)


def bias_gradient_zeros(bias: Bias) -> list[Array]:
    """Where the gradient of each floating leaf is summed up."""
    return [jnp.zeros(leaf.shape, compute_dtype(leaf.dtype)) for leaf in jax.tree.leaves(bias) if _is_floating(leaf)]


def add_bias_gradient(
    sums: list[Array],
    bias: Bias,
    terms: Terms,
    pair: Int[Array, "4"],
    num_queries: int,
    num_keys: int,
    d_logits: Float[Array, "B K G q s"],
) -> list[Array]:
    """The sums with the gradient of one block added."""
    if not sums:
        return sums
    batch_size, num_kv_heads, group, _, _ = d_logits.shape
    d_pairs = d_logits.reshape(batch_size, num_kv_heads * group, num_queries, num_keys)
    if not callable(bias):
        return [_add_block(sums[0], d_pairs, pair)]
    positions = terms.block(pair[0], num_queries, pair[1], num_keys).positions()
    added, pull = jax.vjp(lambda leaves: _with_floating(bias, leaves)(*positions), _floating(bias))
    (d_leaves,) = pull(_reduce_to(d_pairs, added.shape).astype(added.dtype))
    return [total + leaf.astype(total.dtype) for total, leaf in zip(sums, d_leaves)]


def finish_bias_gradient(sums: list[Array], bias: Bias) -> Bias:
    """The gradient as a tree like the bias, None at what is not floating."""
    return _with_floating(bias, [total.astype(leaf.dtype) for total, leaf in zip(sums, _floating(bias))], others=False)


def _add_block(total: Float[Array, "#B #N #T #S"], d_pairs: Float[Array, "B N q s"], pair: Int[Array, "4"]) -> Array:
    shape = total.shape[:2] + tuple(1 if full == 1 else part for full, part in zip(total.shape[2:], d_pairs.shape[2:]))
    zero = jnp.zeros((), pair.dtype)
    starts = (zero, zero, *(zero if size == 1 else start for size, start in zip(total.shape[2:], pair[:2])))
    block = lax.dynamic_slice(total, starts, shape) + _reduce_to(d_pairs, shape).astype(total.dtype)
    return lax.dynamic_update_slice(total, block, starts)


def _reduce_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes that broadcasting to `array` would repeat."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and array.shape[axis] != 1)
    return array.sum(axes, keepdims=True)


def _is_floating(leaf: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _floating(bias: Bias) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(bias) if _is_floating(leaf)]


def _with_floating(bias: Bias, floating: list[Array], others: bool = True) -> Bias:
    """The bias with its floating leaves replaced in order, the others kept or None."""
    leaves, tree = jax.tree.flatten(bias)
    replacements = iter(floating)
    return jax.tree.unflatten(
        tree, [next(replacements) if _is_floating(leaf) else leaf if others else None for leaf in leaves]
    )
