"""Vectors of length one, for kinds that choose keys by direction."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import compute_dtype


def unit_length(vectors: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """vector / |vector| in float32 or wider; zero stays zero, with a finite gradient."""
    vectors = vectors.astype(compute_dtype(vectors.dtype))
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.where(squares == 0, jnp.ones((), vectors.dtype), squares))
