"""The language-model objective: sums over supervised tokens, one shift only, auxiliary losses with their weights."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.objectives import MODEL_INPUTS, OBJECTIVES, apply_model, model_inputs

objective = OBJECTIVES["language_model"]


class Table(nn.Module):
    """Logits are a row of a table, chosen by the token; auxiliary losses are constants times a parameter."""

    vocab_size: int = 5
    losses: tuple[tuple[str, float | tuple[float, ...]], ...] = ()

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        table = self.param("table", nn.initializers.normal(1.0), (self.vocab_size, self.vocab_size))
        scale = self.param("scale", nn.initializers.ones, ())
        losses = {name: jnp.asarray(value) * scale for name, value in self.losses}
        # Two layers counted 2 of 7 and 3 of 11.
        metrics = {"dropped": (jnp.array([2.0, 3.0]), jnp.array([7.0, 11.0]))}
        return SimpleNamespace(logits=table[tokens], aux=SimpleNamespace(losses=losses, metrics=metrics))


class RunningMean(nn.Module):
    """A model with state: the running sum of the tokens it saw in training."""

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        seen = self.variable("statistics", "seen", jnp.zeros, ())
        if not deterministic:
            seen.value = seen.value + tokens.sum()
        return SimpleNamespace(logits=jax.nn.one_hot(tokens, 5) * 9.0, aux=SimpleNamespace(losses={}, metrics={}))


def batch_of(tokens, targets):
    return {"tokens": jnp.asarray(tokens, jnp.int32), "targets": jnp.asarray(targets, jnp.int32)}


BATCH = batch_of([[0, 1, 2], [3, 4, 0]], [[1, 2, -100], [4, -100, -100]])


def run(model, batch=BATCH, deterministic=False, **options):
    variables = dict(jax.jit(lambda: model.init(jax.random.key(0), batch["tokens"], deterministic=True))())
    params = variables.pop("params", {})
    return params, objective(model, params, variables, batch, rng=None, deterministic=deterministic, **options)


def test_loss_is_the_sum_over_supervised_tokens():
    params, output = run(Table())
    log_probs = np.asarray(jax.nn.log_softmax(params["table"]), np.float64)
    assert float(output.loss_sum) == pytest.approx(-(log_probs[0, 1] + log_probs[1, 2] + log_probs[3, 4]), rel=1e-6)
    assert float(output.weight_sum) == 3
    assert [float(value) for value in output.metrics["accuracy"]] == [
        sum(int(log_probs[token].argmax() == target) for token, target in ((0, 1), (1, 2), (3, 4))),
        3,
    ]


def test_targets_are_not_shifted_again():
    class Copier(nn.Module):
        """Predicts the token it reads, with certainty."""

        @nn.compact
        def __call__(self, tokens, *, deterministic):
            return SimpleNamespace(logits=jax.nn.one_hot(tokens, 5) * 99.0, aux=SimpleNamespace(losses={}, metrics={}))

    _, right = run(Copier(), batch_of([[3, 1, 4]], [[3, 1, 4]]))
    _, shifted = run(Copier(), batch_of([[3, 1, 4]], [[1, 4, -100]]))
    assert float(right.loss_sum) == 0.0
    assert float(shifted.loss_sum) == pytest.approx(2 * 99.0)


def test_auxiliary_losses_enter_once_per_token_with_their_weights():
    _, plain = run(Table())
    model = Table(losses=(("balance", (0.25, 0.5)), ("router", 2.0)))
    _, output = run(model, loss_weights={"router": 0.1})
    assert float(output.loss_sum - plain.loss_sum) == pytest.approx(3 * (0.75 + 0.1 * 2.0), rel=1e-5)
    assert [float(value) for value in output.metrics["balance"]] == [3 * 0.75, 3]
    assert [float(value) for value in output.metrics["router"]] == [6.0, 3]


def test_figures_that_the_model_counts_are_added_over_layers():
    assert [float(value) for value in run(Table())[1].metrics["dropped"]] == [5.0, 18.0]


def test_evaluation_is_plain_cross_entropy():
    _, plain = run(Table())
    model = Table(losses=(("balance", 0.25),))
    _, output = run(model, deterministic=True, label_smoothing=0.1, z_loss=1e-2)
    assert float(output.loss_sum) == pytest.approx(float(plain.loss_sum), rel=1e-6)
    _, training = run(Table(), label_smoothing=0.1, z_loss=1e-2)
    assert abs(float(training.loss_sum - plain.loss_sum)) > 1e-3


def test_z_loss_is_part_of_the_training_loss():
    params, plain = run(Table())
    _, output = run(Table(), z_loss=0.5)
    normalisers = np.asarray(jax.nn.logsumexp(params["table"], axis=-1), np.float64)[[0, 1, 3]]
    assert float(output.loss_sum - plain.loss_sum) == pytest.approx(0.5 * np.square(normalisers).sum(), rel=1e-5)


def test_unknown_loss_weight_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"names \['balanse'\], but the model returns the losses \['balance'\]"):
        run(Table(losses=(("balance", 1.0),)), loss_weights={"balanse": 0.1})


def test_no_supervised_token_gives_zero_loss_and_zero_gradients():
    batch = batch_of([[0, 1, 2], [3, 4, 0]], [[-100] * 3] * 2)
    model = Table(losses=(("balance", 0.25),))
    params = jax.jit(lambda: model.init(jax.random.key(0), batch["tokens"], deterministic=True))()["params"]
    total, gradients = jax.value_and_grad(
        lambda params: objective(model, params, {}, batch, rng=None, deterministic=False, z_loss=0.1).loss_sum
    )(params)
    assert float(total) == 0.0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients))


def test_model_state_moves_in_training_and_is_frozen_in_evaluation():
    model = RunningMean()
    _, trained = run(model)
    assert float(trained.model_state["statistics"]["seen"]) == 10.0
    _, evaluated = run(model, deterministic=True)
    assert float(evaluated.model_state["statistics"]["seen"]) == 0.0


def test_only_the_models_own_inputs_reach_it():
    batch = BATCH | {"positions": jnp.zeros((2, 3), jnp.int32), "document": jnp.zeros(2)}
    assert set(model_inputs(batch)) == {"tokens", "positions"} < set(MODEL_INPUTS)
    output, state = apply_model(Table(), run(Table())[0], {}, BATCH, rng=jax.random.key(1), deterministic=False)
    assert output.logits.shape == (2, 3, 5)
    assert state == {}


class Factored(nn.Module):
    """Logits are products of two tables, of which the second has rows beyond the vocabulary."""

    config = SimpleNamespace(vocab_size=5)

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(1.0), (5, 3))
        self.kernel = self.param("kernel", nn.initializers.normal(1.0), (3, 8))

    def __call__(self, tokens, *, deterministic):
        hidden, aux = self.hidden(tokens, deterministic=deterministic)
        return SimpleNamespace(logits=(hidden @ self.kernel)[..., :5], aux=aux)

    def hidden(self, tokens, *, deterministic):
        return self.table[tokens], SimpleNamespace(losses={"balance": jnp.float32(0.25)}, metrics={})

    def head_kernel(self):
        return self.kernel


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_of_the_vocabulary_loss_change_nothing(deterministic):
    options = {"deterministic": deterministic, "label_smoothing": 0.1, "z_loss": 0.1}
    _, whole = run(Factored(), **options)
    _, chunked = run(Factored(), **options, chunk_size=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), chunked, whole)
