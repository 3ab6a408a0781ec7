"""Batch norm in runs: averages follow micro-batches, are saved, evaluate and generate, and are those of all devices."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import MODELS
from jaxformer.training.finished import load_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.objectives import OBJECTIVES
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import abstract_params, init_state
from jaxformer.training.step import make_train_step

TINY = {"vocab_size": 13, "num_layers": 2, "embed_dim": 8, "num_heads": 2, "max_length": 7, "mlp_dim": 12}


def make_batch():
    """Rows of 2 to 5 tokens; the rest is padding."""
    tokens = np.random.default_rng(0).integers(0, 13, (4, 8), dtype=np.int32)
    real = np.arange(7)[None] < np.arange(2, 6)[:, None]
    targets = np.where(real, tokens[:, 1:], -100).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": targets, "segments": real.astype(np.int32)}


@pytest.mark.slow
def test_micro_batches_have_their_own_statistics_which_the_averages_follow_in_turn():
    model, batch = MODELS["gpt"](**TINY, norm="batch"), make_batch()
    schedule = make_schedule("constant", learning_rate=1e-2)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, batch))
    state = init_state(model, optimizer, 5, batch)
    step = make_train_step(model, OBJECTIVES["language_model"], optimizer, schedule, accumulation_steps=2)
    after, _ = jax.jit(step)(state, batch)

    @jax.jit
    def train(model_state, tokens, segments):
        variables = {"params": state.params, **model_state}
        return model.apply(variables, tokens, segments=segments, deterministic=False, mutable=["state"])[1]

    expected = state.model_state
    for part in (slice(0, None, 2), slice(1, None, 2)):
        expected = train(expected, batch["tokens"][part], batch["segments"][part])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after.model_state, expected)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_averages_evaluates_and_generates_with_them(text, tiny_config, tmp_path):
    fields = ("model.norm=batch", "train.steps=4", "checkpoint.every_steps=2", "eval.every_steps=2")
    train_and_evaluate(tiny_config(text, *fields), tmp_path / "straight")
    train_and_evaluate(tiny_config(text, *fields, "train.steps=2"), tmp_path / "stopped")
    train_and_evaluate(tiny_config(text, *fields), tmp_path / "stopped")
    model, straight, _ = load_run(tmp_path / "straight")
    _, stopped, _ = load_run(tmp_path / "stopped")
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)
    begun = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["state"]
    assert all(jax.tree.leaves(jax.tree.map(lambda now, then: bool((now != then).any()), straight["state"], begun)))
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert "".join(generate_from_run(tmp_path / "straight", ["be"], max_new_tokens=3, seed=1))


PROGRAM = """
import numpy as np
import mesh_program
plain = mesh_program.make_batch

def make_batch(seed):
    batch = plain(seed)
    # Rows of 0 to 5 tokens: devices differ in how many they have, and some have none at all.
    real = np.arange(mesh_program.LENGTH)[None] < np.arange(mesh_program.ROWS)[:, None] % 6
    return {**batch, "targets": np.where(real, batch["targets"], -100), "segments": real.astype(np.int32)}

mesh_program.make_batch = make_batch
# Without biases: batch norm takes them off again, so that their gradients are rounding errors, which Adam enlarges.
mesh_program.FIELDS |= {"norm": "batch", "mlp_norm": "batch", "use_bias": False}
mesh_program.main("data=8")
"""


@pytest.mark.slow
def test_statistics_of_eight_devices_are_those_of_one():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])["reports"]["data=8"]
    assert "model_state/state/decoder/layers/mlp/norm/mean" in report["layouts"]
    np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)
    assert report["difference_before"] < 1e-6
    # The largest of all parameters, moments and averages after four steps.
    assert report["difference_after"] < 1e-4
