"""Batch normalisation against a loop over tokens in float64, with padding that is not in the statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer.functional import BatchStatistics, batch_norm, batch_statistics, update_running

EPSILON = 1e-3
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


def statistics_in_float64(x, mask):
    """Mean and biased variance of each feature, token by token."""
    tokens = [np.asarray(x, np.float64)[place] for place in zip(*np.nonzero(mask))]
    mean = sum(tokens) / len(tokens)
    return mean, sum((token - mean) ** 2 for token in tokens) / len(tokens)


@functools.partial(jax.jit, static_argnames="masked")
def train(x, scale, bias, mask, masked=True):
    """Normalised by its own statistics, as in training."""
    mask = mask if masked else None
    statistics = batch_statistics(x, mask=mask)
    mean, variance, _ = statistics
    y = batch_norm(x, scale, bias, mean=mean, variance=variance, mask=mask, epsilon=EPSILON)
    return y, statistics


@pytest.fixture
def x(rng):
    return 3 * jax.random.normal(rng, (3, 5, 7)) + 2


@pytest.fixture
def scale(rng):
    return jax.random.normal(jax.random.fold_in(rng, 1), (7,))


@pytest.fixture
def bias(rng):
    return jax.random.normal(jax.random.fold_in(rng, 2), (7,))


@pytest.mark.parametrize("masked", [True, False])
def test_training_is_algorithm_1_over_the_real_tokens(x, scale, bias, masked):
    mask = MASK if masked else np.ones_like(MASK)
    mean, variance = statistics_in_float64(x, mask)
    y, found = train(x, scale, bias, jnp.asarray(MASK), masked=masked)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-5)
    assert found.num_tokens == mask.sum()
    wanted = (np.float64(x) - mean) / np.sqrt(variance + EPSILON) * np.float64(scale) + np.float64(bias)
    np.testing.assert_allclose(y, np.where(mask[..., None], wanted, 0.0), atol=1e-5)


def test_running_averages_by_hand():
    """Kept share 0.9; the variance that enters is 3/2 times the biased one of three tokens."""
    statistics = BatchStatistics(jnp.array([4.0]), jnp.array([2.0]), jnp.array(3))
    mean, variance = update_running(np.float32([1.0]), np.float32([1.0]), statistics, momentum=0.9)
    np.testing.assert_allclose(mean, [0.9 * 1 + 0.1 * 4], rtol=1e-6)
    np.testing.assert_allclose(variance, [0.9 * 1 + 0.1 * 3], rtol=1e-6)
    single = BatchStatistics(jnp.array([4.0]), jnp.array([0.0]), jnp.array(1))
    assert np.isfinite(update_running(mean, variance, single)[1]).all()


def test_running_averages_approach_the_statistics_of_the_population(rng):
    """Unbiased: means over many small batches are those of the distribution, mean 2 and variance 9."""
    draws = 2 + 3 * jax.random.normal(rng, (4000, 1, 3, 1))

    def body(running, x):
        return update_running(*running, batch_statistics(x), momentum=0.999), None

    (mean, variance), _ = jax.jit(lambda x: jax.lax.scan(body, (jnp.zeros(1), jnp.ones(1)), x))(draws)
    np.testing.assert_allclose(mean, 2, atol=0.3)
    np.testing.assert_allclose(variance, 9, atol=0.8)  # the biased variance would tend to 6


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
def loss(x, scale, bias, mask):
    y, statistics = train(x, scale, bias, mask)
    return (jnp.sin(y) * jnp.cos(jnp.arange(7.0))[None, None]).sum(), (y, statistics)


@pytest.mark.parametrize("garbage", [0.0, 1e30, np.nan, np.inf])
def test_padding_changes_nothing(x, scale, bias, garbage):
    """Neither values nor statistics nor gradients, whatever stands in it, be it two columns and a row more."""
    (_, (y, statistics)), gradients = loss(x, scale, bias, jnp.asarray(MASK))
    padded = jnp.where(MASK[..., None], x, garbage)
    padded = jnp.pad(padded, ((0, 1), (0, 2), (0, 0)), constant_values=garbage)
    (_, (more, found)), found_gradients = loss(padded, scale, bias, jnp.pad(jnp.asarray(MASK), ((0, 1), (0, 2))))
    np.testing.assert_allclose(more[:3, :5], y, rtol=1e-5, atol=1e-6)
    assert not more[3:].any()
    assert not more[:, 5:].any()
    assert found.num_tokens == statistics.num_tokens
    np.testing.assert_allclose(found.mean, statistics.mean, rtol=1e-5)
    np.testing.assert_allclose(found.variance, statistics.variance, rtol=1e-5)
    np.testing.assert_allclose(found_gradients[0][:3, :5], gradients[0], rtol=1e-4, atol=1e-6)
    assert not found_gradients[0][:, 5:].any()
    for one, other in zip(found_gradients[1:], gradients[1:]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_without_tokens_gives_zeros_no_nan_and_leaves_the_averages(x, scale, bias):
    nothing = jnp.zeros((3, 5), bool)
    (_, (y, statistics)), gradients = loss(jnp.full_like(x, jnp.nan), scale, bias, nothing)
    assert not y.any()
    assert not any(gradient.any() for gradient in gradients)
    before = jnp.float32([1.25] * 7), jnp.float32([3.5] * 7)
    for old, new in zip(before, update_running(*before, statistics)):
        np.testing.assert_array_equal(new, old)


def test_gradients_pass_through_the_statistics():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(5), 3)
        x, scale, bias = (jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, ((3, 5, 7), (7,), (7,))))
        call = jax.jit(lambda x, scale, bias: train(x, scale, bias, jnp.asarray(MASK))[0])
        assert call(x, scale, bias).dtype == jnp.float64
        check_grads(call, (x, scale, bias), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_no_gradient_enters_the_averages(x):
    def moved(x):
        return sum(part.sum() for part in update_running(jnp.zeros(7), jnp.ones(7), batch_statistics(x)))

    assert not jax.jit(jax.grad(moved))(x).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_computed_in_float32_and_rounded_once(x, scale, bias, dtype):
    x = x.astype(dtype)
    y, statistics = train(x, scale, bias, jnp.asarray(MASK))
    wanted, wanted_statistics = train(x.astype(jnp.float32), scale, bias, jnp.asarray(MASK))
    assert y.dtype == dtype
    assert statistics.mean.dtype == statistics.variance.dtype == jnp.float32
    np.testing.assert_allclose(statistics.variance, wanted_statistics.variance, rtol=1e-6)
    np.testing.assert_array_equal(y, wanted.astype(dtype))


def test_a_mean_far_above_the_deviation_keeps_its_digits(rng):
    x = 1000 + jax.random.normal(rng, (3, 257, 2))
    mean, variance = statistics_in_float64(x, np.ones((3, 257), bool))
    found = batch_statistics(x)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: batch_statistics(x[0, 0]), "x is float32 .* rank 2 or more"),
        (lambda x: batch_statistics(x, mask=np.ones((3, 4), bool)), r"mask has shape \(3, 4\); it must be \(3, 5\)"),
        (lambda x: batch_statistics(x, mask=np.ones((3, 5), np.float32)), "mask"),
        (lambda x: batch_norm(x, mean=np.ones(7, np.float32), variance=np.ones(3, np.float32)), "variance has shape"),
        (lambda x: batch_norm(x, np.ones(7, int), mean=x[0, 0], variance=x[0, 0]), "scale is int"),
        (lambda x: update_running(x[0, 0], x[0, 0], batch_statistics(x), momentum=1.5), r"momentum=1.5 must be in"),
        (lambda x: update_running(x[0], x[0, 0], batch_statistics(x)), r"mean has shape \(5, 7\); it must be \(7,\)"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((3, 5, 7), np.float32))
