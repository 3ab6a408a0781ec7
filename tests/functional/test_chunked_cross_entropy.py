"""The chunked loss is the whole one, without the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer.functional import chunked_cross_entropy, cross_entropy, mean_loss

LABELS = np.array([[0, 6, -100, 3, 2], [4, -100, 1, 6, 5], [-100, 2, 2, 0, 1]])
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "vocab_size": 7}


@pytest.fixture
def hidden(rng):
    return jax.random.normal(rng, (3, 5, 4))


@pytest.fixture
def kernel(rng):
    return jax.random.normal(jax.random.fold_in(rng, 1), (4, 11))


def mean_of(sums):
    return mean_loss(sums.loss_sum + sums.z_loss_sum, sums.weight_sum), sums


def whole(hidden, kernel, weights=None):
    logits = jnp.einsum("...d,dv->...v", hidden, kernel)
    return mean_of(cross_entropy(logits, LABELS, weights=weights, **OPTIONS))


def chunked(hidden, kernel, weights=None, chunk_size=4):
    return mean_of(chunked_cross_entropy(hidden, kernel, LABELS, weights=weights, chunk_size=chunk_size, **OPTIONS))


whole_gradients = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))
chunked_gradients = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True), static_argnums=3)


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 15, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients_are_those_of_the_whole_logits(rng, hidden, kernel, chunk_size, weighted):
    weights = jax.random.uniform(rng, LABELS.shape) if weighted else None
    (_, sums), gradients = chunked_gradients(hidden, kernel, weights, chunk_size)
    (_, expected), expected_gradients = whole_gradients(hidden, kernel, weights)
    np.testing.assert_allclose(jnp.stack(sums), jnp.stack(expected), rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def test_gradients_are_right_in_float64():
    with jax.enable_x64(True):
        hidden, kernel = (jax.random.normal(jax.random.key(1), shape, jnp.float64) for shape in ((3, 5, 4), (4, 11)))
        check_grads(jax.jit(lambda *args: chunked(*args)[0]), (hidden, kernel), order=1, atol=1e-6, rtol=1e-6)


def test_nan_at_unsupervised_tokens_reaches_neither_gradient(hidden, kernel):
    spoiled = jnp.where((LABELS == -100)[..., None], jnp.nan, hidden)
    gradients = chunked_gradients(spoiled, kernel)[1]
    expected = chunked_gradients(hidden, kernel)[1]
    for gradient, expected_gradient in zip(gradients, expected):
        np.testing.assert_array_equal(gradient, expected_gradient)


def test_bfloat16_hidden_gives_the_kernel_its_float32_gradient(hidden, kernel):
    hidden = hidden.astype(jnp.bfloat16)
    (value, _), gradients = chunked_gradients(hidden, kernel)
    (expected, _), expected_gradients = whole_gradients(
        hidden.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient.astype(jnp.float32), expected_gradient, atol=5e-3)


def test_memory_is_that_of_one_chunk():
    tokens, vocabulary, chunk_size = 512, 2048, 32
    shapes = ((tokens, 8), (8, vocabulary), (tokens,))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, (jnp.float32, jnp.float32, jnp.int32))]

    def temporaries(loss):
        compiled = jax.jit(jax.grad(lambda *args: loss(*args).loss_sum, (0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits_bytes = 4 * tokens * vocabulary
    assert temporaries(lambda hidden, kernel, labels: cross_entropy(hidden @ kernel, labels)) >= logits_bytes
    assert temporaries(lambda *args: chunked_cross_entropy(*args, chunk_size=chunk_size)) < logits_bytes / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": np.ones((11, 4), np.float32)}, r"kernel has shape \(11, 4\); it must be \[4, V\]"),
        ({"kernel": np.ones((4, 11), int)}, "kernel is int"),
        ({"hidden": np.ones((3, 5, 4), int)}, "hidden is int"),
        ({"labels": np.ones((5, 3), int)}, r"labels have shape \(5, 3\)"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"vocab_size": 12}, "vocab_size is 12"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    defaults = {
        "hidden": np.ones((3, 5, 4), np.float32),
        "kernel": np.ones((4, 11), np.float32),
        "labels": LABELS,
        "chunk_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**(defaults | arguments))
