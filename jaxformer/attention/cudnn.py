"""cuDNN's fused attention through JAX, for the cases in which it means the same as the other implementations."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.attention.terms import Bias, Terms


def why_not_cudnn(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    dropout_rate: float,
) -> str | None:
    """The first reason why cuDNN cannot compute this case with equal meaning, or None if it can.

    JAX hands masks to cuDNN as large negative biases, under which a query that sees nothing gets an average instead of
    zeros, and aligns causal attention to the first key; so masks, biases and causal attention with T != S stay out.
    """
    reasons = {
        "it needs a GPU": jax.default_backend() != "gpu",
        "it needs bfloat16 or float16": not {query.dtype, value.dtype} <= {jnp.dtype("bfloat16"), jnp.dtype("float16")},
        "query, key and value must have one dtype": not query.dtype == key.dtype == value.dtype,
        "query, key and value must have one head size": query.shape[3] != value.shape[3],
        "the head size must be a multiple of 8, up to 128": query.shape[3] % 8 != 0 or query.shape[3] > 128,
        "it takes no key_mask": terms.key_mask is not None,
        "it takes no mask": terms.mask is not None,
        "it takes no bias": bias is not None,
        "it takes no segments": terms.query_segments is not None,
        "it takes no dropout": dropout_rate > 0,
        "causal attention needs default positions": terms.causal and not terms.has_default_positions,
        "causal attention needs as many queries as keys": terms.causal and terms.num_queries != terms.num_keys,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return found[0] if found else _why_not_installed(query, key, value, terms.causal)


def cudnn_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"], causal: bool
) -> Float[Array, "B T N Hv"]:
    """softmax(query keyᵀ) value, the query being scaled already."""
    return jax.nn.dot_product_attention(query, key, value, scale=1.0, is_causal=causal, implementation="cudnn")


def _why_not_installed(query: Array, key: Array, value: Array, causal: bool) -> str | None:
    """What JAX says about this GPU's generation and the cuDNN that is installed; traced, not run."""
    try:
        jax.eval_shape(functools.partial(cudnn_attention, causal=causal), query, key, value)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return None
