"""Runs of a Universal Transformer: pondering is logged, a stopped run goes on exactly, a mesh changes nothing."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxformer.training.finished import load_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate

ARG = "size=tiny,model=universal"


@pytest.mark.slow
def test_run_logs_pondering_and_goes_on_exactly(text, tiny_config, tmp_path):
    changes = ("model.halting=act", "model.positions=sinusoidal", "model.random_position_start=9")
    more = ("model.halting_bias_init=-1.0", "model.num_layers=3")
    steps = ("train.steps=4", "checkpoint.every_steps=2", *changes, *more)
    train_and_evaluate(tiny_config(text, *steps, arg=ARG), tmp_path / "straight")
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert {line["split"] for line in lines} == {"train", "validation"}
    for line in lines:
        # N + R times its weight.
        assert 1 < line["ponder_steps"] <= 3
        assert 0.01 * line["ponder_steps"] < line["ponder"] < 0.01 * (line["ponder_steps"] + 1)
    train_and_evaluate(tiny_config(text, *steps, "train.steps=2", arg=ARG), tmp_path / "stopped")
    train_and_evaluate(tiny_config(text, *steps, arg=ARG), tmp_path / "stopped")
    straight, stopped = load_run(tmp_path / "straight")[1], load_run(tmp_path / "stopped")[1]
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)
    assert "".join(generate_from_run(tmp_path / "straight", ["be"], max_new_tokens=3, seed=1))
    with np.load(tmp_path / "straight" / "ponder" / "step_00000004" / "validation.npz") as maps:
        assert maps["ponder_steps"].shape == maps["tokens"].shape == (3, 23)
        assert set(np.unique(maps["ponder_steps"])) <= {0, 1, 2, 3}


PROGRAM = """
import mesh_program
mesh_program.FIELDS |= {"stack": "universal", "positions": "sinusoidal", "step_embedding": "sinusoidal",
    "halting": "act", "halting_bias_init": -1.0, "random_position_start": 5, "convolution_width": 3}
mesh_program.main("data=8", "data=2,fsdp=2,tensor=2")
"""


@pytest.mark.slow
def test_splitting_over_devices_changes_no_loss():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)]),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])["reports"]
    assert len(reports) == 2
    for report in reports.values():
        np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)
        assert report["difference_before"] < 1e-6
        assert report["difference_after"] < 2e-3
