"""Routing attention: queries see the keys that are routed to the same clusters."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.by_heads import map_heads
from jaxformer.attention.inputs import check_count, check_flag, check_key_mask, check_value, hide_missing, scale_query
from jaxformer.attention.products import batched_matmul, einsum
from jaxformer.attention.routing_clusters import balanced_tokens, check_centroids, check_self
from jaxformer.functional import compute_dtype, masked_softmax


def routing_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    centroids: ArrayLike,
    window: int,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Routing attention: queries see the keys of their clusters, O(T C + C window²) time, O(T C + C window) memory.

    Each of C clusters takes the `window` queries and the `window` keys nearest to its centroid, by the cosine of the
    centroid and the layer-normalised vector, and its queries attend to its keys: softmax(query keyᵀ / sqrt(H)) value.
    A query of several clusters gets the mean over those in which it sees a key; a query of none gets zeros, so that a
    residual connection leaves the token as it is. For long sequences whose tokens fall into topics; with C and window
    near sqrt(T) it costs O(T^1.5).
    Roy, Saffar, Vaswani, Grangier 2021, "Efficient Content-Based Sparse Attention with Routing Transformers",
    arXiv:2003.05997, section 4.1, algorithm 1. Deviations: centroids count by direction alone; query and key are not
    shared where causal (give one array as both for that), and a token's own key is a key like others.

    Clusters choose from the whole sequence, so that which keys a query sees, and whether it is in a cluster at all,
    depends on later tokens, which may push out earlier ones. Causal attention never reads later values or keys, but its
    choice of earlier ones leaks; decoding (`routing_step`) follows a rule of its own.

    Args:
      query: floating [B, T, N, H].
      key: [B, T, N, H] in query.dtype.
      value: floating [B, T, N, Hv].
      centroids: floating [N, C, H], state that `routing_update` moves; no gradient reaches it.
      window: queries and keys that each cluster takes, in tokens; fewer where there are fewer real ones. C * window
        near T keeps most tokens in a cluster. Fix it for a model, never from a batch.
      key_mask: bool or 0/1 int [B or 1, T], True = the token exists. Padding is never chosen, neither as a key nor as a
        query, and moves no real token.
      causal: hide keys at later positions than the query's.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key, padding included.

    Raises:
      ValueError: shapes or dtypes that do not fit, query and key of different tokens or heads, or a window below 1.
    """
    query, key, mask, centroids = _prepare(query, key, key_mask, centroids, window, causal)
    value = hide_missing(check_value(value, key), mask)
    batch_size, length, num_heads, _ = query.shape
    if not length:
        return value
    queries, keys = (balanced_tokens(array, centroids, mask, window) for array in (query, key))
    num_clusters, taken = queries.shape[2:]

    def clusters_first(array: Array) -> Array:
        """[B, N, C, ..] as [N * C, B, ..]: clusters of all heads are alike."""
        array = jnp.moveaxis(array, 0, 2)
        return array.reshape(num_heads * num_clusters, *array.shape[2:])

    arrays = (
        clusters_first(_take(scale_query(query, query.shape[3] ** -0.5), queries)),
        clusters_first(_take(key, keys)),
        clusters_first(_take(value, keys)),
        clusters_first(queries),
        clusters_first(keys),
    )

    def attend(*arrays: Array) -> tuple[Array, Array]:
        return jax.checkpoint(lambda *arrays: _one_cluster(causal, length, *arrays))(*arrays)

    outputs, seeing = map_heads(attend, arrays, batch_size, num_heads * num_clusters, taken**2)

    def tokens_first(array: Array) -> Array:
        """[N * C, B, w, ..] as [B, N, C * w, ..]."""
        array = jnp.moveaxis(array.reshape(num_heads, num_clusters, *array.shape[1:]), 2, 0)
        return array.reshape(batch_size, num_heads, num_clusters * taken, *array.shape[4:])

    return _mean(tokens_first(outputs), tokens_first(seeing), queries, length).astype(value.dtype)


def routing_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    centroids: ArrayLike,
    window: int,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
) -> Float[Array, "B N T T"]:
    """The weights that `routing_attention` gives each value: O(C T²) time, O(T²) memory. For plots and tests.

    Roy, Saffar, Vaswani, Grangier 2021, "Efficient Content-Based Sparse Attention with Routing Transformers",
    arXiv:2003.05997, section 4.1.

    Args:
      query, key, centroids, window, key_mask, causal: as in `routing_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `routing_attention`.
    """
    query, key, mask, centroids = _prepare(query, key, key_mask, centroids, window, causal)
    length = query.shape[1]
    dtype = compute_dtype(query.dtype)
    logits = einsum("btnh,bsnh->bnts", scale_query(query, query.shape[3] ** -0.5), key, dtype)
    queries, keys = (
        jnp.moveaxis(_members(balanced_tokens(array, centroids, mask, window), length), 2, 0) for array in (query, key)
    )
    allowed = jnp.tril(jnp.ones((length, length), bool)) if causal else jnp.ones((length, length), bool)

    def add(sums: tuple, cluster: tuple) -> tuple[tuple, None]:
        weights, number = sums
        of_queries, of_keys = cluster
        visible = of_queries[..., :, None] & of_keys[..., None, :] & allowed[None, None]
        sees = visible.any(-1, keepdims=True).astype(dtype)
        return (weights + masked_softmax(logits, visible), number + sees), None

    start = jnp.zeros_like(logits), jnp.zeros((*logits.shape[:3], 1), dtype)
    (weights, number), _ = lax.scan(jax.checkpoint(add), start, (queries, keys))
    return weights / jnp.maximum(number, 1)


def _prepare(
    query: ArrayLike, key: ArrayLike, key_mask: ArrayLike | None, centroids: ArrayLike, window: int, causal: bool
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"], Bool[Array, "#B T"] | None, Float[Array, "N C H"]]:
    """Checked inputs that hold zeros where no token exists."""
    query, key = check_self(query, key)
    centroids = check_centroids(centroids, query)
    check_count(window, "window")
    check_flag(causal, "causal")
    mask = check_key_mask(key_mask, *query.shape[:2])
    return hide_missing(query, mask), hide_missing(key, mask), mask, centroids


def _one_cluster(
    causal: bool,
    length: int,
    query: Float[Array, "w H"],
    key: Float[Array, "w H"],
    value: Float[Array, "w Hv"],
    query_positions: Int[Array, "w"],
    key_positions: Int[Array, "w"],
) -> tuple[Float[Array, "w Hv"], Bool[Array, "w"]]:
    """The output of one cluster, and which of its queries see a key; position `length` stands for no token."""
    visible = (query_positions < length)[:, None] & (key_positions < length)[None]
    if causal:
        visible &= key_positions[None] <= query_positions[:, None]
    weights = masked_softmax(batched_matmul(query, key.T, compute_dtype(query.dtype)), visible)
    return batched_matmul(weights.astype(value.dtype), value, compute_dtype(value.dtype)), visible.any(-1)


def _take(array: Float[Array, "B T N H"], chosen: Int[Array, "B N C w"]) -> Float[Array, "B N C w H"]:
    """The chosen tokens of every cluster, zeros for no token."""

    def one_head(array: Float[Array, "T H"], chosen: Int[Array, "C w"]) -> Float[Array, "C w H"]:
        return array.at[chosen].get(mode="fill", fill_value=0)

    return jax.vmap(jax.vmap(one_head, (1, 0)))(array, chosen)


def _mean(
    outputs: Float[Array, "B N M Hv"], seeing: Bool[Array, "B N M"], chosen: Int[Array, "B N C w"], length: int
) -> Float[Array, "B T N Hv"]:
    """The mean of each token's outputs over the clusters in which it sees a key."""

    def one_head(
        outputs: Float[Array, "M Hv"], seeing: Bool[Array, "M"], chosen: Int[Array, "C w"]
    ) -> Float[Array, "T Hv"]:
        tokens = chosen.reshape(-1)
        summed = jnp.zeros((length, outputs.shape[1]), outputs.dtype).at[tokens].add(outputs, mode="drop")
        number = jnp.zeros((length,), outputs.dtype).at[tokens].add(seeing.astype(outputs.dtype), mode="drop")
        return summed / jnp.maximum(number, 1)[:, None]

    return jnp.moveaxis(jax.vmap(jax.vmap(one_head))(outputs, seeing, chosen), 2, 1)


def _members(chosen: Int[Array, "B N C w"], length: int) -> Bool[Array, "B N C T"]:
    """Which tokens each cluster takes."""
    tokens = jnp.arange(length, dtype=jnp.int32)
    return (chosen[..., None] == tokens[None, None, None, None]).any(-2)
