"""Rows of the contract table: where attention comes from, and the control of LSH attention."""

import jax.numpy as jnp
from contract import Row, softmax_over, visible_pairs, weighted_values

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


ROWS = {
    "shared_query_key": Row(
        kind=ATTENTION["shared_query_key"],
        oracle=shared_oracle,
        variants={"plain": {}},
    ),
}
