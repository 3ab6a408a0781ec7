"""The precision in which formulas are computed, whatever the precision of their inputs."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32 for every floating type up to 32 bits, float64 for float64 (so that gradients can be checked in it).

    Unlike `jnp.promote_types` this also works where implicit promotion is forbidden.

    Args:
      dtype: floating dtype of the input.

    Returns:
      The dtype in which logits, normalisers, statistics and angles of that input are computed.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def first_argmax(values: ArrayLike) -> Int[Array, "..."]:
    """Index of the largest entry along the last axis; the first one of equals, or the first NaN.

    Equal to `jnp.argmax`, by two plain reductions instead of one over pairs, which XLA does not vectorise on CPUs:
    several times faster over a vocabulary.

    Args:
      values: [..., V], real, V at least 1.

    Returns:
      int32 [...].
    """
    values = jnp.asarray(values)
    indices = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    is_largest = (values == values.max(-1, keepdims=True)) | (values != values)
    return jnp.where(is_largest, indices, values.shape[-1]).min(-1)
