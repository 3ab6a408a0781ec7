"""The weights that a layer reports, for every attention of the catalogue: what it attends to is their sum of values."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.layers import MultiHeadAttention
from jaxformer.models.attention_choice import choose_attention

LENGTH, HEADS, HEAD_DIM = 23, 2, 7
ARGS = {
    "bigbird": {"block_size": 3, "num_random": 1, "seed": 0, "num_blocks": 8},
    "clustered": {"num_clusters": 4},
    "compressed": {"stride": 3},
    "dilated": {"window": 2, "dilation": 3},
    "fixed": {"stride": 4, "num_summary": 1},
    "global_tokens": {"indices": (0, 1)},
    "linformer": {"rank": 5},
    "local": {"window": 5},
    "longformer": {"window": 4, "global_indices": (0,)},
    "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 5},
    "performer": {"num_features": 16},
    "random_blocks": {"num": 2, "seed": 0, "block_size": 4},
    "routing": {"num_clusters": 3, "window": 8},
    "sinkhorn": {"block_size": 4},
    "strided": {"stride": 4},
}
NAMES = sorted({*ATTENTION, *PATTERNS} - {"sparse"})
# Every run tests a window, buckets and features; the rest take most of a minute.
QUICK = ("linear", "local", "lsh")


def summed(weights, value):
    """Weights [B, N, T, S] times values [B, S, N * H], heads side by side."""
    by_heads = value.reshape(*value.shape[:2], HEADS, HEAD_DIM)
    return jnp.einsum("bnts,bsnh->btnh", weights, by_heads).reshape(value.shape)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_weights_are_those_by_which_values_are_summed(name):
    choice = choose_attention(name, tuple(sorted(ARGS.get(name, {}).items())))
    layer = MultiHeadAttention(
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        attention=choice.kind,
        attention_args=choice.args,
        use_bias=False,
        max_length=LENGTH,
        kernel_init=nn.initializers.normal(0.5),
    )
    width = HEADS * HEAD_DIM
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, width)), jnp.float32)
    key_mask = jnp.arange(LENGTH)[None] < jnp.array([[LENGTH], [19]])

    @functools.partial(jax.jit, static_argnames="causal")
    def run(causal):
        variables = layer.init(jax.random.key(1), x)
        variables = {**variables, "params": {**variables["params"], "out": {"kernel": jnp.eye(width)}}}
        made = layer.apply(variables, x, causal=causal, key_mask=key_mask, return_weights=True)
        value = x @ variables["params"]["value"]["kernel"]
        expected = summed(made.weights, value)
        if name == "longformer":  # tokens that see all have values of their own
            own = variables["params"]["arguments"]["global_value"]["kernel"]
            expected = expected.at[:, 0].set(summed(made.weights, x @ own)[:, 0])
        return made.output, expected

    ways = [causal for causal, can in ((True, choice.causal), (False, choice.bidirectional)) if can]
    for causal in ways if name not in QUICK else ways[:1]:
        output, expected = run(causal)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(output, expected, atol=2e-5)
