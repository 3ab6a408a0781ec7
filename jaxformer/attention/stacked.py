"""One layer of a cache that is stacked over depth: every leaf has a leading layer axis."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

Cache = TypeVar("Cache")


def read_layer(cache: Cache, layer: ArrayLike | None) -> Cache:
    """The cache of one layer; the cache itself where `layer` is None.

    Raises:
      ValueError: the cache is not stacked, as a leaf without axes shows.
    """
    if layer is None:
        return cache
    if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(cache)):
        raise ValueError(f"layer is {layer}, but the cache is of one layer; layer goes with a stacked cache only.")
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False), cache)


def write_layer(cache: Cache, layer: ArrayLike | None, new: Cache) -> Cache:
    """The cache with one layer replaced, in place where it is a loop's carry; `new` itself where `layer` is None."""
    if layer is None:
        return new
    index = jnp.asarray(layer, jnp.int32)
    return jax.tree.map(lambda leaf, part: lax.dynamic_update_index_in_dim(leaf, part, index, 0), cache, new)
