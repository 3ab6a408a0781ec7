"""Noise of minibatch gradients against all minibatches there are, and the noise scale against known distributions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import expected_variance, minibatch_statistics, noise_scale_of_batches, noise_scale_of_examples

EXAMPLES = {
    "x": np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32),
    "y": np.random.default_rng(1).standard_normal(7).astype(np.float32),
}
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.3)}


def loss(params, example):
    return (jnp.tanh(example["x"] @ params["w"] + params["b"]) - example["y"]) ** 2


def example_gradients():
    """float64 [7, 4], by the chain rule written out."""
    x, y = (EXAMPLES[name].astype(np.float64) for name in "xy")
    made = np.tanh(x @ np.asarray(PARAMS["w"], np.float64) + 0.3)
    slope = 2 * (made - y) * (1 - made**2)
    return slope[:, None] * np.concatenate([np.ones((7, 1)), x], 1)


def trace_of(gradients):
    return gradients.var(0, ddof=1).sum()


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_expected_variance_is_that_over_all_minibatches(size, replacement):
    gradients = example_gradients()
    draws = itertools.product(range(7), repeat=size) if replacement else itertools.combinations(range(7), size)
    if replacement and size == 7:
        size, draws = 4, itertools.product(range(7), repeat=4)
    means = np.stack([gradients[list(draw)].mean(0) for draw in draws])
    np.testing.assert_allclose(means.mean(0), gradients.mean(0), atol=1e-12)
    variance = ((means - gradients.mean(0)) ** 2).sum(1).mean()
    wanted = expected_variance(trace_of(gradients), size, 7, replacement=replacement)
    np.testing.assert_allclose(variance, wanted, rtol=1e-10, atol=1e-15)


def test_drawn_minibatches_are_unbiased_with_the_expected_variance():
    found = minibatch_statistics(loss, PARAMS, EXAMPLES, (2, 7), num_draws=500)
    wanted = [expected_variance(trace_of(example_gradients()), size, 7) for size in (2, 7)]
    np.testing.assert_allclose(found.expected_variance, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.variance, wanted, rtol=0.2, atol=1e-6)
    assert np.all(np.asarray(found.bias) <= 3 * np.sqrt(np.asarray(wanted) / 500) + 1e-6)


def test_the_noise_scale_of_examples_is_that_of_their_gradients():
    gradients = example_gradients()
    found = noise_scale_of_examples(loss, PARAMS, EXAMPLES)
    trace = trace_of(gradients)
    squared = (gradients.mean(0) ** 2).sum() - trace / 7
    np.testing.assert_allclose([found.trace, found.squared_gradient], [trace, squared], rtol=1e-4)
    np.testing.assert_allclose(found.noise_scale, trace / squared, rtol=1e-3)


def test_two_batch_sizes_tell_gradient_and_noise_apart():
    """Gradients G + noise of 5 numbers with variance 4 each: |G|² is 5 and the trace is 20."""
    random = np.random.default_rng(0)
    small, big = (1.0 + 2.0 * random.standard_normal((4000, 5)) / np.sqrt(size) for size in (2, 16))
    squares = [(gradients**2).sum(1).astype(np.float32) for gradients in (small, big)]
    found = noise_scale_of_batches(*squares, small_size=2, big_size=16)
    np.testing.assert_allclose(found.squared_gradient, 5.0, rtol=0.05)
    np.testing.assert_allclose(found.trace, 20.0, rtol=0.05)
    np.testing.assert_allclose(found.noise_scale, 4.0, rtol=0.1)
    # Exactly, from expectations: |G|² + trace / size.
    exact = noise_scale_of_batches(jnp.array(15.0), jnp.array(6.25), small_size=2, big_size=16)
    np.testing.assert_allclose(exact, (4.0, 5.0, 20.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise_scale_of_batches(jnp.ones(2), jnp.ones(2), small_size=4, big_size=4), "small_size is 4"),
        (lambda: noise_scale_of_examples(loss, PARAMS, jax.tree.map(lambda leaf: leaf[:1], EXAMPLES)), "at least 2"),
        (lambda: noise_scale_of_examples(loss, PARAMS, {"x": np.ones((3, 2)), "y": np.ones(2)}), "leading axes of"),
        (lambda: minibatch_statistics(loss, PARAMS, EXAMPLES, (8,)), "batch_sizes has 8"),
        (lambda: minibatch_statistics(loss, PARAMS, EXAMPLES, (1,), num_draws=0), "num_draws is 0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
