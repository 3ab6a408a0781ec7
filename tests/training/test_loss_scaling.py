"""Loss scaling: no digit changes in float32, float16 trains, and an overflow costs one step."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models import MODELS
from jaxformer.training.loss_scaling import LossScale, LossScaling, loss_scaling, next_scale
from jaxformer.training.objectives import OBJECTIVES, ObjectiveOutput
from jaxformer.training.optimizers import make_optimizer, scale_by_rate
from jaxformer.training.progress import Progress
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import TrainState, abstract_params, init_state
from jaxformer.training.step import make_train_step
from jaxformer.training.step_log import NonFiniteError, StepLog

TINY = {"vocab_size": 13, "num_layers": 2, "embed_dim": 8, "num_heads": 2, "max_length": 7, "mlp_dim": 12}


def make_batch():
    tokens = np.random.default_rng(0).integers(0, 13, (4, 8), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_a_config_s_scale_is_read():
    assert loss_scaling(None) is None
    assert loss_scaling("1024") == LossScaling(1024.0, None) == loss_scaling(1024.0)
    assert loss_scaling("dynamic") == LossScaling(2.0**15, 2000)
    assert loss_scaling("dynamic", 3) == LossScaling(2.0**15, 3)
    for bad in ("0", "-1", "inf", "dynamics"):
        with pytest.raises(ValueError, match=f"loss_scale is '{bad}', must be 'dynamic', a number above 0, or None"):
            loss_scaling(bad)
    for scale, steps in ((None, 3), ("8", 3), ("dynamic", 0)):
        with pytest.raises(ValueError, match=f"loss_scale_growth_steps is {steps}, must be at least 1 for"):
            loss_scaling(scale, steps)


def test_scale_is_halved_by_overflow_and_doubled_after_so_many_good_steps():
    @jax.jit
    def scales(over, finite):
        def take(state, step):
            state = next_scale(state, LossScaling(8.0, 2), *step)
            return state, (state.scale, state.good_steps)

        return jax.lax.scan(take, LossScaling(8.0, 2).start(), (over, finite))[1]

    over = jnp.asarray([True, False, False, False, True, False, False])
    # The sixth step was not finite without being an overflow: a loss that is NaN says nothing about the scale.
    finite = jnp.asarray([False, True, True, True, False, False, True])
    found, good_steps = scales(over, finite)
    assert found.tolist() == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 4.0]
    assert good_steps.tolist() == [0, 1, 0, 1, 0, 0, 1]


class Classifier(nn.Module):
    """Small enough to compile in no time, with a product, an exponential and a dropout mask."""

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        hidden = jax.nn.gelu(nn.Dense(5)(jax.nn.one_hot(tokens, 13)))
        hidden = nn.Dropout(0.3, deterministic=deterministic)(hidden)
        aux = SimpleNamespace(losses={}, metrics={}, state={})
        return SimpleNamespace(logits=nn.Dense(13)(hidden), aux=aux)


@pytest.mark.parametrize("accumulation_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_powers_of_two_change_no_bit_in_float32(accumulation_steps):
    model, optimizer, batch = Classifier(), optax.sgd(1.0), make_batch()

    def stepped(scaling, scale=None):
        rate, objective = (lambda step: jnp.float32(1)), OBJECTIVES["language_model"]
        step = make_train_step(
            model, objective, optimizer, rate, accumulation_steps=accumulation_steps, loss_scaling=scaling
        )
        step = jax.jit(step)
        state = init_state(model, optimizer, 0, batch, loss_scaling=scaling)
        found = []
        for number in scale or (None,):
            if number is not None:
                state = state.replace(loss_scale=state.loss_scale.replace(scale=jnp.float32(number)))
            new, metrics = step(state, batch)
            found.append((new.params, {name: metrics[name] for name in ("loss", "gradient_norm", "skipped")}))
        return found

    (expected,) = stepped(None)
    for found in stepped(LossScaling(1.0, None), (1.0, 2.0**11, 2.0**-9)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def half_objective(model, params, model_state, batch, *, rng, deterministic, step=None):
    """A gradient that comes through float16."""
    loss = (params["w"].astype(jnp.float16) * batch["slope"].astype(jnp.float16)).astype(jnp.float32).sum()
    return ObjectiveOutput(loss, jnp.float32(1), {}, model_state)


def half_training(scaling):
    optimizer = scale_by_rate(1.0)
    step = make_train_step(nn.Module(), half_objective, optimizer, lambda step: jnp.float32(1), loss_scaling=scaling)
    state = TrainState(
        step=jnp.int32(0),
        params={"w": jnp.float32(1.0)},
        opt_state=optimizer.init(None),
        model_state={},
        rng_data=jax.random.key_data(jax.random.key(0)),
        loss_scale=scaling.start(),
    )
    return state, jax.jit(step)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    state, step = half_training(LossScaling(2.0**15, 2))
    seen = []
    for slope in (8.0, 8.0, 8.0, 2.0**-20, np.inf, 2.0):
        before = float(state.params["w"])
        state, metrics = step(state, {"slope": jnp.full(1, slope, jnp.float32)})
        figures = [float(metrics[name]) for name in ("loss_scale", "overflowed", "skipped")]
        seen.append((before - float(state.params["w"]), *figures))
    assert seen[:3] == [(0.0, 2.0**15, 1.0, 1.0), (0.0, 2.0**14, 1.0, 1.0), (0.0, 2.0**13, 1.0, 1.0)]
    # Without a scale this gradient is below float16's least normal number.
    assert seen[3] == (pytest.approx(2.0**-20, rel=0.2), 2.0**12, 0.0, 0.0)
    # A loss that is not finite is an error, and none of the scale's.
    assert seen[4] == (0.0, 2.0**12, 0.0, 1.0)
    assert seen[5] == (2.0, 2.0**12, 0.0, 0.0)
    assert float(state.loss_scale.scale) == 2.0**13, "after two good steps"


def test_a_scale_that_is_a_number_stays_and_its_overflow_is_an_error():
    state, step = half_training(LossScaling(2.0**15, None))
    new, metrics = step(state, {"slope": jnp.full(1, 8.0)})
    assert [float(metrics[name]) for name in ("loss_scale", "overflowed", "skipped")] == [2.0**15, 0.0, 1.0]
    assert float(new.loss_scale.scale) == 2.0**15


def test_overflow_is_told_and_does_not_stop_a_run(capsys):
    log = StepLog(None, Progress(quiet=False), stop=True)
    figures = {"loss": 1.0, "gradient_norm": np.inf, "skipped": 1.0, "loss_scale": 32768.0, "weight_sum": 1.0}
    log.add(1, {**figures, "overflowed": 1.0})
    log.fetch()
    assert "step 1: the gradient overflowed at loss scale 32768, skipped" in "".join(capsys.readouterr())
    log.add(2, {**figures, "overflowed": 0.0})
    with pytest.raises(NonFiniteError, match=r"step 2: .*config.train.non_finite is stop"):
        log.fetch()


@pytest.mark.slow
def test_float16_learns_one_batch_by_heart():
    model, batch, scaling = MODELS["gpt"](**TINY, dtype="float16"), make_batch(), LossScaling(2.0**15, 20)
    schedule = make_schedule("constant", learning_rate=3e-2)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, batch))
    step = make_train_step(model, OBJECTIVES["language_model"], optimizer, schedule, loss_scaling=scaling)
    step = jax.jit(step, donate_argnums=0)
    state = init_state(model, optimizer, 0, batch, loss_scaling=scaling)
    skipped, scales = 0.0, []
    for _ in range(60):
        state, metrics = step(state, batch)
        skipped += float(metrics["skipped"])
        scales.append(float(metrics["loss_scale"]))
    assert float(metrics["loss"]) < 0.1
    assert skipped < 10
    assert max(scales) > scales[0] / 64
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert isinstance(state.loss_scale, LossScale)
