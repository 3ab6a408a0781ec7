"""Runs of every optimizer: stopped and continued, they end with the same bits."""

import jax
import numpy as np
import pytest

from jaxformer.training.finished import load_model, read_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.optimizers import OPTIMIZERS
from jaxformer.training.sharding import make_mesh

pytestmark = pytest.mark.slow


def params_of(workdir):
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    return jax.tree.leaves(load_model(workdir, read_run(workdir), mesh)[1])


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"gradient_descent"}))
def test_a_run_goes_on_as_if_it_had_not_stopped(name, text, tiny_config, tmp_path):
    changes = (f"optimizer.name={name}", "optimizer.frozen_layers=1", "optimizer.clip_adaptive=0.1")
    changes += ("train.accumulation_steps=2", "schedule.decay_steps=4")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    figures = train_and_evaluate(tiny_config(text, *changes, "train.steps=4"), straight)
    train_and_evaluate(tiny_config(text, *changes, "train.steps=2"), stopped)
    again = train_and_evaluate(tiny_config(text, *changes, "train.steps=4"), stopped)
    assert again["validation_loss"] == figures["validation_loss"]
    for one, other in zip(params_of(straight), params_of(stopped), strict=True):
        np.testing.assert_array_equal(one, other)
