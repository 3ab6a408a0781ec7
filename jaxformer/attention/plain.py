"""Attention with the whole matrix of weights in memory: the definition, and the fastest form for a few queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.attention.terms import Bias, Terms
from jaxformer.functional import compute_dtype, masked_softmax


def plain_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    dropout_rate: float,
    rng: Array | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ + bias) value, the query being scaled already."""
    weights = plain_weights(query, key, bias, terms)
    if dropout_rate:
        keep, factor = draw_keep(rng, weights.shape, dropout_rate)
        weights = jnp.where(keep, weights * jnp.asarray(factor, weights.dtype), jnp.zeros((), weights.dtype))
    batch_size, num_heads, num_queries, num_keys = weights.shape
    weights = weights.reshape(batch_size, key.shape[2], -1, num_queries, num_keys)
    output = jnp.einsum(
        "bkgts,bskv->btkgv",
        weights.astype(value.dtype),
        value,
        preferred_element_type=compute_dtype(value.dtype),
    )
    return output.reshape(batch_size, num_queries, num_heads, -1).astype(value.dtype)


def plain_weights(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], bias: Bias, terms: Terms
) -> Float[Array, "B N T S"]:
    """The weights of every query on every key, in float32 (float64 for float64 queries)."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    grouped = query.reshape(batch_size, num_queries, key.shape[2], -1, head_dim)
    dtype = compute_dtype(query.dtype)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=dtype)
    logits = logits.reshape(batch_size, num_heads, num_queries, key.shape[1])
    added = terms.added(bias)
    if added is not None:
        logits = logits + added.astype(dtype)
    return masked_softmax(logits, terms.visible())


def draw_keep(rng: Any, shape: tuple[int, ...], dropout_rate: float) -> tuple[Array, float]:
    """Which weights dropout keeps, and the factor that keeps their mean.

    Two decisions are made with each 32 random bits: the rate is rounded to a multiple of 2^-16, and the factor is that
    of the rounded rate.
    """
    kept = max(1, round((1.0 - dropout_rate) * 2**16))
    pairs = jax.random.bits(rng, (*shape[:-1], -(-shape[-1] // 2)), "uint32")
    halves = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*shape[:-1], -1)
    return halves[..., : shape[-1]].astype(jnp.uint32) < jnp.uint32(kept), 2**16 / kept
