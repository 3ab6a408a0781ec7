"""Validations that several functions share. Each returns its input as JAX arrays or raises a ValueError naming it."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


def as_integers(array: ArrayLike, name: str) -> Int[Array, "..."]:
    """The array as int32, refused unless it is integer."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be integer.")
    return array.astype(jnp.int32)


def as_floating(array: ArrayLike, name: str, min_rank: int = 1) -> Float[Array, "..."]:
    """The array unchanged, refused unless it is floating with at least min_rank axes."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.ndim < min_rank:
        raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be floating of rank {min_rank} or more.")
    return array


def token_pairs(queries: ArrayLike, keys: ArrayLike, what: str) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
    """Query and key positions, or segments, that are about to be compared pair by pair: int32 [B, T] and [B, S]."""
    pair = as_integers(queries, f"query_{what}"), as_integers(keys, f"key_{what}")
    for array, role in zip(pair, ("query", "key")):
        if array.ndim != 2:
            raise ValueError(f"{role}_{what} has shape {array.shape}; it must be [batch, tokens].")
    if len({array.shape[0] for array in pair} - {1}) > 1:
        raise ValueError(f"query_{what} {pair[0].shape} and key_{what} {pair[1].shape} have different batch sizes.")
    return pair
