"""Objectives of fine-tuning, of a model that is a table, against loops over what has a label."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.objectives import OBJECTIVES

DRAW = np.random.default_rng(0)


class Given(nn.Module):
    """Its output is its parameter, whatever it reads; one auxiliary loss of 2 is a product with another."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        logits = self.param("logits", nn.initializers.zeros, self.shape)
        scale = self.param("scale", nn.initializers.ones, ())
        return SimpleNamespace(logits=logits, aux=SimpleNamespace(losses={"extra": 2.0 * scale}, metrics={}))


def run(task, logits, batch, deterministic=False, **options):
    """The output of an objective, and the gradient with respect to the logits."""
    logits = jnp.asarray(logits, jnp.float32)
    batch = {"tokens": jnp.zeros((logits.shape[0], 1), jnp.int32), **{k: jnp.asarray(v) for k, v in batch.items()}}

    def loss(logits):
        params = {"logits": logits, "scale": jnp.ones(())}
        output = OBJECTIVES[task](Given(logits.shape), params, {}, batch, deterministic=deterministic, **options)
        return output.loss_sum, output

    gradient, output = jax.grad(loss, has_aux=True)(logits)
    return output, np.asarray(gradient)


def log_softmax(row):
    return row - np.log(np.exp(row).sum())


def softmax(row):
    return np.exp(row) / np.exp(row).sum()


def figures(output):
    return {name: (float(total), float(count)) for name, (total, count) in output.metrics.items()}


def test_classification_sums_over_rows_with_a_label():
    logits, labels = DRAW.normal(size=(4, 3)), [2, -100, 0, 1]
    output, gradient = run("classification", logits, {"labels": labels}, deterministic=True)
    rows = [(row, label) for row, label in enumerate(labels) if label >= 0]
    assert float(output.loss_sum) == pytest.approx(-sum(log_softmax(logits[row])[label] for row, label in rows))
    assert float(output.weight_sum) == 3
    assert figures(output)["accuracy"] == (sum(logits[row].argmax() == label for row, label in rows), 3)
    expected = np.zeros_like(logits)
    for row, label in rows:
        expected[row] = softmax(logits[row]) - np.eye(3)[label]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_training_adds_the_models_own_losses_times_what_is_supervised():
    logits, batch = DRAW.normal(size=(2, 3)), {"labels": [2, 0]}
    plain, _ = run("classification", logits, batch, deterministic=True)
    weighted, _ = run("classification", logits, batch, loss_weights={"extra": 0.25})
    assert float(weighted.loss_sum) == pytest.approx(float(plain.loss_sum) + 2 * 0.25 * 2.0)
    assert figures(plain)["extra"] == (4.0, 2.0)


def test_regression_is_the_squared_error_of_rows_with_a_number():
    numbers, labels = np.array([1.5, np.nan, -2.0]), np.array([1.0, 7.0, 0.5], np.float32)
    batch = {"labels": labels, "label_mask": [True, False, True]}
    output, gradient = run("regression", numbers, batch, deterministic=True)
    assert float(output.loss_sum) == pytest.approx(0.25 + 6.25)
    assert float(output.weight_sum) == 2
    assert figures(output)["absolute_error"] == (3.0, 2.0)
    np.testing.assert_allclose(gradient, [1.0, 0.0, -5.0])


@pytest.mark.parametrize("task", ["tagging", "answer_tokens"])
def test_classes_of_tokens_sum_over_those_with_a_target(task):
    logits, targets = DRAW.normal(size=(2, 3, 3)), np.array([[-100, 1, 2], [0, -100, 2]])
    output, gradient = run(task, logits, {"targets": targets}, deterministic=True)
    places = list(zip(*np.nonzero(targets >= 0)))
    loss = -sum(log_softmax(logits[place])[targets[place]] for place in places)
    assert float(output.loss_sum) == pytest.approx(loss)
    right = [place for place in places if logits[place].argmax() == targets[place]]
    assert figures(output)["accuracy"] == (len(right), 4)
    if task == "answer_tokens":
        assert figures(output)["start_accuracy"] == (sum(targets[place] == 0 for place in right), 1)
        assert figures(output)["end_accuracy"] == (sum(targets[place] == 1 for place in right), 1)
    assert not gradient[targets < 0].any()


def test_answers_compete_among_the_places_they_may_have():
    logits = DRAW.normal(size=(3, 5, 2))
    logits[:, 1] = 50.0  # no place for an answer
    mask = np.array([[1, 0, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
    starts, ends = [2, 0, -100], [3, 0, -100]
    batch = {"starts": starts, "ends": ends, "answer_mask": mask}
    output, gradient = run("answers", logits, batch, deterministic=True)
    loss, expected, right = 0.0, np.zeros_like(logits), []
    for row in (0, 1):
        found = []
        for side, label in enumerate((starts[row], ends[row])):
            places = np.flatnonzero(mask[row])
            row_logits = logits[row, places, side]
            loss -= 0.5 * log_softmax(row_logits)[places == label][0]
            expected[row, places, side] = 0.5 * (softmax(row_logits) - (places == label))
            found.append(places[row_logits.argmax()] == label)
        right.append(found)
    assert float(output.loss_sum) == pytest.approx(loss)
    assert float(output.weight_sum) == 2
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert figures(output)["start_accuracy"] == (sum(found[0] for found in right), 2)
    assert figures(output)["end_accuracy"] == (sum(found[1] for found in right), 2)
    assert figures(output)["accuracy"] == (sum(all(found) for found in right), 2)


@pytest.mark.parametrize(
    ("task", "shape", "batch"),
    [
        ("classification", (2, 3), {"labels": [-100, -100]}),
        ("regression", (2,), {"labels": np.zeros(2, np.float32), "label_mask": [False, False]}),
        ("tagging", (2, 4, 3), {"targets": np.full((2, 4), -100)}),
        ("answer_tokens", (2, 4, 3), {"targets": np.full((2, 4), -100)}),
        (
            "answers",
            (2, 4, 2),
            {"starts": [-100, -100], "ends": [-100, -100], "answer_mask": np.zeros((2, 4), bool)},
        ),
    ],
)
def test_batches_without_a_label_contribute_nothing(task, shape, batch):
    output, gradient = run(task, DRAW.normal(size=shape), batch)
    assert float(output.loss_sum) == float(output.weight_sum) == 0.0
    assert not gradient.any()
