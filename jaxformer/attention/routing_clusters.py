"""Clusters of routing attention: which tokens stand near which centroid, and how centroids follow the tokens."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.by_heads import map_heads
from jaxformer.attention.inputs import as_array, check_key_mask, check_number, check_query_key, hide_missing
from jaxformer.attention.unit_length import unit_length, unit_range
from jaxformer.functional import compute_dtype, first_argmax


def routing_update(
    centroids: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    decay: float = 0.999,
) -> tuple[Float[Array, "N C H"], Float[Array, ""]]:
    """Centroids moved towards the queries and keys that are nearest to them, and the loss that draws these to them.

    centroid <- decay * centroid + (1 - decay) * mean of the routing vectors whose nearest centroid it is; one that is
    nearest to none stays. Outside the gradient. The loss is the mean of |vector - nearest centroid|² over real queries
    and keys, with a gradient to these alone. One-hot products, not scatters: the same on every run.
    Roy, Saffar, Vaswani, Grangier 2021, "Efficient Content-Based Sparse Attention with Routing Transformers",
    arXiv:2003.05997, section 4.1. Deviation: a mean, where the paper's formula adds up, so that the step doesn't depend
    on how many tokens there are.

    Args:
      centroids: floating [N, C, H], the state that training keeps.
      query: floating [B, T, N, H].
      key: [B, T, N, H] in query.dtype.
      key_mask: bool or 0/1 int [B or 1, T]; False for padding, which moves nothing.
      decay: fraction of a centroid that stays in a step, in [0, 1].

    Returns:
      The new centroids in their dtype, and the loss, float32 [] (float64 for float64 queries); 0 without any token.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a decay out of range.
    """
    query, key = check_self(query, key)
    centroids = check_centroids(centroids, query)
    decay = check_number(decay, "decay", 0.0, 1.0)
    key_mask = check_key_mask(key_mask, *query.shape[:2])
    exists = jnp.ones((1, 1), bool) if key_mask is None else key_mask
    exists = jnp.broadcast_to(exists, query.shape[:2]).reshape(-1)
    exists = jnp.concatenate([exists, exists])

    def one_head(head: tuple) -> tuple[Float[Array, "C H"], Float[Array, ""]]:
        centroids, query, key = head
        vectors = routing_vectors(jnp.concatenate([query, key]).reshape(-1, query.shape[-1]))
        fixed = lax.stop_gradient(vectors)
        centroids = centroids.astype(vectors.dtype)
        nearest = first_argmax(similarities(fixed[None, :, None], centroids[None])[0, 0])
        members = (nearest[:, None] == jnp.arange(centroids.shape[0], dtype=jnp.int32)[None]) & exists[:, None]
        members = members.astype(vectors.dtype)
        count = members.sum(0)[:, None]
        mean = jnp.matmul(members.T, fixed, precision=lax.Precision.HIGHEST) / jnp.maximum(count, 1)
        moved = jnp.where(count > 0, decay * centroids + (1 - decay) * mean, centroids)
        apart = jnp.square(vectors - jnp.matmul(members, centroids, precision=lax.Precision.HIGHEST)).sum(-1)
        return moved, jnp.where(exists, apart, jnp.zeros((), apart.dtype)).sum()

    query, key = (jnp.moveaxis(hide_missing(array, key_mask), 2, 0) for array in (query, key))
    moved, losses = lax.map(jax.checkpoint(one_head), (lax.stop_gradient(centroids), query, key))
    number = jnp.maximum(exists.sum(dtype=jnp.int32) * jnp.int32(query.shape[0]), 1)
    return lax.stop_gradient(moved).astype(centroids.dtype), losses.sum() / number.astype(losses.dtype)


def routing_vectors(tokens: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Layer normalisation without scale, to length one, in float32 or wider."""
    # Differences of nearly equal features are exact; the mean alone would leave its rounding error for a direction.
    half = tokens.astype(compute_dtype(tokens.dtype)) * 0.5
    tokens = unit_range(half - lax.stop_gradient(half[..., :1]))
    return unit_length(tokens - tokens.mean(-1, keepdims=True))


def similarities(vectors: Float[Array, "B T N H"], centroids: Float[Array, "N C H"]) -> Float[Array, "B N T C"]:
    """Cosine of every routing vector and centroid, outside the gradient and in full precision on every backend."""
    vectors = lax.stop_gradient(vectors)
    centroids = unit_length(lax.stop_gradient(centroids).astype(vectors.dtype))
    return jnp.einsum("btnh,nch->bntc", vectors, centroids, precision=lax.Precision.HIGHEST)


def nearest_centroids(tokens: Float[Array, "B T N H"], centroids: Float[Array, "N C H"]) -> Int[Array, "B N T"]:
    """The number of each token's nearest centroid; the first one of equals."""
    return first_argmax(similarities(routing_vectors(tokens), centroids)).astype(jnp.int32)


def balanced_tokens(
    tokens: Float[Array, "B T N H"],
    centroids: Float[Array, "N C H"],
    exists: Bool[Array, "#B T"] | None,
    window: int,
) -> Int[Array, "B N C w"]:
    """The `window` real tokens nearest to each centroid in order of position; T stands for no token, at the end."""
    batch_size, length, num_heads, _ = tokens.shape

    def one_head(
        tokens: Float[Array, "T H"], centroids: Float[Array, "C H"], exists: Bool[Array, "T"]
    ) -> Int[Array, "C w"]:
        scores = similarities(routing_vectors(tokens)[None, :, None], centroids[None])[0, 0].T
        scores = jnp.where(exists[None], scores, jnp.full((), -jnp.inf, scores.dtype))
        scores, chosen = lax.top_k(scores, min(window, length))
        return jnp.sort(jnp.where(scores > -jnp.inf, chosen.astype(jnp.int32), jnp.int32(length)), axis=-1)

    exists = jnp.ones((1, length), bool) if exists is None else exists
    arrays = (
        jnp.moveaxis(lax.stop_gradient(tokens), 2, 0),
        jnp.broadcast_to(lax.stop_gradient(centroids)[:, None], (num_heads, batch_size, *centroids.shape[1:])),
        jnp.broadcast_to(exists[None], (num_heads, batch_size, length)),
    )
    chosen = map_heads(one_head, arrays, batch_size, num_heads, length * centroids.shape[1])
    return jnp.moveaxis(chosen, 1, 0)


def check_self(query: ArrayLike, key: ArrayLike) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]:
    """Query and key of the same tokens and heads."""
    query, key = check_query_key(query, key)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}; they must be the same tokens, since clusters "
            "choose queries too and key_mask tells which of them are padding."
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query has {query.shape[2]} heads and key {key.shape[2]}; routing needs equal numbers.")
    return query, key


def check_centroids(centroids: ArrayLike, query: Float[Array, "B T N H"]) -> Float[Array, "N C H"]:
    """Centroids of every head."""
    centroids = as_array(centroids, "centroids")
    num_heads, head_dim = query.shape[2:]
    fits = centroids.ndim == 3 and (centroids.shape[0], centroids.shape[2]) == (num_heads, head_dim)
    if not fits or not centroids.shape[1] or not jnp.issubdtype(centroids.dtype, jnp.floating):
        raise ValueError(
            f"centroids are {centroids.dtype} {centroids.shape}; they must be floating "
            f"({num_heads}, clusters, {head_dim})."
        )
    return centroids
