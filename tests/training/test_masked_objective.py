"""The masked language model's objective: sums over chosen tokens, next sentences beside them, logits where needed."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.objectives import OBJECTIVES, model_inputs
from jaxformer.training.optimizers import scale_by_rate
from jaxformer.training.state import TrainState
from jaxformer.training.step import make_train_step

objective = OBJECTIVES["masked_language_model"]


class Aux(NamedTuple):
    losses: dict
    metrics: dict


class Output(NamedTuple):
    logits: Any
    next_sentence: Any
    aux: Aux


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    next_sentence: bool = True
    num_token_types: int = 2


class Toy(nn.Module):
    """Hidden states are sums of embeddings of a token and its type, and of the row's first token."""

    config: Any = ToyConfig()

    def setup(self):
        self.table = nn.Embed(13, 4, embedding_init=nn.initializers.normal(1.0))
        self.types = nn.Embed(2, 4, embedding_init=nn.initializers.normal(1.0))
        self.output = nn.Dense(13)
        self.pairs = nn.Dense(2)

    def hidden(self, tokens, *, key_mask, deterministic, token_types=None):
        assert (token_types is None) == (self.config.num_token_types < 2)
        x = self.table(tokens) + self.table(tokens[:, :1])
        return x if token_types is None else x + self.types(token_types), Aux({}, {})

    def head(self, hidden):
        return self.output(hidden)

    def sentence_head(self, hidden, real):
        return self.pairs(hidden[:, 0])

    def __call__(self, tokens, **inputs):
        hidden, aux = self.hidden(tokens, **inputs)
        pair = self.sentence_head(hidden, None) if self.config.next_sentence else None
        return Output(self.head(hidden), pair, aux)


BERT, ROBERTA = Toy(), Toy(ToyConfig(next_sentence=False, num_token_types=1))


def make_batch(rows=4, length=9, seed=0, most=4):
    """Rows of different real lengths, each with one chosen token more than the last, up to ``most``."""
    draw = np.random.default_rng(seed)
    real = np.arange(length) < np.arange(length, length - rows, -1)[:, None]
    tokens = np.where(real, draw.integers(1, 13, (rows, length)), 0).astype(np.int32)
    targets = np.full((rows, length), -100, np.int32)
    for row in range(rows):
        places = draw.choice(length - rows, min(row, most), replace=False)
        targets[row, places] = draw.integers(1, 13, len(places))
    types = (np.arange(length) >= 4).astype(np.int32)[None] * real
    return {
        "tokens": tokens,
        "key_mask": real,
        "token_types": types.astype(np.int32),
        "targets": targets,
        "next_sentence": np.array([0, 1, -100, 1][:rows], np.int32),
    }


@functools.cache
def params_of(model):
    batch = {name: jnp.asarray(value) for name, value in make_batch().items()}
    return model.init(jax.random.key(1), **model_inputs(batch, model), deterministic=True)["params"]


@functools.cache
def run(model, deterministic=False, **options):
    """Value and gradient of the loss."""

    def of(params, batch):
        output = objective(model, params, {}, batch, deterministic=deterministic, **options)
        return output.loss_sum, output

    return jax.jit(jax.grad(of, has_aux=True))


def naive(params, batch, weight=0.0):
    """The sum over chosen tokens, and so many times the mean over pairs times their count."""
    inputs = {name: jnp.asarray(batch[name]) for name in ("tokens", "token_types", "key_mask")}
    output = BERT.apply({"params": params}, **inputs, deterministic=True)
    total, count = jnp.zeros(()), 0
    for row, place in zip(*np.nonzero(batch["targets"] != -100)):
        logits = output.logits[row, place]
        total, count = total + jnp.log(jnp.exp(logits).sum()) - logits[batch["targets"][row, place]], count + 1
    pairs = [
        jnp.log(jnp.exp(output.next_sentence[row]).sum()) - output.next_sentence[row, label]
        for row, label in enumerate(batch["next_sentence"])
        if label >= 0
    ]
    return total + weight * count * sum(pairs) / len(pairs), (total, sum(pairs), count, output)


@functools.cache
def oracle(weight):
    batch = make_batch()
    return jax.jit(jax.grad(lambda params: naive(params, batch, weight), has_aux=True))(params_of(BERT))


def assert_trees_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), left, right)


@pytest.mark.parametrize("predictions", [None, 3])
def test_loss_and_gradient_are_those_of_a_loop_over_chosen_tokens(predictions):
    batch = make_batch()
    expected, (total, pairs, count, output) = oracle(0.7)
    gradient, result = run(BERT, next_sentence_weight=0.7, predictions_per_row=predictions)(params_of(BERT), batch)
    assert count == 6
    assert float(result.weight_sum) == count
    assert float(result.loss_sum) == pytest.approx(float(total + 0.7 * count * pairs / 3), rel=1e-5)
    assert_trees_close(gradient, expected)
    right = sum(
        int(np.argmax(output.logits[row, place]) == batch["targets"][row, place])
        for row, place in zip(*np.nonzero(batch["targets"] != -100))
    )
    assert [float(value) for value in result.metrics["accuracy"]] == [right, count]
    assert float(result.metrics["next_sentence_loss"][0]) == pytest.approx(float(pairs), rel=1e-5)
    kinds = np.argmax(output.next_sentence, axis=1)
    assert [float(value) for value in result.metrics["next_sentence_accuracy"]] == [
        sum(int(kinds[row] == batch["next_sentence"][row]) for row in (0, 1, 3)),
        3,
    ]


def test_rows_with_more_chosen_tokens_than_places_lose_nothing():
    batch = make_batch()
    chosen = (batch["targets"] != -100).sum(1)
    assert chosen.max() == 3
    gradient, result = run(BERT, predictions_per_row=2)(params_of(BERT), batch)
    expected, whole = run(BERT)(params_of(BERT), batch)
    assert float(result.loss_sum) == pytest.approx(float(whole.loss_sum), rel=1e-6)
    assert_trees_close(gradient, expected)


def test_evaluation_is_the_cross_entropy_of_chosen_tokens_alone():
    _, result = run(BERT, deterministic=True, next_sentence_weight=5.0, label_smoothing=0.3)(
        params_of(BERT), make_batch()
    )
    total = oracle(0.7)[1][0]
    assert float(result.loss_sum) == pytest.approx(float(total), rel=1e-5)
    assert float(result.metrics["next_sentence_accuracy"][1]) == 3


@pytest.mark.parametrize("predictions", [None, 3])
def test_a_batch_without_chosen_tokens_contributes_nothing(predictions):
    batch = make_batch() | {"targets": np.full((4, 9), -100, np.int32), "next_sentence": np.full(4, -100, np.int32)}
    options = {} if predictions is None else {"next_sentence_weight": 0.7}
    gradient, result = run(BERT, predictions_per_row=predictions, **options)(params_of(BERT), batch)
    assert float(result.loss_sum) == float(result.weight_sum) == 0.0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_micro_batches_add_up_also_of_models_of_one_type_of_token_and_no_next_sentences():
    batch = make_batch()
    optimizer = scale_by_rate(1.0)
    states = {}
    for parts in (1, 2):
        step = make_train_step(
            ROBERTA,
            functools.partial(objective, predictions_per_row=3),
            optimizer,
            lambda step: jnp.float32(1),
            accumulation_steps=parts,
        )
        params = params_of(ROBERTA)
        state = TrainState(jnp.int32(0), params, optimizer.init(params), {}, jax.random.key_data(jax.random.key(0)))
        states[parts], metrics = jax.jit(step)(state, batch)
        assert float(metrics["weight_sum"]) == 6
        assert "next_sentence_loss" not in metrics
    assert_trees_close(states[1].params, states[2].params)


def test_options_and_batches_that_cannot_be_used_are_refused():
    params, batch = params_of(BERT), {name: jnp.asarray(value) for name, value in make_batch().items()}
    with pytest.raises(ValueError, match="next_sentence_weight is -1"):
        objective(BERT, params, {}, batch, next_sentence_weight=-1.0)
    with pytest.raises(ValueError, match="predictions_per_row is 0"):
        objective(BERT, params, {}, batch, predictions_per_row=0)
    del batch["next_sentence"]
    with pytest.raises(ValueError, match="next_sentence=True, but the data say of no row"):
        objective(BERT, params, {}, batch, predictions_per_row=3)
