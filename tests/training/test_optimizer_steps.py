"""Every optimizer within a step: whose rate it is, what accumulation advances, what decays, what a whole batch is."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxformer.models import MODELS
from jaxformer.training.objectives import ObjectiveOutput
from jaxformer.training.optimizers import OPTIMIZERS, hyperparameters, make_optimizer
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedules import make_schedule
from jaxformer.training.startup import check_full_batch
from jaxformer.training.state import TrainState, abstract_params
from jaxformer.training.step import make_train_step

NAMES = sorted(OPTIMIZERS)
WITHOUT_DECAY = {"adam"}


def quick(*names, of=NAMES):
    """All, of which only some in every run of the tests: each costs a compilation."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in of]


def without_decay(name):
    return {} if name in WITHOUT_DECAY else {"weight_decay": 0.0}


@pytest.mark.parametrize("name", quick("adamw", "gradient_descent", "sgd"))
def test_the_rate_is_that_of_the_step_given(name):
    """Warm-up from 0 to 1e-3 in 10 steps, gradients of 1: the n-th change is minus the rate reported for step n."""
    schedule = make_schedule("constant", learning_rate=1e-3, warmup_steps=10)
    params = {"layers_0": {"kernel": jnp.full((2, 3), 2.0)}}
    ones = jax.tree.map(jnp.ones_like, params)
    given = {"params": params, "no_decay": (), "clip_norm": None, **without_decay(name)}
    with_schedule, _ = make_optimizer(name, learning_rate=schedule, **given)
    with_one, _ = make_optimizer(name, learning_rate=1.0, **given)
    state, update, direction_of = with_schedule.init(params), jax.jit(with_schedule.update), jax.jit(with_one.update)
    for step, rate in ((0, 0.0), (5, 5e-4), (10, 1e-3), (11, 1e-3)):
        direction, _ = direction_of(ones, state, params, step=jnp.int32(step))
        updates, state = update(ones, state, params, step=jnp.int32(step))
        kernel = updates["layers_0"]["kernel"]
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-6)
        np.testing.assert_allclose(kernel, rate * direction["layers_0"]["kernel"], rtol=1e-6)
        if name in ("gradient_descent", "sgd"):
            np.testing.assert_array_equal(kernel, -jnp.full((2, 3), schedule(step)))


def slope(model, params, model_state, batch, *, rng, deterministic, step=None):
    """A loss whose gradient is the mean of what the batch holds."""
    del model, rng, deterministic, step
    return ObjectiveOutput((params["w"] * batch["slope"]).sum(), jnp.float32(batch["slope"].size), {}, model_state)


@pytest.mark.parametrize("name", quick("adamw", "sgd"))
def test_accumulation_advances_rate_moments_and_decay_once_a_step(name):
    def schedule(step):
        return jnp.asarray(step + 1, jnp.float32)

    params = {"w": jnp.ones(())}
    given = {"params": params, "no_decay": (), "clip_norm": None}
    given |= {} if "weight_decay" not in hyperparameters(name) else {"weight_decay": 0.1 if name != "sgd" else 0.0}
    optimizer, _ = make_optimizer(name, learning_rate=schedule, **given)
    step = jax.jit(make_train_step(nn.Module(), slope, optimizer, schedule, accumulation_steps=2))
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params), model_state={}, rng_data=key)
    expected, opt_state, changes = params, optimizer.init(params), []
    for update, pair in enumerate(([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])):
        before = float(state.params["w"])
        state, _ = step(state, {"slope": jnp.asarray(pair)})
        changes.append(float(state.params["w"]) - before)
        updates, opt_state = optimizer.update({"w": jnp.mean(jnp.asarray(pair))}, opt_state, expected, step=update)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5, atol=1e-6)
    assert int(state.step) == 3
    if name == "sgd":
        assert changes == [-1.5, -7.0, -16.5]


# What a kernel of ones is after a step with gradients 0, rate 0.01 and decay 0.1; where the decay is in the gradient,
# Adam divides it by itself, RMSProp by its root of (1 - b2).
AFTER = {
    "adafactor": 0.999,
    "adam_l2": 0.99,
    "adamw": 0.999,
    "gradient_descent": 0.999,
    "lion": 0.999,
    "momentum": 0.999,
    "muon": 0.999,
    "rmsprop": 1 - 0.01 / 0.1**0.5,
    "sgd": 0.999,
}


@pytest.mark.parametrize("name", sorted(AFTER))
def test_a_step_without_gradient_decays_kernels_alone(name):
    assert set(AFTER) == {name for name in NAMES if "weight_decay" in hyperparameters(name)}
    params = {
        "layers": {
            "norm": {"scale": jnp.ones((2, 3))},
            "up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))},
        },
        "relative_bias_embedding": jnp.ones((4, 2)),
        "token_embedding": {"embedding": jnp.ones((7, 3))},
    }
    optimizer, report = make_optimizer(name, learning_rate=0.01, params=params, weight_decay=0.1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, step=0)
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after["layers"]["up"].pop("kernel"), AFTER[name], rtol=1e-6)
    assert all(np.all(leaf == 1.0) for leaf in jax.tree.leaves(after))
    assert list(report.decayed) == ["layers/up/kernel"]


@pytest.mark.parametrize("model", quick("t5_v1_1", of=["bert", "switch", "t5_v1_1", "universal_transformer"]))
def test_families_decay_their_kernels_and_nothing_else(model):
    tokens = jnp.zeros((1, 5), jnp.int32)
    batch = {"tokens": tokens} | ({"source": tokens} if model.startswith("t5") else {})
    _, report = make_optimizer(learning_rate=0.1, params=abstract_params(MODELS[model]("tiny"), batch))
    assert all(path.endswith("/kernel") for path in report.decayed)
    assert not any(path.endswith("kernel") for path in report.excluded)


def test_gradient_descent_takes_all_rows_in_a_step():
    config = ConfigDict({"optimizer": {"name": "gradient_descent"}, "train": {"batch_size": 4}})
    data = types.SimpleNamespace(train_rows=[0] * 4)
    check_full_batch(config, data)
    data.train_rows.append(0)
    with pytest.raises(ConfigError, match=r"train\.batch_size is 4, must be 5, all rows of the training data"):
        check_full_batch(config, data)
    with pytest.raises(ConfigError, match="training data without a number of rows"):
        check_full_batch(config, types.SimpleNamespace(train_rows=iter(())))
    config.optimizer.name = "sgd"
    check_full_batch(config, data)
