"""The average of the parameters: its formula, what enters it, and who uses it."""

import shutil

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxformer.training.averaging import average_dtype, start_average, update_average
from jaxformer.training.checkpoint_reading import CheckpointError, restore_model, stored_tree
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import RunConfig, resolve
from jaxformer.training.finished import evaluate_run, load_run, read_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.objectives import ObjectiveOutput
from jaxformer.training.optimizers import scale_by_rate
from jaxformer.training.sharding import make_mesh
from jaxformer.training.starting import take_parameters
from jaxformer.training.state import TrainState
from jaxformer.training.step import make_train_step


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999])
def test_average_is_the_weighted_mean_of_all_updates(decay):
    values = np.random.default_rng(0).normal(size=(7, 3))

    @jax.jit
    def averages(values):
        def take(average, value):
            average = update_average(average, {"w": value}, decay)
            return average, average.params["w"]

        # Zeros would pull the average down if the start entered it.
        return jax.lax.scan(take, start_average({"w": jnp.zeros(3)}), values)[1]

    found = averages(jnp.asarray(values, jnp.float32))
    for number in range(1, 8):
        weights = decay ** np.arange(number - 1.0, -1.0, -1.0)
        expected = weights @ values[:number] / weights.sum()
        np.testing.assert_allclose(found[number - 1], expected, rtol=1e-5, atol=1e-6)


def slope_objective(model, params, model_state, batch, *, rng, deterministic, step=None):
    """The gradient is the batch's slope."""
    return ObjectiveOutput((params["w"] * batch["slope"]).sum(), jnp.float32(1), {}, model_state)


def make_state(params, averaged=True):
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=(),
        model_state={},
        rng_data=jax.random.key_data(jax.random.key(0)),
        average=start_average(params) if averaged else None,
    )


def test_skipped_steps_do_not_enter_and_training_goes_on_with_the_parameters():
    optimizer, rate = scale_by_rate(1.0), lambda step: jnp.float32(1)
    step = jax.jit(make_train_step(nn.Module(), slope_objective, optimizer, rate, average_decay=0.5))
    state = make_state({"w": jnp.float32(8.0)})
    state = state.replace(opt_state=optimizer.init(state.params))
    assert float(state.evaluation_params["w"]) == 8.0
    seen = []
    for slope in (4.0, np.nan, 2.0):
        state, metrics = step(state, {"slope": jnp.full(1, slope, jnp.float32)})
        seen.append((float(state.params["w"]), float(state.evaluation_params["w"]), float(metrics["skipped"])))
    assert seen == [(4.0, 4.0, 0.0), (4.0, 4.0, 1.0), (2.0, pytest.approx((4 * 0.5 + 2) / 1.5), 0.0)]
    assert int(state.average.updates) == 2
    with pytest.raises(ValueError, match=r"average_decay is 1.0, must be at least 0 and below 1"):
        make_train_step(nn.Module(), slope_objective, optimizer, rate, average_decay=1.0)


def test_low_precision_is_averaged_in_float32_and_evaluated_in_its_own():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    average = update_average(start_average(params), params, 0.999)
    assert average.params["w"].dtype == jnp.float32 == average_dtype(jnp.bfloat16)
    assert make_state(params).evaluation_params["w"].dtype == jnp.bfloat16


def make_iterator():
    return iter(grain.MapDataset.range(5).batch(1).to_iter_dataset())


def test_checkpoints_hold_the_average_beside_the_parameters(tmp_path):
    params = {"w": jnp.full(3, 2.0), "v": jnp.full((2, 5), 3.0, jnp.bfloat16)}
    state = make_state(params)
    state = state.replace(average=update_average(state.average, jax.tree.map(lambda leaf: leaf + 1, params), 0.9))
    with Checkpoints(tmp_path, keep_latest=1, keep_best=0) as checkpoints:
        checkpoints.save(1, state, make_iterator(), {"loss": None})
        checkpoints.wait()
        abstract = jax.eval_shape(lambda: state)
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(1, abstract, make_iterator()), state)
        with pytest.raises(CheckpointError, match="unexpected average/params/v"):
            checkpoints.restore(1, abstract.replace(average=None), make_iterator())
    evaluated, _ = restore_model(tmp_path, 1, abstract.params, {})
    assert {name: (float(leaf.max()), leaf.dtype) for name, leaf in evaluated.items()} == {
        "w": (3.0, jnp.float32),
        "v": (4.0, jnp.bfloat16),
    }


def test_a_start_s_average_is_what_is_started_from_and_the_new_average_begins_there(tmp_path):
    params = {"w": jnp.full(3, 2.0), "v": jnp.full((2, 5), 3.0, jnp.bfloat16)}
    state = make_state(params)
    state = state.replace(average=update_average(state.average, jax.tree.map(lambda leaf: leaf + 1, params), 0.9))
    with Checkpoints(tmp_path / "checkpoints", keep_latest=1, keep_best=0) as checkpoints:
        checkpoints.save(1, state, make_iterator(), {"loss": None})
    config = ConfigDict({"start": {"workdir": str(tmp_path), "step": "latest"}})
    drawn = jax.device_put(
        make_state(jax.tree.map(jnp.zeros_like, params)), NamedSharding(make_mesh(), PartitionSpec())
    )
    said = []
    taken = take_parameters(config, drawn, said.append)
    assert said == [f"start: 2 arrays of {tmp_path}, step 1"]
    expected = {"w": np.full(3, 3.0), "v": np.full((2, 5), 4.0)}
    jax.tree.map(np.testing.assert_array_equal, (taken.params, taken.average.params), (expected, expected))
    assert (taken.params["v"].dtype, taken.average.params["v"].dtype) == (jnp.bfloat16, jnp.float32)
    assert int(taken.average.updates) == 0
    assert taken.average.params["w"] is not taken.params["w"], "the state is donated"


def mean_of_saved(directory, decay, steps):
    """The average by hand, from the parameters of every step."""
    weights = decay ** np.arange(len(steps) - 1.0, -1.0, -1.0)
    total: dict = {}
    for weight, step in zip(weights / weights.sum(), steps):
        stored = stored_params(directory, step)
        total = {name: total.get(name, 0.0) + weight * np.float64(leaf) for name, leaf in stored.items()}
    return total


def stored_params(directory, step):
    import orbax.checkpoint as ocp

    abstract = stored_tree(directory, step, "model")
    tree = ocp.StandardCheckpointer().restore(
        directory.absolute() / str(step) / "model",
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract),
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree["params"])}


@pytest.mark.slow
def test_run_evaluates_its_average_and_resumes_bit_for_bit(text, tiny_config, tmp_path):
    changes = ("train.average_decay=0.5", "train.steps=4", "schedule.decay_steps=4", "checkpoint.every_steps=1")
    config = tiny_config(text, *changes, "checkpoint.keep_latest=4")
    straight = train_and_evaluate(config, tmp_path / "straight")
    train_and_evaluate(config.with_overrides(["train.steps=2"]), tmp_path / "stopped")
    stopped = train_and_evaluate(config, tmp_path / "stopped")
    assert stopped == straight
    variables, other = load_run(tmp_path / "straight")[1], load_run(tmp_path / "stopped")[1]
    jax.tree.map(np.testing.assert_array_equal, variables, other)
    expected = mean_of_saved(tmp_path / "straight" / "checkpoints", 0.5, (1, 2, 3, 4))
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        np.testing.assert_allclose(leaf, expected[jax.tree_util.keystr(path)], rtol=1e-5, atol=1e-7)
    assert evaluate_run(tmp_path / "straight")["loss"] == straight["validation_loss"]
    # Without the average it is another model.
    plain = RunConfig(resolve(read_run(tmp_path / "straight"), {"train.average_decay": None}))
    assert train_and_evaluate(plain, tmp_path / "plain")["validation_loss"] != straight["validation_loss"]
    shutil.rmtree(tmp_path / "straight" / "checkpoints" / "4" / "training" / "d")
    load_run(tmp_path / "straight")
