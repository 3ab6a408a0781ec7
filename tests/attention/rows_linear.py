"""Rows of the contract table: attentions with reordered products."""

import jax.numpy as jnp
from contract import Row, visible_pairs, weighted_values

from jaxformer.attention import ATTENTION


def normalised(inputs, products, key_mask, causal):
    """[B, N, T, S] products divided by their sums over what is seen."""
    weights = jnp.where(visible_pairs(inputs, key_mask, causal), products, 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return weighted_values(weights, inputs["value"]), weights


def repeat_heads(inputs):
    query, key = inputs["query"], inputs["key"]
    return query, key.repeat(query.shape[2] // key.shape[2], 2)


def linear_oracle(inputs, *, key_mask, causal, feature_map="elu", **ignored):
    phi = {
        "elu": lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))),
        "softplus": lambda x: jnp.log1p(jnp.exp(x)),
    }[feature_map]
    query, key = repeat_heads(inputs)
    products = jnp.einsum("btnh,bsnh->bnts", phi(query), phi(key))
    return normalised(inputs, products, key_mask, causal)


def performer_oracle(inputs, *, key_mask, causal, **ignored):
    query, key = (array / array.shape[-1] ** 0.25 for array in repeat_heads(inputs))
    projected = [jnp.einsum("btnh,fh->btnf", array, inputs["projection"]) for array in (query, key)]
    phi_query = jnp.exp(projected[0] - (query**2).sum(-1, keepdims=True) / 2)
    phi_key = jnp.exp(projected[1] - (key**2).sum(-1, keepdims=True) / 2)
    products = jnp.einsum("btnf,bsnf->bnts", phi_query, phi_key)
    return normalised(inputs, products, key_mask, causal)


def draw_projection(random, sizes):
    return {"projection": random.standard_normal((256, sizes.head_dim)).astype("float32")}


ROWS = {
    "linear": Row(
        kind=ATTENTION["linear"],
        oracle=linear_oracle,
        variants={
            "chunks_of_4": {"form": "chunked", "chunk_size": 4},
            "recurrent_softplus": {"form": "recurrent", "feature_map": "softplus"},
        },
    ),
    "performer": Row(
        kind=ATTENTION["performer"],
        oracle=performer_oracle,
        variants={"chunks_of_4": {"form": "chunked", "chunk_size": 4}},
        arguments=draw_projection,
    ),
}
