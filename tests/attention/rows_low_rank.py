"""Rows of the kinds that shorten keys and values: by projections over positions and by pooling windows."""

import jax.numpy as jnp
import numpy as np
from contract import Row, dot_products, softmax_over, weighted_values

from jaxformer.attention import ATTENTION


def linformer_oracle(inputs, *, key_mask, causal, **ignored):
    """softmax(Q (E K)^T) (F V) with whole matrices, over the slots that some real key contributes to."""
    del causal
    keys = inputs["key"].shape[1]
    first, second = (
        inputs[name][None, :, :keys] * key_mask[:, None, :] for name in ("key_projection", "value_projection")
    )
    slots = jnp.einsum("brs,bskh->brkh", first, jnp.where(key_mask[:, :, None, None], inputs["key"], 0))
    logits = dot_products(inputs["query"], slots) * inputs["query"].shape[-1] ** -0.5
    seen = ((first != 0) | (second != 0)).any(-1)[:, None, None]
    weights = softmax_over(logits, seen) @ second[:, None]
    return weighted_values(weights, jnp.where(key_mask[:, :, None, None], inputs["value"], 0)), weights


def projections(random, sizes):
    """Two projections that the heads share, longer than any input of the tests."""
    return {
        "key_projection": random.standard_normal((4, 19)).astype(np.float32),
        "value_projection": random.standard_normal((4, 19)).astype(np.float32),
    }


ROWS = {
    "linformer": Row(
        kind=ATTENTION["linformer"],
        variants={"two_projections": {}},
        oracle=linformer_oracle,
        arguments=projections,
        degenerate={},
        degenerate_arguments=lambda random, sizes: {"key_projection": np.eye(19, dtype=np.float32)},
        distribution=False,
    ),
}
