"""Sparse, local and Longformer attention's rows of the contract table: patterns are written out pair by pair."""

import jax.numpy as jnp
import numpy as np
from contract import Row, dense_oracle, dot_products, softmax_over, visible_pairs, weighted_values

from jaxformer.attention import ATTENTION
from jaxformer.attention.patterns import dilated, everything, global_tokens, local, strided

WINDOW_AND_GLOBAL = local((2, 1)) | global_tokens((0, 5))
STRIDED = strided(4)
PER_GROUP = (local((1, 3)), dilated(2, 3), everything())

# Whether token t sees token s, beside the causal rule; one function for each group of heads.
SEES = {
    WINDOW_AND_GLOBAL: [lambda t, s: -1 <= t - s <= 2 or t in (0, 5) or s in (0, 5)],
    STRIDED: [lambda t, s: abs(t - s) < 4 or (t - s) % 4 == 0],
    PER_GROUP: [
        lambda t, s: -3 <= t - s <= 1,
        lambda t, s: t - s in (-6, -3, 0, 3, 6),
        lambda t, s: True,
    ],
    everything(): [lambda t, s: True],
}
GLOBAL = (0, 6)


def pairs(sees, length):
    return np.array([[sees(t, s) for s in range(length)] for t in range(length)], bool).reshape(length, length)


def sparse_oracle(inputs, *, key_mask, causal, pattern):
    length, heads = inputs["query"].shape[1:3]
    groups = SEES[pattern]
    see = np.stack([pairs(sees, length) for sees in groups]).repeat(heads // len(groups), 0)
    return dense_oracle(inputs, key_mask=key_mask, causal=causal, see=see[None])


def local_oracle(inputs, *, key_mask, causal, window):
    before, after = window
    see = pairs(lambda t, s: t - before <= s <= t + after, inputs["query"].shape[1])
    return dense_oracle(inputs, key_mask=key_mask, causal=causal, see=see)


def longformer_oracle(inputs, *, key_mask, causal, window, dilation=1, global_indices=()):
    """Row by row: each with its own projections, over the keys that it sees."""
    length = inputs["query"].shape[1]
    before, after = window
    near = [distance * dilation for distance in range(-after, before + 1)]
    see = pairs(lambda t, s: t - s in near or s in global_indices or t in global_indices, length)
    scale = inputs["query"].shape[-1] ** -0.5
    outputs, weights = [], []
    for row in range(length):
        query, key, value = (
            inputs[f"global_{name}" if row in global_indices else name] for name in ("query", "key", "value")
        )
        seen = visible_pairs(inputs, key_mask, causal)[:, :, row : row + 1] & see[row][None, None, None]
        weights.append(softmax_over(scale * dot_products(query[:, row : row + 1], key), seen))
        outputs.append(weighted_values(weights[-1], value))
    return jnp.concatenate(outputs, 1), jnp.concatenate(weights, 2)


def global_projections(random, sizes):
    def normal(*shape):
        return random.standard_normal((sizes.batch, sizes.keys, *shape)).astype(np.float32)

    return {
        "global_query": normal(sizes.heads, sizes.head_dim),
        "global_key": normal(sizes.kv_heads, sizes.head_dim),
        "global_value": normal(sizes.kv_heads, sizes.value_dim),
    }


ROWS = {
    "sparse": Row(
        kind=ATTENTION["sparse"],
        oracle=sparse_oracle,
        variants={
            "window_and_global": {"pattern": WINDOW_AND_GLOBAL},
            "strided": {"pattern": STRIDED},
            "by_heads": {"pattern": PER_GROUP},
        },
        degenerate={"pattern": everything()},
    ),
    "local": Row(
        kind=ATTENTION["local"],
        oracle=local_oracle,
        variants={"window": {"window": (3, 2)}},
        degenerate={"window": 30},
        lengths=(1, 3, 4, 7, 8, 9),
    ),
    "longformer": Row(
        kind=ATTENTION["longformer"],
        oracle=longformer_oracle,
        variants={"window": {"window": (2, 1), "global_indices": GLOBAL}},
        arguments=global_projections,
        beside={"global_query": "query", "global_key": "key", "global_value": "value"},
        degenerate={"window": 30},
    ),
}
