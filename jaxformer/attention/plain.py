"""Attention with the whole matrix of weights in memory: the definition, and the fastest form for a few queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.attention.products import einsum
from jaxformer.attention.terms import Bias, Terms
from jaxformer.functional import compute_dtype


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
    powers, total = _powers(query, key, bias, terms)
    batch_size, num_heads, num_queries, num_keys = powers.shape
    num_kv_heads = key.shape[2]
    if dropout_rate:
        keep, factor = draw_keep(rng, powers.shape, dropout_rate)
        powers = jnp.where(keep, powers * jnp.asarray(factor, powers.dtype), jnp.zeros((), powers.dtype))
    powers = powers.reshape(batch_size, num_kv_heads, num_heads // num_kv_heads, num_queries, num_keys)
    dtype = compute_dtype(value.dtype)
    output = einsum("bkgts,bskv->bkgtv", powers.astype(value.dtype), value, dtype)
    # Dividing the sum of values takes one pass less over the matrix than dividing every weight.
    output = output.reshape(batch_size, num_heads, num_queries, value.shape[3]) / total.astype(dtype)
    return output.swapaxes(1, 2).astype(value.dtype)


def plain_weights(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], bias: Bias, terms: Terms
) -> Float[Array, "B N T S"]:
    """The weights of every query on every key, in float32 (float64 for float64 queries)."""
    powers, total = _powers(query, key, bias, terms)
    return powers / total


def _powers(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], bias: Bias, terms: Terms
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T 1"]]:
    """`visible_powers` of query keyᵀ + bias."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    dtype = compute_dtype(query.dtype)
    grouped = query.reshape(batch_size, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = einsum("btkgh,bskh->bkgts", grouped, key, dtype)
    logits = logits.reshape(batch_size, num_heads, num_queries, num_keys)
    added = terms.added(bias)
    return visible_powers(logits if added is None else logits + added.astype(dtype), terms.visible())


def visible_powers(
    logits: Float[Array, "*B S"], visible: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*B S"], Float[Array, "*B 1"]]:
    """Exponentials of the logits below each row's highest, 0 where hidden, and their sum, 1 where nothing is seen."""
    dtype = logits.dtype
    if visible is not None:
        logits = jnp.where(visible, logits, jnp.full((), -jnp.inf, dtype))
    # The bound keeps -inf - (-inf) = NaN out of a row that sees nothing.
    highest = logits.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
    powers = jnp.exp(logits - jax.lax.stop_gradient(highest))
    total = powers.sum(-1, keepdims=True)
    return powers, jnp.where(total == 0, jnp.ones((), dtype), total)


def draw_keep(rng: Any, shape: tuple[int, ...], dropout_rate: float) -> tuple[Array, float]:
    """Which weights dropout keeps, and the factor that keeps their mean.

    Two decisions are made with each 32 random bits: the rate is rounded to a multiple of 2^-16, and the factor is that
    of the rounded rate.
    """
    kept = max(1, round((1.0 - dropout_rate) * 2**16))
    pairs = jax.random.bits(rng, (*shape[:-1], -(-shape[-1] // 2)), "uint32")
    halves = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*shape[:-1], -1)
    return halves[..., : shape[-1]].astype(jnp.uint32) < jnp.uint32(kept), 2**16 / kept
