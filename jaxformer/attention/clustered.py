"""Clustered attention: queries that are alike share one row of weights, refined on the keys that matter most."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.clusters import cluster_queries, membership
from jaxformer.attention.inputs import (
    as_array,
    check_count,
    check_flag,
    check_key_mask,
    check_query_key,
    check_scale,
    check_value,
    hide_missing,
)
from jaxformer.attention.products import einsum
from jaxformer.functional import as_mask, compute_dtype, masked_softmax

# Queries whose best keys are gathered at once.
CHUNK = 128


def clustered_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    hash_planes: ArrayLike,
    num_clusters: int,
    num_iterations: int = 10,
    top_k: int | None = None,
    query_mask: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Clustered attention: each query uses the weights of its cluster's mean, O(num_clusters (T + S)) time and memory.

    With c the mean of the queries in the cluster of query i: softmax(scale * c keyᵀ) value. Improved by `top_k`: the
    share that these weights give the cluster's top_k keys is dealt out anew among them, by the query's own softmax,
    O(T top_k) more. For long inputs with few kinds of queries, and for speeding up a model trained densely.
    Vyas et al. 2020, "Fast Transformers with Clustered Attention", arXiv:2007.04825, sections 3.2 and 3.3. As there,
    clusters come from K-means on the signs of random projections, under the Hamming distance, and no gradient passes
    through the choice. Ours: planes go through the origin, and K-means starts at evenly spaced queries.

    Which queries share a cluster depends on all queries of the example and head, never on other examples or on padding.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      hash_planes: floating [H, bits], as `draw_hash_planes` makes it. The same in training and evaluation.
      num_clusters: clusters per head, at least 1 (the paper's C, 100 there). Not a function of the length.
      num_iterations: rounds of K-means, at least 1.
      top_k: keys per cluster whose weights are exact in proportion (the paper's k, 32 there); None = no improvement.
      query_mask: bool or 0/1 int [B or 1, T], True = the query exists and shapes clusters. By default `key_mask` if
        T = S, as in self-attention, else all.
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: refused; there is no causal clustered attention.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: causal is True; shapes or dtypes that do not fit; a number below 1.
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    hash_planes = _check_clusters(hash_planes, query, num_clusters, num_iterations, top_k, causal)
    key_mask, exists = _check_masks(key_mask, query_mask, query, key)
    clusters = cluster_queries(query, hash_planes, exists, num_clusters, num_iterations)
    key, value = hide_missing(key, key_mask), hide_missing(value, key_mask)
    grouped, clusters = _grouped(query, scale, clusters, key.shape[2])
    weights = _cluster_weights(grouped, key, key_mask, clusters, exists, num_clusters)
    best = _best_keys(weights, top_k)
    dtype = compute_dtype(value.dtype)
    shared = einsum("bkgcs,bskv->bkgcv", _without(weights, best).astype(dtype), value.astype(dtype), dtype)
    output = jnp.take_along_axis(shared, clusters[..., None], 3)
    if best is not None:
        output = output + _refined(grouped, key, value, key_mask, weights, best, clusters)
    return output.transpose(0, 3, 1, 2, 4).reshape(*query.shape[:3], value.shape[3]).astype(value.dtype)


def clustered_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    hash_planes: ArrayLike,
    num_clusters: int,
    num_iterations: int = 10,
    top_k: int | None = None,
    query_mask: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `clustered_attention` gives each value: O(T S) time and memory. For plots and tests.

    Vyas et al. 2020, "Fast Transformers with Clustered Attention", arXiv:2007.04825, sections 3.2 and 3.3.

    Args:
      query, key, hash_planes, num_clusters, num_iterations, top_k, query_mask, key_mask, causal, scale: as in
        `clustered_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `clustered_attention`.
    """
    query, key = check_query_key(query, key)
    hash_planes = _check_clusters(hash_planes, query, num_clusters, num_iterations, top_k, causal)
    key_mask, exists = _check_masks(key_mask, query_mask, query, key)
    clusters = cluster_queries(query, hash_planes, exists, num_clusters, num_iterations)
    key = hide_missing(key, key_mask)
    grouped, clusters = _grouped(query, scale, clusters, key.shape[2])
    weights = _cluster_weights(grouped, key, key_mask, clusters, exists, num_clusters)
    best = _best_keys(weights, top_k)
    result = jnp.take_along_axis(_without(weights, best), clusters[..., None], 3)
    if best is not None:
        chosen = jnp.take_along_axis(_chosen(best, key.shape[1]), clusters[..., None], 3)
        seen = chosen if key_mask is None else chosen & key_mask[:, None, None, None]
        own = masked_softmax(einsum("bkgth,bskh->bkgts", grouped, key.astype(grouped.dtype), grouped.dtype), seen)
        share = jnp.take_along_axis(weights, best, 4).sum(-1)
        result = result + own * jnp.take_along_axis(share, clusters, 3)[..., None]
    return result.reshape(query.shape[0], query.shape[2], query.shape[1], key.shape[1])


def _check_clusters(
    hash_planes: ArrayLike,
    query: Float[Array, "B T N H"],
    num_clusters: int,
    num_iterations: int,
    top_k: int | None,
    causal: bool,
) -> Float[Array, "H bits"]:
    if check_flag(causal, "causal"):
        raise ValueError(
            "clustered attention cannot be causal: the queries of a cluster, later ones too, share one row of weights."
        )
    for name, number in {"num_clusters": num_clusters, "num_iterations": num_iterations, "top_k": top_k}.items():
        if name != "top_k" or number is not None:
            check_count(number, name)
    hash_planes = as_array(hash_planes, "hash_planes")
    if hash_planes.ndim != 2 or hash_planes.shape[0] != query.shape[3] or hash_planes.shape[1] == 0:
        raise ValueError(f"hash_planes has shape {hash_planes.shape}; it must be ({query.shape[3]}, bits).")
    if not jnp.issubdtype(hash_planes.dtype, jnp.floating):
        raise ValueError(f"hash_planes is {hash_planes.dtype}; it must be floating.")
    return hash_planes


def _check_masks(
    key_mask: ArrayLike | None,
    query_mask: ArrayLike | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
) -> tuple[Bool[Array, "#B S"] | None, Bool[Array, "#B T"]]:
    """Which keys and which queries exist."""
    batch_size, num_queries = query.shape[:2]
    key_mask = check_key_mask(key_mask, batch_size, key.shape[1])
    if query_mask is None:
        if key_mask is not None and num_queries == key.shape[1]:
            return key_mask, key_mask
        return key_mask, jnp.ones((1, num_queries), bool)
    exists = as_mask(query_mask, "query_mask")
    if exists.ndim != 2 or exists.shape[0] not in (1, batch_size) or exists.shape[1] != num_queries:
        raise ValueError(f"query_mask has shape {exists.shape}; it must be {(batch_size, num_queries)}.")
    return key_mask, exists


def _grouped(
    query: Float[Array, "B T N H"], scale: ArrayLike | None, clusters: Int[Array, "B N T"], num_kv_heads: int
) -> tuple[Float[Array, "B K G T H"], Int[Array, "B K G T"]]:
    """Scaled queries and their clusters by key head, in float32 or wider, in which near ties stay what they are."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    dtype = compute_dtype(query.dtype)
    group = num_heads // num_kv_heads
    query = query.astype(dtype) * jnp.asarray(check_scale(scale, head_dim), dtype)
    query = query.reshape(batch_size, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    return query, clusters.reshape(batch_size, num_kv_heads, group, num_queries)


def _cluster_weights(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B S K H"],
    key_mask: Bool[Array, "#B S"] | None,
    clusters: Int[Array, "B K G T"],
    exists: Bool[Array, "#B T"],
    num_clusters: int,
) -> Float[Array, "B K G C S"]:
    """The softmax of each cluster's mean query over all keys."""
    members = membership(clusters, exists, num_clusters, query.dtype)
    query = jnp.where(exists[:, None, None, :, None], query, jnp.zeros((), query.dtype))
    sizes = jnp.maximum(members.sum(3), 1)
    means = einsum("bkgtc,bkgth->bkgch", members, query, query.dtype) / sizes[..., None]
    logits = einsum("bkgch,bskh->bkgcs", means, key.astype(query.dtype), query.dtype)
    return masked_softmax(logits, None if key_mask is None else key_mask[:, None, None, None])


def _best_keys(weights: Float[Array, "B K G C S"], top_k: int | None) -> Int[Array, "B K G C best"] | None:
    """The keys to which each cluster gives most."""
    if top_k is None:
        return None
    return lax.top_k(lax.stop_gradient(weights), min(top_k, weights.shape[4]))[1]


def _chosen(best: Int[Array, "B K G C best"], num_keys: int) -> Bool[Array, "B K G C S"]:
    """`best` as a mask over the keys."""
    chosen = jnp.zeros((*best.shape[:4], num_keys), bool)
    return jnp.put_along_axis(chosen, best, jnp.ones_like(best, bool), axis=4, inplace=False)


def _without(weights: Float[Array, "B K G C S"], best: Int[Array, "B K G C best"] | None) -> Float[Array, "B K G C S"]:
    """The weights of the keys that stay as the cluster has them."""
    if best is None:
        return weights
    return jnp.where(_chosen(best, weights.shape[4]), jnp.zeros((), weights.dtype), weights)


def _refined(
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    key_mask: Bool[Array, "#B S"] | None,
    weights: Float[Array, "B K G C S"],
    best: Int[Array, "B K G C best"],
    clusters: Int[Array, "B K G T"],
) -> Float[Array, "B K G T Hv"]:
    """What each query takes of its cluster's best keys: their share, dealt out by the query's own softmax."""
    num_queries = query.shape[3]
    share = jnp.take_along_axis(weights, best, 4).sum(-1)
    keys, values = _gather(key, best).astype(query.dtype), _gather(value, best).astype(compute_dtype(value.dtype))
    seen = jnp.ones(best.shape, bool)
    if key_mask is not None:
        mask = jnp.broadcast_to(key_mask, key.shape[:2])[:, None, None, None]
        seen = jnp.take_along_axis(jnp.broadcast_to(mask, (*best.shape[:4], key.shape[1])), best, 4)

    @jax.checkpoint
    def body(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        query, clusters = chunk
        own_keys = jnp.take_along_axis(keys, clusters[..., None, None], 3)
        own_values = jnp.take_along_axis(values, clusters[..., None, None], 3)
        own_seen = jnp.take_along_axis(seen, clusters[..., None], 3)
        own = masked_softmax(einsum("bkgth,bkgtrh->bkgtr", query, own_keys, query.dtype), own_seen)
        own = own * jnp.take_along_axis(share, clusters, 3)[..., None]
        return None, einsum("bkgtr,bkgtrv->bkgtv", own.astype(values.dtype), own_values, values.dtype)

    if num_queries <= CHUNK:
        return body(None, (query, clusters))[1]
    num_chunks = -(-num_queries // CHUNK)

    def split(array: Array) -> Array:
        rest = [(0, 0)] * (array.ndim - 4)
        array = jnp.pad(array, [(0, 0), (0, 0), (0, 0), (0, num_chunks * CHUNK - num_queries), *rest])
        return jnp.moveaxis(array.reshape(*array.shape[:3], num_chunks, CHUNK, *array.shape[4:]), 3, 0)

    output = jnp.moveaxis(lax.scan(body, None, (split(query), split(clusters)))[1], 0, 3)
    return output.reshape(*output.shape[:3], num_chunks * CHUNK, output.shape[5])[:, :, :, :num_queries]


def _gather(array: Float[Array, "B S K H"], best: Int[Array, "B K G C best"]) -> Float[Array, "B K G C best H"]:
    """The keys, or values, of each cluster's best keys."""
    batch_size, num_kv_heads = best.shape[:2]
    rows = jnp.arange(batch_size, dtype=best.dtype).reshape(batch_size, 1, 1, 1, 1)
    heads = jnp.arange(num_kv_heads, dtype=best.dtype).reshape(1, num_kv_heads, 1, 1, 1)
    return array[rows, best, heads]
