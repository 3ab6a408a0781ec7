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
        "key_projection": random.standard_normal((4, 33)).astype(np.float32),
        "value_projection": random.standard_normal((4, 33)).astype(np.float32),
    }


def compressed_oracle(inputs, *, key_mask, causal, stride, window_size=None, recent=True):
    """Slots and tokens side by side in one matrix, with who sees what asked of every pair."""
    size = window_size or stride
    queries, keys = inputs["query"].shape[1], inputs["key"].shape[1]
    slots = -(-keys // stride)
    holds = np.array([[c * stride <= s < c * stride + size for s in range(keys)] for c in range(slots)])
    holds = holds.reshape(1, slots, keys) & key_mask[:, None]
    sees = np.zeros((queries, slots + keys), bool)
    for t in range(queries):
        position, covered = keys - queries + t, 0
        for c in range(slots):
            last = c * stride + size - 1
            sees[t, c] = not causal or (last < position if recent else last <= position)
            covered = last + 1 if sees[t, c] else covered
        if causal and recent:
            sees[t, slots + covered : slots + position + 1] = True
    exists = jnp.concatenate([holds.any(-1), key_mask], -1)

    def pooled(name):
        array = jnp.where(key_mask[:, :, None, None], inputs[name], 0)
        kernel = inputs.get(f"{name}_kernel")
        if kernel is None:
            kernel = jnp.ones((size, 1))
            counts = holds.sum(-1)[:, :, None, None]
        else:
            kernel, counts = kernel.reshape(size, -1), jnp.ones((1, 1, 1, 1))
        place = np.clip(np.arange(keys)[None] - stride * np.arange(slots)[:, None], 0, size - 1)
        return jnp.einsum("bcs,bskh,csh->bckh", holds, array, kernel[place]) / jnp.where(counts == 0, 1, counts)

    both = {name: jnp.concatenate([pooled(name), inputs[name]], 1) for name in ("key", "value")}
    logits = dot_products(inputs["query"], both["key"]) * inputs["query"].shape[-1] ** -0.5
    weights = softmax_over(logits, sees[None, None] & exists[:, None, None])
    output = weighted_values(weights, jnp.where(exists[:, :, None, None], both["value"], 0))
    # What each slot is made of: the tokens' unit vectors, pooled.
    inputs = {**inputs, "value": jnp.broadcast_to(jnp.eye(keys)[None, :, None], (len(key_mask), keys, 1, keys))}
    return output, weights[..., :slots] @ pooled("value")[:, None, :, 0] + weights[..., slots:]


def kernels(random, sizes):
    """Convolutions of five tokens: one weight a channel for keys, one in all for values."""
    return {
        "key_kernel": random.standard_normal((5, sizes.head_dim)).astype(np.float32),
        "value_kernel": random.standard_normal(5).astype(np.float32),
    }


ROWS = {
    "compressed": Row(
        kind=ATTENTION["compressed"],
        variants={"means": {"stride": 3}, "slots_alone": {"stride": 2, "window_size": 3, "recent": False}},
        oracle=compressed_oracle,
        degenerate={"stride": 1},
    ),
    "compressed_kernels": Row(
        kind=ATTENTION["compressed"],
        variants={"overlapping": {"stride": 2, "window_size": 5}},
        oracle=compressed_oracle,
        arguments=kernels,
        distribution=False,
    ),
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
