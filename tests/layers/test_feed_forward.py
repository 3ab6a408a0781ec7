"""The feed-forward layer: its formula, its gated forms, and chunks over length that change nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import FeedForward
from jaxformer.layers.feed_forward import dropout_by_position


def _inputs(batch=2, length=11, width=5):
    return jax.random.normal(jax.random.key(3), (batch, length, width))


_init = jax.jit(lambda layer, x: layer.init(jax.random.key(0), x), static_argnums=0)
_apply = jax.jit(lambda layer, *args: layer.apply(*args), static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _gradients(layer, variables, x, deterministic):
    """((_, output), gradients by variables and x)."""

    def loss(variables, x):
        out = layer.apply(variables, x, deterministic=deterministic, rngs={"dropout": jax.random.key(1)})
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)


def _erf_gelu(x):
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def _tanh_gelu(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ORACLES = {
    "relu": lambda gate, up: np.maximum(up, 0.0),
    "gelu": lambda gate, up: _erf_gelu(up),
    "gelu_tanh": lambda gate, up: _tanh_gelu(up),
    "swiglu": lambda gate, up: gate / (1.0 + np.exp(-gate)) * up,
    "geglu": lambda gate, up: _erf_gelu(gate) * up,
    "geglu_tanh": lambda gate, up: _tanh_gelu(gate) * up,
}


@pytest.mark.parametrize("activation", sorted(ORACLES))
def test_output_equals_the_formula(activation):
    x = _inputs()
    layer = FeedForward(mlp_dim=7, activation=activation, kernel_init=jax.nn.initializers.normal(1.0))
    params = _init(layer, x)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    host = jax.tree.map(np.float64, params)
    x64 = np.float64(x)
    up = x64 @ host["up"]["kernel"] + host["up"]["bias"]
    gate = x64 @ host["gate"]["kernel"] + host["gate"]["bias"] if "gate" in host else None
    expected = ORACLES[activation](gate, up) @ host["down"]["kernel"] + host["down"]["bias"]
    np.testing.assert_allclose(_apply(layer, {"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 10])
@pytest.mark.parametrize("deterministic", [True, False])
def test_chunks_change_neither_values_nor_gradients(chunk_size, deterministic):
    x = _inputs()
    options = {"mlp_dim": 7, "dropout_rate": 0.4}
    whole, chunked = FeedForward(**options), FeedForward(**options, chunk_size=chunk_size)
    variables = _init(whole, x)
    (_, expected), expected_grads = _gradients(whole, variables, x, deterministic)
    (_, out), grads = _gradients(chunked, variables, x, deterministic)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_dropout_by_position_scales_what_it_keeps():
    x = jnp.ones((13, 17, 19))
    out = np.asarray(dropout_by_position(jax.random.key(0), x, 0.25))
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    # Four standard deviations of a binomial share.
    assert abs((out == 0).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / out.size)
    tail = dropout_by_position(jax.random.key(0), x[:, 5:], 0.25, start=5)
    np.testing.assert_array_equal(tail, out[:, 5:])


def test_unknown_activation_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"activation='gelou' must be one of .*gelu_tanh"):
        FeedForward(mlp_dim=7, activation="gelou").init(jax.random.key(0), _inputs())


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    x = _inputs().astype(jnp.bfloat16)
    layer = FeedForward(mlp_dim=7, dtype=jnp.bfloat16)
    variables = _init(layer, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    out = _apply(layer, variables, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.float32(out), _apply(FeedForward(mlp_dim=7), variables, x.astype(jnp.float32)), atol=2e-3
    )
