"""Runs with experts: figures are logged, a stopped run goes on exactly, and a mesh that splits them changes nothing."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxformer.training.config import load_config
from jaxformer.training.finished import load_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate

ARG = "size=tiny,model=switch"


def test_config_has_the_fields_of_its_model_alone():
    assert "num_experts" not in load_config("language_model").config.model
    model = load_config("language_model:model=switch", ["model.expert_capacity_factor=None"]).config.model
    assert (model.name, model.num_experts, model.expert_capacity_factor) == ("switch", 4, None)


@pytest.mark.slow
def test_run_logs_its_figures_and_goes_on_exactly(text, tiny_config, tmp_path):
    steps = ("train.steps=4", "checkpoint.every_steps=2", "model.router_jitter=0.1")
    train_and_evaluate(tiny_config(text, *steps, arg=ARG), tmp_path / "straight")
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if line["split"] == "train"]
    # Of one layer of two: 0.01 where experts are chosen evenly.
    assert all(0.0075 < line["expert_balance"] < 0.04 and line["router_z"] > 0 for line in training)
    assert any(line["expert_overflow"] > 0 for line in training)
    assert all(line["expert_overflow"] == 0 for line in lines if line["split"] == "validation")
    train_and_evaluate(tiny_config(text, *steps, "train.steps=2", arg=ARG), tmp_path / "stopped")
    train_and_evaluate(tiny_config(text, *steps, arg=ARG), tmp_path / "stopped")
    straight, stopped = load_run(tmp_path / "straight")[1], load_run(tmp_path / "stopped")[1]
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)
    assert "".join(generate_from_run(tmp_path / "straight", ["be"], max_new_tokens=3, seed=1))


PROGRAM = """
import mesh_program
mesh_program.FIELDS |= {"num_experts": 4, "experts_per_token": 2, "expert_capacity_factor": 1.0, "router_jitter": 0.1}
mesh_program.main(*MESHES)
"""
MESHES = ("data=2,expert=4", "data=1,fsdp=2,tensor=2,expert=2")


@pytest.mark.slow
def test_splitting_experts_over_devices_changes_no_loss():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)]),
    }
    program = PROGRAM.replace("MESHES", repr(MESHES))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])["reports"]
    for mesh in MESHES:
        report = reports[mesh]
        np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)
        assert "expert" in report["layouts"]["params/decoder/layers/mlp/experts/up/kernel"]
        assert report["difference_before"] < 1e-6
        assert report["difference_after"] < 2e-3
