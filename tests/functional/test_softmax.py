"""Masked softmax against loops in float64, and on rows with nothing to see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer import functional

masked_softmax = jax.jit(functional.masked_softmax, static_argnames="axis")

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def softmax_by_loops(logits, mask):
    """Row by row, over the visible entries only."""
    logits, mask = np.asarray(logits, np.float64), np.broadcast_to(mask, logits.shape)
    weights = np.zeros(logits.shape)
    for row in np.ndindex(logits.shape[:-1]):
        seen = np.flatnonzero(mask[row])
        if seen.size:
            exponentials = np.exp(logits[row][seen] - logits[row][seen].max())
            weights[row][seen] = exponentials / exponentials.sum()
    return weights


@pytest.fixture
def logits(rng):
    return 3 * jax.random.normal(rng, (2, 3, 5, 7))


@pytest.fixture
def mask(rng):
    mask = jax.random.bernoulli(jax.random.fold_in(rng, 1), 0.5, (2, 1, 5, 7))
    return mask.at[1, 0, 2].set(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_sum_over_visible_entries(logits, mask, dtype):
    logits = logits.astype(dtype)
    weights = masked_softmax(logits, mask)
    assert weights.dtype == dtype
    expected = softmax_by_loops(logits.astype(jnp.float32), mask)
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2e-3, jnp.float16: 3e-4}[dtype]
    np.testing.assert_allclose(weights.astype(jnp.float32), expected, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_computed_in_float32_and_rounded_once(logits, mask, dtype):
    logits = logits.astype(dtype)
    expected = masked_softmax(logits.astype(jnp.float32), mask).astype(dtype)
    np.testing.assert_array_equal(masked_softmax(logits, mask), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_nothing_to_see_gives_zeros_and_no_gradient(dtype):
    logits = jnp.ones((2, 3), dtype)
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    value = jnp.arange(12, dtype=dtype).reshape(3, 4)

    def output(logits):
        return masked_softmax(logits, mask) @ value

    np.testing.assert_array_equal(output(logits), [[2, 3, 4, 5], [0, 0, 0, 0]])
    gradient = jax.jit(jax.grad(lambda logits: output(logits).astype(jnp.float32).sum()))(logits)
    assert jnp.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[1], 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_minus_infinity_is_empty_like_a_masked_one(dtype):
    logits = jnp.array([[-jnp.inf, -jnp.inf, -jnp.inf], [-jnp.inf, 2.0, 2.0]], dtype)
    np.testing.assert_array_equal(masked_softmax(logits), [[0, 0, 0], [0, 0.5, 0.5]])
    gradient = jax.grad(lambda logits: masked_softmax(logits).astype(jnp.float32)[:, 1].sum())(logits)
    np.testing.assert_allclose(gradient.astype(jnp.float32), [[0, 0, 0], [0, 0.25, -0.25]])


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_masked_content_reaches_neither_weights_nor_gradients(logits, mask, content):
    def loss(logits):
        return jnp.square(masked_softmax(logits, mask)).sum()

    spoiled = jnp.where(mask, logits, content)
    np.testing.assert_array_equal(masked_softmax(spoiled, mask), masked_softmax(logits, mask))
    np.testing.assert_array_equal(jax.grad(loss)(spoiled), jax.grad(loss)(logits))


def test_every_form_of_a_mask_gives_the_same():
    keys = np.array([[5, 7, 0, 0]]) != 0
    forms = [keys[:, None, None, :], np.broadcast_to(keys[:, None, None, :], (1, 3, 4, 4)), keys[0]]
    for form in forms:
        for mask in (form, form.astype(np.int32), jnp.asarray(form, jnp.uint8)):
            weights = masked_softmax(jnp.zeros((1, 3, 4, 4)), mask)
            np.testing.assert_array_equal(weights, np.broadcast_to([0.5, 0.5, 0, 0], (1, 3, 4, 4)))


def test_any_axis_may_be_normalised(logits):
    transposed = masked_softmax(jnp.swapaxes(logits, 1, -1), axis=1)
    np.testing.assert_allclose(jnp.swapaxes(transposed, 1, -1), masked_softmax(logits), atol=1e-7)
    np.testing.assert_allclose(masked_softmax(logits, axis=2).sum(2), 1, atol=1e-6)


def test_no_entries_at_all_give_no_weights():
    assert masked_softmax(jnp.zeros((2, 3, 0))).shape == (2, 3, 0)


def test_huge_logits_do_not_overflow():
    logits = jnp.array([[3e38, 3e38, -3e38], [65504.0, 65503.0, 0.0]])
    np.testing.assert_allclose(masked_softmax(logits), [[0.5, 0.5, 0], [0.7310586, 0.26894143, 0]], atol=1e-6)


def test_derivatives_of_both_orders_are_right_in_float64(mask):
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(3), (2, 3, 5, 7), jnp.float64)
        assert masked_softmax(logits, mask).dtype == jnp.float64
        np.testing.assert_allclose(masked_softmax(logits, mask), softmax_by_loops(logits, mask), atol=1e-15)
        check_grads(jax.jit(lambda logits: masked_softmax(logits, mask)), (logits,), order=2, atol=1e-7, rtol=1e-7)


def test_jit_and_vmap_change_nothing(logits, mask):
    expected = masked_softmax(logits, mask)
    np.testing.assert_allclose(functional.masked_softmax(logits, mask), expected, atol=1e-7)
    np.testing.assert_allclose(jax.vmap(masked_softmax)(logits, mask), expected, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (3, 2, 3, 5, 7), (2, 3, 5, 1, 7), (2, 7, 1)])
def test_a_mask_that_does_not_fit_is_refused_with_both_shapes(logits, shape):
    with pytest.raises(ValueError) as error:
        functional.masked_softmax(logits, np.ones(shape, bool))
    assert str(shape) in str(error.value)
    assert str(logits.shape) in str(error.value)


@pytest.mark.parametrize(("logits", "message"), [(np.arange(3), "int"), (np.float32(1), "rank 1")])
def test_logits_that_are_no_floating_rows_are_refused(logits, message):
    with pytest.raises(ValueError, match=message):
        functional.masked_softmax(logits)


def test_an_additive_mask_is_refused():
    with pytest.raises(ValueError, match="bias"):
        functional.masked_softmax(jnp.zeros((2, 3)), np.zeros((2, 3), np.float32))
