"""Vectors of length one, for kinds that choose keys by direction."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxformer.functional import compute_dtype


def unit_length(vectors: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """vector / |vector| in float32 or wider, right at any scale, and so is its gradient, of the order of 1 / |vector|.

    Zero stays zero, with the gradient of the vector itself; what has no normal number in it counts as zero.
    """
    vectors = unit_range(vectors)
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.where(squares == 0, jnp.ones((), vectors.dtype), squares))


def unit_range(vectors: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """The vectors over their largest entry, whose squares neither overflow nor vanish, in float32 or wider.

    The divisor is a constant for every derivative: it must cancel in what is made of the result.
    """
    vectors = vectors.astype(compute_dtype(vectors.dtype))
    one = jnp.ones((), vectors.dtype)
    largest = lax.stop_gradient(jnp.abs(vectors).max(-1, keepdims=True, initial=0.0))
    # A quarter of what is large: the compiler may multiply by the reciprocal, which must be a normal number.
    part = jnp.where(largest > 1, one * 0.25, one)
    return vectors * part / jnp.where(largest < jnp.finfo(vectors.dtype).tiny, one, largest * part)
