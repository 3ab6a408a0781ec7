"""Matrix products that sum up in float32 or wider, on every backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def einsum(pattern: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    """`jnp.einsum` of two arrays of one dtype with sums and result in `dtype`."""
    return jnp.einsum(pattern, *_operands(left, right, dtype), preferred_element_type=dtype)


def batched_matmul(left: Array, right: Array, dtype: jnp.dtype, axes: tuple[int, int] = (-1, -2)) -> Array:
    """[.., m, k] times [.., k, n] over equal leading axes, with sums and result in `dtype`.

    `axes` are those that are summed over, each one of the last two.
    """
    batch = tuple(range(left.ndim - 2))
    dimensions = (((left.ndim + axes[0],), (right.ndim + axes[1],)), (batch, batch))
    return jax.lax.dot_general(*_operands(left, right, dtype), dimensions, preferred_element_type=dtype)


def _operands(left: Array, right: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    # XLA's CPU runtime refuses some products of bfloat16 that sum up in float32, and gains nothing from the others.
    if jax.default_backend() == "cpu":
        return left.astype(dtype), right.astype(dtype)
    return left, right
