"""Position features against their formulas, complex numbers and published tables."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer.functional import apply_rotary, sinusoidal_positions


@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_sinusoidal_features_are_their_formula_at_any_width(dim):
    positions = np.array([[0, 1, 2], [7, 100, 513]])
    features = sinusoidal_positions(positions, dim)
    assert features.shape == (2, 3, dim)
    for index in np.ndindex(2, 3):
        for i in range(dim):
            angle = positions[index] / 10_000 ** (2 * (i // 2) / dim)
            expected = math.sin(angle) if i % 2 == 0 else math.cos(angle)
            assert features[*index, i] == pytest.approx(expected, abs=1e-4 if angle > 10 else 1e-6)


def test_sinusoidal_wavelength_is_an_argument():
    features = sinusoidal_positions(np.array([3]), 4, max_wavelength=100.0)
    np.testing.assert_allclose(features, [[np.sin(3), np.cos(3), np.sin(0.3), np.cos(0.3)]], rtol=1e-6)


def test_bfloat16_tells_positions_above_256_apart():
    """bfloat16 rounds 257 to 256 and 259 to 260, so angles from rounded positions would collide."""
    features = sinusoidal_positions(np.array([256, 257, 259]), 6, dtype=jnp.bfloat16)
    assert features.dtype == jnp.bfloat16
    expected = jnp.array([-0.9992080, -0.5733572, math.sin(259)], jnp.bfloat16)
    np.testing.assert_array_equal(features[:, 0], expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rotary_tells_positions_above_256_apart_in_low_precision(rng, dtype):
    x = jax.random.normal(rng, (1, 3, 2, 8)).astype(dtype)
    positions = np.array([[256, 257, 259]])
    rotated = apply_rotary(x, positions)
    assert rotated.dtype == dtype
    np.testing.assert_array_equal(rotated, apply_rotary(x.astype(jnp.float32), positions).astype(dtype))


def test_rotary_multiplies_complex_pairs_by_unit_numbers(rng):
    x = jax.random.normal(rng, (2, 3, 5, 14))
    positions = np.array([[0, 1, 2], [40, 3, 17]])
    expected = np.empty(x.shape)
    for b, t, n in np.ndindex(2, 3, 5):
        for i in range(7):
            turned = complex(x[b, t, n, i], x[b, t, n, i + 7]) * np.exp(1j * positions[b, t] * 500 ** (-2 * i / 14))
            expected[b, t, n, i], expected[b, t, n, i + 7] = turned.real, turned.imag
    np.testing.assert_allclose(apply_rotary(x, positions, base=500.0), expected, atol=1e-5)


def test_rotary_products_depend_on_distance_only(rng):
    """What makes left padding harmless: shifting all positions changes no logit."""
    query, key = (jax.random.normal(k, (2, 5, 3, 8)) for k in jax.random.split(rng))
    positions = np.array([[0, 1, 2, 3, 4], [9, 2, 2, 0, 6]])

    def products(shift):
        rotated = [apply_rotary(x, positions + shift) for x in (query, key)]
        return jnp.einsum("btnh,bsnh->bnts", *rotated)

    np.testing.assert_allclose(products(0), products(37), atol=2e-5)
    assert not np.allclose(products(0), jnp.einsum("btnh,bsnh->bnts", query, key), atol=0.1)


def test_a_left_padded_row_is_rotated_like_the_row_alone(rng):
    x = jax.random.normal(rng, (1, 3, 2, 8))
    padded = jnp.concatenate([jnp.zeros((1, 2, 2, 8)), x], axis=1)
    result = apply_rotary(padded, np.array([[0, 0, 0, 1, 2]]))[:, 2:]
    np.testing.assert_allclose(result, apply_rotary(x, np.array([[0, 1, 2]])), atol=1e-7)


@pytest.mark.parametrize(
    ("head_dim", "fraction", "rotated"), [(8, 0.5, 4), (7, 1.0, 6), (10, 0.25, 2), (12, 0.42, 4), (8, 0.1, 0)]
)
def test_features_beyond_the_rotated_fraction_pass_unchanged(rng, head_dim, fraction, rotated):
    x = jax.random.normal(rng, (2, 3, 5, head_dim))
    positions = np.array([[1, 2, 3]])
    result = apply_rotary(x, positions, fraction=fraction)
    np.testing.assert_array_equal(result[..., rotated:], x[..., rotated:])
    if rotated:
        np.testing.assert_allclose(result[..., :rotated], apply_rotary(x[..., :rotated], positions), atol=1e-6)
        assert not np.isclose(result[..., :rotated], x[..., :rotated]).any(axis=(0, 1, 2)).all()


def test_rotary_has_right_gradients_in_float64():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (1, 3, 2, 6), jnp.float64)
        positions = np.array([[2, 5, 11]])
        assert apply_rotary(x, positions).dtype == jnp.float64
        check_grads(jax.jit(lambda x: apply_rotary(x, positions)), (x,), order=2, atol=1e-7, rtol=1e-7)
        angles = positions[0].astype(float)
        np.testing.assert_allclose(
            sinusoidal_positions(positions, 2, dtype=jnp.float64)[0, :, 0], np.sin(angles), atol=1e-15
        )


def test_jit_and_vmap_change_nothing(rng):
    x, positions = jax.random.normal(rng, (2, 3, 5, 6)), jnp.array([[0, 1, 2], [4, 5, 6]])
    expected = apply_rotary(x, positions)
    np.testing.assert_allclose(jax.jit(apply_rotary)(x, positions), expected, atol=1e-6)
    rows = jax.vmap(lambda x, positions: apply_rotary(x[None], positions[None])[0])(x, positions)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_fractional_positions_are_taken_in_float32():
    np.testing.assert_allclose(sinusoidal_positions(np.array([0.5]), 2), [[np.sin(0.5), np.cos(0.5)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sinusoidal_positions(np.arange(3), 0), "embed_dim is 0"),
        (lambda: sinusoidal_positions(jnp.arange(3, dtype=jnp.bfloat16), 4), "bfloat16, which merges neighbours"),
        (lambda: apply_rotary(jnp.ones((2, 3, 5, 8)), jnp.ones((2, 3), jnp.float16)), "float16, which merges"),
        (lambda: apply_rotary(jnp.ones((2, 3, 8)), np.ones((2, 3), int)), r"x is float32 \(2, 3, 8\)"),
        (lambda: apply_rotary(np.ones((2, 3, 5, 8), int), np.ones((2, 3), int)), "x is int"),
        (lambda: apply_rotary(jnp.ones((2, 3, 5, 8)), np.ones((2, 5), int)), r"positions have shape \(2, 5\)"),
        (lambda: apply_rotary(jnp.ones((2, 3, 5, 8)), np.ones(3, int)), r"positions have shape \(3,\)"),
        (lambda: apply_rotary(jnp.ones((2, 3, 5, 8)), np.ones((2, 3), int), fraction=1.5), "fraction is 1.5"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
