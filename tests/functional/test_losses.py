"""Cross-entropy against the sum over tokens in float64, and where implementations go wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer import functional
from jaxformer.functional import CrossEntropy, chunked_cross_entropy, mean_loss

cross_entropy = jax.jit(
    functional.cross_entropy, static_argnames=("label_smoothing", "z_loss", "vocab_size", "ignore_label")
)

LABELS = np.array([[0, 6, -100, 3, 2], [4, -100, 1, 6, 5], [-100, 2, 2, 0, 1]])


def sums_by_loops(logits, labels, *, weights=None, label_smoothing=0.0, z_loss=0.0, vocab_size=None):
    """The definition, one token after the other."""
    loss = count = correct = z = 0.0
    for token in np.ndindex(labels.shape):
        if labels[token] == -100:
            continue
        row = np.asarray(logits[token], np.float64)[:vocab_size]
        normaliser = np.log(np.exp(row - row.max()).sum()) + row.max()
        target = np.full(row.size, label_smoothing / row.size)
        target[labels[token]] += 1 - label_smoothing
        weight = 1.0 if weights is None else weights[token]
        loss += weight * (target * (normaliser - row)).sum()
        count += weight
        correct += weight * (row.argmax() == labels[token])
        z += weight * z_loss * normaliser**2
    return CrossEntropy(loss, count, correct, z)


def mean_of_all(sums):
    return mean_loss(sums.loss_sum + sums.z_loss_sum, sums.weight_sum)


@functools.partial(jax.jit, static_argnames="vocab_size")
def gradient_of_mean(logits, labels, weights=None, vocab_size=None):
    """(sums, gradient of the mean of all by the logits)."""

    def loss(logits):
        options = {"weights": weights, "label_smoothing": 0.1, "z_loss": 1e-2, "vocab_size": vocab_size}
        sums = cross_entropy(logits, labels, **options)
        return mean_of_all(sums), sums

    gradient, sums = jax.grad(loss, has_aux=True)(logits)
    return sums, gradient


@pytest.fixture
def logits(rng):
    return 2 * jax.random.normal(rng, (3, 5, 7))


@pytest.fixture
def weights(rng):
    return np.asarray(jax.random.uniform(rng, LABELS.shape))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_the_definition(logits, weights, weighted, label_smoothing):
    options = {"weights": weights if weighted else None, "label_smoothing": label_smoothing, "z_loss": 1e-2}
    sums = cross_entropy(logits, LABELS, **options)
    for name, value, expected in zip(sums._fields, sums, sums_by_loops(logits, LABELS, **options)):
        assert value.shape == ()
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=name)


def test_gradient_is_probability_minus_target(logits):
    gradient = jax.jit(jax.grad(lambda logits: cross_entropy(logits, LABELS).loss_sum))(logits)
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(LABELS, 7)
    np.testing.assert_allclose(gradient, jnp.where((LABELS == -100)[..., None], 0, expected), atol=1e-6)


def test_gradients_of_everything_are_right_in_float64(weights):
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(1), (3, 5, 7), jnp.float64)

        def loss(logits, weights):
            options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": 7}
            return mean_of_all(cross_entropy(logits, LABELS, weights=weights, **options))

        assert loss(logits, jnp.asarray(weights, jnp.float64)).dtype == jnp.float64
        check_grads(jax.jit(loss), (logits, jnp.asarray(weights, jnp.float64)), order=2, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_are_summed_in_float32(logits, dtype):
    logits = logits.astype(dtype)

    def loss(logits):
        sums = cross_entropy(logits, LABELS, label_smoothing=0.1)
        assert sums.loss_sum.dtype == jnp.float32
        return sums.loss_sum

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(logits.astype(jnp.float32))
    assert gradient.dtype == dtype
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(
        gradient.astype(jnp.float32), expected_gradient, atol=8e-3 if dtype == jnp.bfloat16 else 1e-3
    )


def test_huge_logits_neither_overflow_nor_lose_the_difference():
    logits = jnp.array([[1e8, 0.0], [3e38, -3e38], [10_000.0, 9_999.0]])
    gradient = jax.grad(lambda logits: cross_entropy(logits, np.array([0, 0, 1])).loss_sum)(logits)
    np.testing.assert_allclose(cross_entropy(logits, np.array([0, 0, 1])).loss_sum, 1.3132617, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, 0], [0, 0], [0.7310586, -0.7310586]], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("loss_function", ["whole", "chunked"])
def test_no_supervised_token_gives_loss_zero_and_no_gradient(dtype, loss_function):
    labels = np.full((2, 3), -100)

    def loss(hidden, kernel):
        if loss_function == "whole":
            sums = cross_entropy(hidden @ kernel, labels, label_smoothing=0.1, z_loss=1e-4)
        else:
            sums = chunked_cross_entropy(hidden, kernel, labels, chunk_size=4, label_smoothing=0.1, z_loss=1e-4)
        return mean_of_all(sums), sums

    hidden, kernel = jnp.ones((2, 3, 5), dtype), jnp.ones((5, 7), dtype)
    (value, sums), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, kernel)
    assert [float(value), *map(float, sums)] == [0, 0, 0, 0, 0]
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


def test_a_batch_without_supervision_adds_nothing_to_another(logits):
    empty = cross_entropy(logits[:1], np.full((1, 5), -100))
    alone = cross_entropy(logits[1:], LABELS[1:])
    both = jax.tree.map(jnp.add, empty, alone)
    assert float(mean_of_all(both)) == float(mean_of_all(alone))


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("way", ["ignored", "weight 0"])
def test_content_of_unsupervised_tokens_reaches_nothing(logits, content, way):
    unsupervised = LABELS == -100
    labels = LABELS if way == "ignored" else np.where(unsupervised, 5, LABELS)
    weights = None if way == "ignored" else (~unsupervised).astype(np.float32)

    spoiled = np.where(unsupervised[..., None], np.float32(content), logits)
    sums, gradient = gradient_of_mean(spoiled, labels, weights)
    expected, expected_gradient = gradient_of_mean(logits, labels, weights)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_any_label_may_mean_ignored(logits):
    expected = cross_entropy(logits, LABELS)
    for ignore_label in (-1, 7, 255):
        labels = np.where(LABELS == -100, ignore_label, LABELS)
        np.testing.assert_array_equal(cross_entropy(logits, labels, ignore_label=ignore_label), expected)
    labels = np.where(LABELS == -100, 0, LABELS)
    counted = float(cross_entropy(logits, labels, ignore_label=0).weight_sum)
    assert counted == (labels != 0).sum()


@pytest.mark.parametrize("label", [7, 5, -1, -7, 10**6])
def test_a_label_out_of_range_gives_nan_not_another_tokens_loss(logits, label):
    labels = LABELS.copy()
    labels[1, 2] = label
    vocab_size = 5 if label == 5 else None
    assert jnp.isnan(cross_entropy(logits, labels, vocab_size=vocab_size).loss_sum)


def test_padded_vocabulary_takes_no_part():
    """Five real tokens padded to eight: a uniform guess costs ln 5, not ln 8."""
    labels = np.array([[0, 4, 2]])
    for smoothing in (0.0, 0.2):
        sums = cross_entropy(jnp.zeros((1, 3, 8)), labels, vocab_size=5, label_smoothing=smoothing)
        np.testing.assert_allclose(sums.loss_sum / 3, 1.6094379, rtol=1e-6)


@pytest.mark.parametrize("content", [0.0, 50.0, np.nan, np.inf, -np.inf])
def test_content_of_padded_columns_reaches_nothing(logits, content):
    padded = np.concatenate([logits, np.full((3, 5, 4), content, np.float32)], axis=-1)
    sums, gradient = gradient_of_mean(padded, LABELS, vocab_size=7)
    expected, expected_gradient = gradient_of_mean(logits, LABELS)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient[..., :7], expected_gradient, atol=1e-7)
    np.testing.assert_array_equal(gradient[..., 7:], 0)


def test_of_equal_logits_the_first_counts_as_the_guess():
    logits = jnp.array([[2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert cross_entropy(logits, np.array([0, 1, 0, 2])).num_correct == 2


def test_perplexity_comes_from_sums_over_all_batches():
    """Four tokens at nll ln 2 and one at ln 8; averaging batches would give 4 or 5."""
    uniform_2 = cross_entropy(jnp.zeros((4, 2)), np.array([0, 1, 1, 0]))
    uniform_8 = cross_entropy(jnp.zeros((1, 8)), np.array([6]))
    total = jax.tree.map(jnp.add, uniform_2, uniform_8)
    np.testing.assert_allclose(jnp.exp(mean_loss(total.loss_sum, total.weight_sum)), 2.6390158, rtol=1e-6)


def test_uneven_batches_add_up_to_the_whole(logits):
    parts = [cross_entropy(logits[i : i + 1], LABELS[i : i + 1]) for i in range(3)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    np.testing.assert_allclose(jnp.stack(total), jnp.stack(cross_entropy(logits, LABELS)), rtol=1e-6)


def test_jit_and_vmap_change_nothing(logits):
    expected = functional.cross_entropy(logits, LABELS)
    rows = jax.vmap(functional.cross_entropy)(logits, jnp.asarray(LABELS))
    for sums in (cross_entropy(logits, LABELS), jax.tree.map(jnp.sum, rows)):
        np.testing.assert_allclose(jnp.stack(sums), jnp.stack(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": np.ones((2, 3, 7), int)}, "logits is int"),
        ({"labels": np.ones((2, 3), np.float32)}, "labels is float32"),
        ({"labels": np.ones((2, 4), int)}, r"labels have shape \(2, 4\); they must be \(2, 3\)"),
        ({"weights": np.ones(3)}, r"weights have shape \(3,\); they must be \(2, 3\)"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"vocab_size": 8}, "vocab_size is 8"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    defaults = {"logits": np.ones((2, 3, 7), np.float32), "labels": np.ones((2, 3), int)}
    with pytest.raises(ValueError, match=message):
        functional.cross_entropy(**(defaults | arguments))
