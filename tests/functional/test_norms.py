"""Norms against float64 formulas, where float32 statistics go wrong most easily."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer.functional import layer_norm, rms_norm

EPSILON = 1e-5


def layer_norm_in_float64(x, scale=1.0, bias=0.0):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * np.asarray(scale) + np.asarray(bias)


def rms_norm_in_float64(x, scale=1.0):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * np.asarray(scale)


@pytest.fixture
def x(rng):
    return 2 * jax.random.normal(rng, (2, 3, 11)) + 1


@pytest.fixture
def scale(rng):
    return jax.random.normal(jax.random.fold_in(rng, 1), (11,))


@pytest.fixture
def bias(rng):
    return jax.random.normal(jax.random.fold_in(rng, 2), (11,))


def test_layer_norm_is_its_formula(x, scale, bias):
    result = layer_norm(x, scale, bias, epsilon=EPSILON)
    np.testing.assert_allclose(result, layer_norm_in_float64(x, scale, bias), atol=2e-6)
    np.testing.assert_allclose(layer_norm(x, epsilon=EPSILON), layer_norm_in_float64(x), atol=2e-6)
    np.testing.assert_allclose(layer_norm(x, None, bias, epsilon=EPSILON), layer_norm_in_float64(x, 1, bias), atol=2e-6)


def test_rms_norm_is_its_formula(x, scale):
    np.testing.assert_allclose(rms_norm(x, scale, epsilon=EPSILON), rms_norm_in_float64(x, scale), atol=2e-6)
    np.testing.assert_allclose(rms_norm(x, epsilon=EPSILON), rms_norm_in_float64(x), atol=2e-6)


def test_a_mean_far_above_the_deviation_keeps_its_digits(rng):
    # Mean square minus squared mean would be off by about 6 % here.
    x = 1000 + jax.random.normal(rng, (5, 257))
    np.testing.assert_allclose(layer_norm(x, epsilon=EPSILON), layer_norm_in_float64(x), atol=5e-4)
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(layer_norm(x, epsilon=EPSILON)).sum()))
    np.testing.assert_allclose(gradient(x), gradient(x - 1000), atol=5e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_low_precision_is_computed_in_float32_and_rounded_once(x, scale, dtype, norm):
    x = x.astype(dtype)
    result = norm(x, scale, epsilon=EPSILON)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, norm(x.astype(jnp.float32), scale, epsilon=EPSILON).astype(dtype))


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_squares_do_not_overflow_in_float16(norm):
    x = jnp.array([[60000.0, -60000.0, 60000.0, -60000.0]], jnp.float16)
    np.testing.assert_allclose(norm(x).astype(jnp.float32), [[1, -1, 1, -1]])


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_constant_and_zero_rows_have_finite_values_and_gradients(norm):
    x = jnp.array([[0.0] * 5, [7.0] * 5])

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(x):
        result = norm(x, epsilon=1e-12)
        return (result * jnp.arange(5.0)[None]).sum(), result

    gradient, result = run(x)
    assert np.isfinite(result).all()
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(result[0], 0)


def test_gradients_are_right_in_float64():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(5), 3)
        x, scale, bias = (jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, ((3, 7), (7,), (7,))))
        assert layer_norm(x, scale, bias).dtype == jnp.float64
        check_grads(jax.jit(layer_norm), (x, scale, bias), order=1, atol=1e-6, rtol=1e-6)
        check_grads(jax.jit(rms_norm), (x, scale), order=1, atol=1e-6, rtol=1e-6)


def test_jit_and_vmap_change_nothing(x, scale, bias):
    expected = layer_norm(x, scale, bias)
    np.testing.assert_allclose(jax.jit(layer_norm)(x, scale, bias), expected, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(layer_norm, (0, None, None))(x, scale, bias), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(np.ones((2, 3), int)), "x is int"),
        (lambda: rms_norm(np.float32(1)), "rank 1"),
        (lambda: layer_norm(np.ones((2, 3), np.float32), np.ones(2)), r"scale has shape \(2,\); it must be \(3,\)"),
        (lambda: layer_norm(np.ones((2, 3), np.float32), None, np.ones((1, 3))), r"bias has shape \(1, 3\)"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
