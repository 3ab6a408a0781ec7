"""The depthwise convolution: a naive loop, padding, segments, pieces of any length, and width 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import DepthwiseConvolution, FeedForward, init_convolution_cache


def _problem(width=3, causal=True):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 5)).astype(np.float32)
    params = {"kernel": rng.normal(size=(width, 5)).astype(np.float32), "bias": np.arange(5, dtype=np.float32)}
    mask = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 1]], bool)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 2]], np.int32)
    return DepthwiseConvolution(width, causal), params, jnp.asarray(x), jnp.asarray(mask), jnp.asarray(segments)


@functools.partial(jax.jit, static_argnums=0)
def _apply(module, params, x, **kwargs):
    return module.apply({"params": params}, x, **kwargs)


@pytest.mark.parametrize(("width", "causal", "before"), [(3, True, 2), (3, False, 1), (4, False, 1)])
def test_equals_a_naive_loop_with_padding_and_segments(width, causal, before):
    module, params, x, mask, segments = _problem(width, causal)
    poisoned = jnp.where(mask[..., None], x, jnp.nan)
    out, _ = _apply(module, params, poisoned, key_mask=mask, segments=segments)
    for b, t in zip(*np.nonzero(mask)):
        expected = np.array(params["bias"])
        for j in range(width):
            s = t + j - before
            if 0 <= s < 7 and mask[b, s] and segments[b, s] == segments[b, t]:
                expected = expected + params["kernel"][j] * x[b, s]
        np.testing.assert_allclose(out[b, t], expected, atol=1e-5)


def test_pieces_equal_the_whole():
    module, params, x, mask, segments = _problem()
    whole, _ = _apply(module, params, x, key_mask=mask, segments=segments)
    one = init_convolution_cache(2, 3, 5, jnp.float32)
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 7]), one)
    pieces = []
    for first, last in [(0, 4), (4, 5), (5, 6), (6, 7)]:
        part = slice(first, last)
        out, cache = _apply(
            module, params, x[:, part], key_mask=mask[:, part], segments=segments[:, part], cache=cache, layer=0
        )
        pieces.append(out)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), whole, atol=1e-6)
    assert (cache.x[1] == 7).all()


def test_width_1_is_a_position_wise_layer():
    """And the position-wise feed-forward layer is two convolutions of width 1."""
    module, _, x, _, _ = _problem(width=1)
    feed_forward = FeedForward(11)
    layout = ("NHC", "HIO", "NHC")

    @jax.jit
    def compare(x):
        mixed, _ = module.apply({"params": {"kernel": jnp.ones((1, 5)), "bias": jnp.zeros(5)}}, x)
        variables = feed_forward.init(jax.random.key(0), x)
        up, down = variables["params"]["up"], variables["params"]["down"]
        hidden = jax.lax.conv_general_dilated(x, up["kernel"][None], (1,), "VALID", dimension_numbers=layout)
        hidden = jax.nn.gelu(hidden + up["bias"][None, None])
        out = jax.lax.conv_general_dilated(hidden, down["kernel"][None], (1,), "VALID", dimension_numbers=layout)
        return mixed, feed_forward.apply(variables, x), out + down["bias"][None, None]

    mixed, out, convolved = compare(x)
    np.testing.assert_array_equal(mixed, x)
    np.testing.assert_allclose(out, convolved, atol=1e-6)


def test_bad_arguments_are_refused():
    module, params, x, _, _ = _problem(causal=False)
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        module.apply({"params": params}, x, cache=init_convolution_cache(2, 3, 5, jnp.float32))
    with pytest.raises(ValueError, match="width=0 must be at least 1"):
        jax.eval_shape(DepthwiseConvolution(0, True).init, jax.random.key(0), x)
