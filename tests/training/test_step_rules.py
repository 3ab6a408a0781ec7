"""Every optimizer and objective through the train step: rates as logged, updates counted, micro-batches added up."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.objectives import OBJECTIVES, ObjectiveOutput
from jaxformer.training.optimizers import OPTIMIZERS, make_optimizer, scale_by_rate
from jaxformer.training.schedules import SCHEDULES, make_schedule
from jaxformer.training.state import TrainState
from jaxformer.training.step import make_train_step

SOME = ("adamw", "muon", "sgd")
OTHERS = tuple(sorted({*OPTIMIZERS} - {*SOME}))
SOME_AND_ALL = pytest.mark.parametrize(
    "names", [pytest.param(SOME, id="some"), pytest.param(OTHERS, marks=pytest.mark.slow, id="others")]
)

SHAPES = {"decoder": {"layers": {"mlp": {"up": {"kernel": (2, 3, 5), "bias": (2, 5)}}}}}


def make_params():
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def make_state(params, optimizer):
    rng_data = jax.random.key_data(jax.random.key(0))
    return TrainState(jnp.int32(0), params, optimizer.init(params), {}, rng_data)


def pattern(shape):
    """Signs and sizes that differ from element to element; the first is 1."""
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def sloped_objective(model, params, model_state, batch, *, rng, deterministic, step=None):
    """Linear in the parameters: a row's gradient is its slope times a pattern of signs and sizes, by its weight."""
    weight = batch["slope"] * batch["weight"]
    sums = jax.tree.map(lambda leaf: (leaf * pattern(leaf.shape)).sum(), params)
    return ObjectiveOutput(sum(jax.tree.leaves(sums)) * weight.sum(), batch["weight"].sum(), {}, model_state)


def changes(name, schedule, rates):
    """Of 12 steps from the same parameters each, so that no rate moves where the next step stands."""
    params = make_params()
    optimizer, _ = make_optimizer(name, learning_rate=schedule, params=params, clip_norm=None)
    step = make_train_step(nn.Module(), sloped_objective, optimizer, rates)

    def take(state, slope):
        batch = {"slope": slope[None], "weight": jnp.ones(1)}
        new, metrics = step(state, batch)
        change = jax.tree.map(lambda after, before: after - before, new.params, params)
        return new.replace(params=params), (change, metrics["learning_rate"])

    return jax.lax.scan(take, make_state(params, optimizer), 1.0 + jnp.arange(12.0) % 3)[1]


@SOME_AND_ALL
def test_each_change_is_minus_the_logged_rate_times_the_direction(names):
    schedule, unit = make_schedule("constant", learning_rate=1e-3, warmup_steps=10), lambda step: jnp.float32(1)

    @jax.jit
    def both():
        return {name: (changes(name, schedule, schedule), changes(name, unit, unit)[0]) for name in names}

    for name, ((found, rates), directions) in both().items():
        np.testing.assert_allclose(rates[jnp.asarray([0, 5, 10, 11])], [0.0, 5e-4, 1e-3, 1e-3], rtol=1e-6)
        for change, direction in zip(jax.tree.leaves(found), jax.tree.leaves(directions), strict=True):
            expected = rates.reshape(-1, *[1] * (direction.ndim - 1)) * direction
            # A change of 1e-3 of parameters of some 1 has lost four digits.
            np.testing.assert_allclose(change, expected, rtol=1e-3, atol=5e-7, err_msg=name)
            assert np.abs(direction).max() > 0.01, name


def test_every_schedule_s_logged_rate_is_the_one_used():
    fields = {"learning_rate": 0.5, "warmup_steps": 3, "decay_steps": 10, "final_fraction": 0.1}

    @jax.jit
    def all_of_them():
        schedules = {name: make_schedule(name, **fields) for name in SCHEDULES}
        return {name: changes("sgd", schedule, schedule) for name, schedule in schedules.items()}

    for name, (found, rates) in all_of_them().items():
        bias = found["decoder"]["layers"]["mlp"]["up"]["bias"]
        expected = -rates * (1.0 + jnp.arange(12.0) % 3)
        np.testing.assert_allclose(bias[:, 0, 0], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@SOME_AND_ALL
def test_moments_decay_and_rate_advance_once_a_step_and_micro_batches_weigh_by_their_tokens(names):
    def schedule(step):
        return 1e-2 * (step + 1).astype(jnp.float32)

    def trained(name, parts):
        params = make_params()
        optimizer, _ = make_optimizer(name, learning_rate=schedule, params=params)
        step = make_train_step(nn.Module(), sloped_objective, optimizer, schedule, accumulation_steps=parts)
        pairs = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]])
        batches = {"slope": pairs, "weight": jnp.broadcast_to(jnp.asarray([2.0, 6.0]), (3, 2))}
        return jax.lax.scan(step, make_state(params, optimizer), batches)

    @jax.jit
    def both():
        return {name: (trained(name, 1), trained(name, 2)) for name in names}

    for name, ((whole, metrics), (parts, parts_metrics)) in both().items():
        assert int(parts.step) == 3
        np.testing.assert_allclose(parts_metrics["learning_rate"], [1e-2, 2e-2, 3e-2], rtol=1e-6)
        for figure, values in metrics.items():
            np.testing.assert_allclose(parts_metrics[figure], values, rtol=1e-5, err_msg=f"{name} {figure}")
        for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6, err_msg=name)


class Scores(nn.Module):
    """Scores of tokens by a table, or of rows by their first token's."""

    width: int
    of_rows: bool = False

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        logits = nn.Dense(self.width, use_bias=False)(jax.nn.one_hot(tokens, 13))
        logits = logits[:, 0] if self.of_rows else logits
        aux = SimpleNamespace(losses={}, metrics={}, state={})
        return SimpleNamespace(logits=logits[:, 0] if self.width == 1 else logits, aux=aux)


IGNORED = -100
TASKS = {
    "classification": (Scores(3, of_rows=True), {"labels": np.int32([2, IGNORED, 0, 1])}),
    "regression": (
        Scores(1, of_rows=True),
        {"labels": np.float32([1, 7, -2, 0.5]), "label_mask": np.array([True, False, True, True])},
    ),
    "tagging": (Scores(3), {"targets": np.int32([[0, 1, 2], [IGNORED] * 3, [1, IGNORED, IGNORED], [2, 0, IGNORED]])}),
    "answer_tokens": (Scores(3), {"targets": np.int32([[0, 1, 2], [IGNORED] * 3, [1, IGNORED, 2], [2, 0, IGNORED]])}),
    "answers": (
        Scores(2),
        {
            "starts": np.int32([0, IGNORED, 1, 1]),
            "ends": np.int32([2, IGNORED, 1, 2]),
            "answer_mask": np.array([[True] * 3, [False] * 3, [True, True, False], [False, True, True]]),
        },
    ),
    "language_model": (Scores(13), {"targets": np.int32([[1, 2, 3], [IGNORED] * 3, [4, 5, IGNORED], [6, 7, 8]])}),
}


# Sums of cross-entropies over tokens, as of the language model, whose whole step has tests of its own.
ALIKE = ("answer_tokens", "classification", "language_model", "tagging")


@pytest.mark.parametrize(
    "task", ["answers", "regression", *(pytest.param(task, marks=pytest.mark.slow) for task in ALIKE)]
)
def test_micro_batches_of_every_objective_add_up_to_the_whole(task):
    model, supervised = TASKS[task]
    tokens = np.random.default_rng(1).integers(0, 13, (4, 3), dtype=np.int32)
    batch = {"tokens": jnp.asarray(tokens), **{name: jnp.asarray(value) for name, value in supervised.items()}}
    optimizer = scale_by_rate(1.0)
    params = model.init(jax.random.key(0), batch["tokens"], deterministic=True)["params"]

    @jax.jit
    def both():
        steps = {}
        for parts in (1, 2):
            step = make_train_step(
                model, OBJECTIVES[task], optimizer, lambda step: jnp.float32(1), accumulation_steps=parts
            )
            new, metrics = step(make_state(params, optimizer), batch)
            steps[parts] = (new.params, metrics)
        return steps

    found = both()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[2], found[1])


def test_every_objective_is_there():
    # The one of masked tokens has a test of its own.
    assert {*TASKS, "masked_language_model"} == {*OBJECTIVES}
