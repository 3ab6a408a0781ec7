"""Routing attention's row of the contract table: its oracle ranks every token for every cluster."""

import jax.numpy as jnp
import numpy as np
from contract import Row, dot_products, softmax_over, visible_pairs, weighted_values

from jaxformer.attention import ATTENTION


def draw(random, sizes):
    return {"centroids": random.standard_normal((sizes.heads, 3, sizes.head_dim)).astype(np.float32)}


def one_cluster(random, sizes):
    return {"centroids": random.standard_normal((sizes.heads, 1, sizes.head_dim)).astype(np.float32)}


def cosines(tokens, centroids):
    """[B, N, C, T]: of every centroid and layer-normalised token."""
    tokens = tokens - tokens.mean(-1, keepdims=True)
    tokens = tokens / jnp.sqrt((tokens**2).sum(-1, keepdims=True))
    centroids = centroids / jnp.sqrt((centroids**2).sum(-1, keepdims=True))
    return jnp.einsum("btnh,nch->bnct", tokens, centroids)


def members(tokens, centroids, key_mask, window):
    """bool [B, N, C, T]: a cluster takes the tokens that fewer than `window` real ones surpass."""
    scores, real = cosines(tokens, centroids), key_mask[:, None, None, :]
    better = (scores[..., None, :] > scores[..., :, None]) & real[..., None, :]
    return (better.sum(-1) < window) & real


def scaled(inputs):
    return dot_products(inputs["query"], inputs["key"]) * inputs["query"].shape[-1] ** -0.5


def oracle(inputs, *, key_mask, causal, window):
    queries = members(inputs["query"], inputs["centroids"], key_mask, window)
    keys = members(inputs["key"], inputs["centroids"], key_mask, window)
    total, number = 0.0, 0
    for cluster in range(queries.shape[2]):
        seen = queries[:, :, cluster, :, None] & keys[:, :, cluster, None, :] & visible_pairs(inputs, key_mask, causal)
        total = total + softmax_over(scaled(inputs), seen)
        number = number + seen.any(-1, keepdims=True)
    weights = total / jnp.maximum(number, 1)
    return weighted_values(weights, inputs["value"]), weights


def decode_oracle(inputs, *, key_mask, causal, **ignored):
    mine = cosines(inputs["query"], inputs["centroids"]).argmax(2)
    theirs = cosines(inputs["key"], inputs["centroids"]).argmax(2)
    seen = (mine[..., :, None] == theirs[..., None, :]) & visible_pairs(inputs, key_mask, causal)
    weights = softmax_over(scaled(inputs), seen)
    return weighted_values(weights, inputs["value"]), weights


ROWS = {
    "routing": Row(
        kind=ATTENTION["routing"],
        variants={"windows_of_4": {"window": 4}},
        oracle=oracle,
        decode_oracle=decode_oracle,
        arguments=draw,
        selection_leaks=True,
        degenerate={"window": 20},
        degenerate_arguments=one_cluster,
        padding_queries=False,
    ),
}
