"""Groups of similar queries: K-means on the signs of random projections."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import check_count, check_rng
from jaxformer.functional import first_argmax


def draw_hash_planes(
    rng: Array, head_dim: int, num_bits: int = 63, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "H bits"]:
    """Normals of random planes: on which side of each a query lies is its hash, equal bits meaning a small angle.

    Args:
      rng: one typed key.
      head_dim: H.
      num_bits: planes; the paper uses 63.
      dtype: floating.

    Returns:
      [H, num_bits], standard normal.

    Raises:
      ValueError: a size below 1, or an rng that is not one typed key.
    """
    for name, size in {"head_dim": head_dim, "num_bits": num_bits}.items():
        check_count(size, name)
    return jax.random.normal(check_rng(rng), (head_dim, num_bits), dtype)


def cluster_queries(
    query: Float[Array, "B T N H"],
    hash_planes: Float[Array, "H bits"],
    exists: Bool[Array, "#B T"],
    num_clusters: int,
    num_iterations: int,
) -> Int[Array, "B N T"]:
    """The cluster of each query, by Lloyd's K-means on hashes under the Hamming distance; no gradient passes.

    Starts at the hashes of evenly spaced queries, and ties go to the cluster of lower number. A cluster without members
    keeps its hash. Queries that do not exist belong to the nearest cluster too, but shape none.
    """
    batch_size, num_queries, num_heads, _ = query.shape
    if num_queries == 0:
        return jnp.zeros((batch_size, num_heads, 0), jnp.int32)
    planes = hash_planes.astype(query.dtype)
    sides = jnp.einsum("btnh,hj->bntj", lax.stop_gradient(query), lax.stop_gradient(planes)) >= 0
    bits = jnp.where(sides, 1.0, -1.0).astype(jnp.float32)
    # Evenly spaced among the queries that exist, which come first in the order.
    order = jnp.argsort(~exists, axis=1, stable=True)
    places = (2 * jnp.arange(num_clusters, dtype=jnp.int32) + 1)[None] * exists.sum(1, keepdims=True, dtype=jnp.int32)
    starts = jnp.take_along_axis(order, places // (2 * num_clusters), 1)
    hashes = jnp.take_along_axis(bits, starts[:, None, :, None], 2)

    def assign(hashes: Array) -> Array:
        # Of vectors of ±1 the largest product is the smallest distance.
        return first_argmax(jnp.einsum("bntj,bncj->bntc", bits, hashes))

    def improve(_: Array, hashes: Array) -> Array:
        members = membership(assign(hashes), exists, num_clusters, jnp.float32)
        votes = jnp.einsum("bntc,bntj->bncj", members, bits)
        majority = jnp.where(votes >= 0, 1.0, -1.0).astype(jnp.float32)
        return jnp.where(members.sum(2)[..., None] > 0, majority, hashes)

    return assign(lax.fori_loop(0, num_iterations, improve, hashes))


def membership(
    clusters: Int[Array, "B *heads T"], exists: Bool[Array, "#B T"], num_clusters: int, dtype: DTypeLike
) -> Float[Array, "B *heads T C"]:
    """1 where a query that exists belongs to a cluster, else 0."""
    numbers = jnp.arange(num_clusters, dtype=jnp.int32).reshape((1,) * clusters.ndim + (num_clusters,))
    exists = exists.reshape(exists.shape[0], *(1,) * (clusters.ndim - 2), exists.shape[1], 1)
    return ((clusters[..., None] == numbers) & exists).astype(dtype)
