"""Clustered attention's rows: K-means on hashes, head by head, then whole matrices of weights."""

import jax
import jax.numpy as jnp
import numpy as np
from contract import Row, dot_products, softmax_over, weighted_values

from jaxformer.attention import ATTENTION


def lloyd(query, planes, exists, count, rounds):
    """Clusters of the queries [T, H] of one head; distances are counts of unequal bits."""
    bits = query @ planes >= 0
    order = jnp.argsort(~exists)
    number = exists.sum()
    hashes = bits[order[jnp.array([(2 * c + 1) * number // (2 * count) for c in range(count)])]]

    def nearest(hashes):
        return (bits[:, None] != hashes[None]).sum(-1).argmin(-1)

    for _ in range(rounds):
        belongs = (nearest(hashes)[:, None] == jnp.arange(count)) & exists[:, None]
        ones = (belongs[:, :, None] & bits[:, None]).sum(0)
        sizes = belongs.sum(0)[:, None]
        hashes = jnp.where(sizes > 0, 2 * ones >= sizes, hashes)
    return nearest(hashes)


def clustered_oracle(inputs, *, key_mask, causal, num_clusters, num_iterations, top_k=None):
    """The paper's matrices: A of the means of clusters, and the improved one with its best keys' share dealt anew."""
    del causal
    query, planes = inputs["query"], jax.lax.stop_gradient(inputs["hash_planes"])
    queries, keys = query.shape[1], inputs["key"].shape[1]
    exists = key_mask if queries == keys else jnp.ones((query.shape[0], queries), bool)
    heads = jax.lax.stop_gradient(query.swapaxes(1, 2))
    cluster = jax.vmap(jax.vmap(lloyd, (0, None, None, None, None)), (0, None, 0, None, None))(
        heads, planes, exists, num_clusters, num_iterations
    )
    alike = (cluster[:, :, :, None] == cluster[:, :, None]) & exists[:, None, None]
    # A query that does not exist may be alone with none to take the mean of: then its mean is 0.
    means = jnp.einsum("bntu,bunh->btnh", alike / jnp.maximum(alike.sum(-1, keepdims=True), 1), query)
    seen = key_mask[:, None, None, :]
    scale = query.shape[-1] ** -0.5
    key = jnp.where(key_mask[:, :, None, None], inputs["key"], 0)
    weights = softmax_over(dot_products(means, key) * scale, seen)
    if top_k is not None:
        order = jnp.argsort(jnp.argsort(-jax.lax.stop_gradient(weights), -1), -1)
        best = order < top_k
        share = jnp.where(best, weights, 0).sum(-1, keepdims=True)
        own = softmax_over(dot_products(query, key) * scale, best & seen)
        weights = jnp.where(best, 0, weights) + share * own
    return weighted_values(weights, jnp.where(key_mask[:, :, None, None], inputs["value"], 0)), weights


ROWS = {
    "clustered": Row(
        kind=ATTENTION["clustered"],
        variants={
            "improved": {"num_clusters": 3, "num_iterations": 3, "top_k": 4},
            "plain": {"num_clusters": 3, "num_iterations": 2},
        },
        oracle=clustered_oracle,
        arguments=lambda random, sizes: {
            "hash_planes": random.standard_normal((sizes.head_dim, 16)).astype(np.float32)
        },
        degenerate={"num_clusters": 2, "top_k": 16},
    ),
}
