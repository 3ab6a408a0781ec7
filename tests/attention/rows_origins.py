"""Rows of the contract table: where attention comes from, and the control of LSH attention."""

import jax.numpy as jnp
from contract import Row, dense_oracle, softmax_over, visible_pairs, weighted_values

from jaxformer.attention import ATTENTION


def shared_oracle(inputs, *, key_mask, causal, **ignored):
    query = inputs["query_key"]
    key = query / jnp.sqrt((query**2).sum(-1, keepdims=True))
    pairs = visible_pairs(inputs, key_mask, causal) & key_mask[:, None, :, None]
    itself = jnp.eye(query.shape[1], dtype=bool)
    others = pairs & ~itself
    seen = jnp.where(others.any(-1, keepdims=True), others, pairs & itself)
    weights = softmax_over(jnp.einsum("btnh,bsnh->bnts", query, key), seen)
    return weighted_values(weights, inputs["value"]), weights


def each_pair(inputs):
    """[B, N, T, 1, H] and [B, N, 1, S, Hk]."""
    query, key = inputs["query"], inputs["key"]
    key = key.repeat(query.shape[2] // key.shape[2], 2)
    return query.swapaxes(1, 2)[:, :, :, None], key.swapaxes(1, 2)[:, :, None]


def from_logits(inputs, logits, key_mask, causal, see=True):
    weights = softmax_over(logits, visible_pairs(inputs, key_mask, causal) & see)
    return weighted_values(weights, inputs["value"]), weights


def bilinear_oracle(inputs, *, key_mask, causal, **ignored):
    projected = jnp.einsum("btnh,hk->btnk", inputs["query"], inputs["kernel"])
    return dense_oracle({**inputs, "query": projected}, key_mask=key_mask, causal=causal, scale=1.0)


def additive_oracle(inputs, *, key_mask, causal, **ignored):
    query, key = each_pair(inputs)
    hidden = jnp.einsum("bntsh,nhm->bntsm", query, inputs["query_kernel"])
    hidden = hidden + key @ inputs["key_kernel"] + inputs["hidden_bias"]
    logits = (jnp.tanh(hidden) * inputs["score_vector"][:, None, None, :]).sum(-1)
    return from_logits(inputs, logits, key_mask, causal)


def concat_oracle(inputs, *, key_mask, causal, **ignored):
    query, key = each_pair(inputs)
    shape = (*query.shape[:3], key.shape[3], query.shape[4])
    both = jnp.concatenate([jnp.broadcast_to(query, shape), jnp.broadcast_to(key, shape)], -1)
    logits = jnp.tanh(both @ inputs["kernel"]) @ inputs["score_vector"]
    return from_logits(inputs, logits, key_mask, causal)


def kernel_oracle(inputs, *, key_mask, causal, kernel="gaussian", leave_one_out=False, **ignored):
    query, key = each_pair(inputs)
    distance = ((query - key) ** 2).sum(-1) / inputs["width"][:, None, None] ** 2
    weights = jnp.exp(-distance / 2) if kernel == "gaussian" else jnp.maximum(0.75 * (1 - distance), 0.0)
    seen = visible_pairs(inputs, key_mask, causal)
    weights = jnp.where(seen, weights, 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return weighted_values(weights, inputs["value"]), weights


def normal(random, *shape):
    return random.standard_normal(shape).astype("float32")


def draw_bilinear(random, sizes):
    return {"kernel": normal(random, sizes.head_dim, sizes.head_dim)}


def scaled_identity(random, sizes):
    return {"kernel": (jnp.eye(sizes.head_dim) * sizes.head_dim**-0.5).astype("float32")}


def draw_additive(random, sizes):
    return {
        "query_kernel": normal(random, sizes.heads, sizes.head_dim, 4),
        "key_kernel": normal(random, sizes.head_dim, 4),
        "score_vector": normal(random, sizes.heads, 4),
        "hidden_bias": normal(random, 4),
    }


def draw_concat(random, sizes):
    return {"kernel": normal(random, 2 * sizes.head_dim, 4), "score_vector": normal(random, 4)}


def draw_width(random, sizes):
    return {"width": random.uniform(1.5, 3.0, sizes.heads).astype("float32")}


ROWS = {
    "shared_query_key": Row(
        kind=ATTENTION["shared_query_key"],
        oracle=shared_oracle,
        variants={"plain": {}},
    ),
    "bilinear": Row(
        kind=ATTENTION["bilinear"],
        oracle=bilinear_oracle,
        variants={"one_kernel": {}},
        arguments=draw_bilinear,
        degenerate={},
        degenerate_arguments=scaled_identity,
    ),
    "additive": Row(
        kind=ATTENTION["additive"],
        oracle=additive_oracle,
        variants={"blocks_of_4": {"block_size": 4}},
        arguments=draw_additive,
    ),
    "concat": Row(
        kind=ATTENTION["concat"],
        oracle=concat_oracle,
        variants={"one_block": {}},
        arguments=draw_concat,
    ),
    "kernel": Row(
        kind=ATTENTION["kernel"],
        oracle=kernel_oracle,
        variants={
            "gaussian_in_blocks_of_4": {"block_size": 4},
            "epanechnikov": {"kernel": "epanechnikov"},
        },
        arguments=draw_width,
    ),
}
