"""Deep models in runs: a stopped run goes on exactly, and on eight devices the losses are those of one.

Where each property of each model is tested, as tests/models/test_….py and tests/training/test_….py:

model                  causal by gradient   decoding             learning             resumed bit-equal  eight devices
reversible stack       reversible           reversible           reversible           here               here
Reformer               reformer             reformer             reformer             here               here
Sparse Transformer     sparse_transformer   sparse_transformer   sparse_transformer   here               here
Universal Transformer  universal            universal            universal            universal_runs     universal_runs
Switch Transformer     experts              experts              experts              expert_runs        expert_runs

Decoding with a cache is the full pass: of Reformer where a chunk holds the row, else a rule of its attention, whose
choice of keys (not what it reads of them) depends on later tokens in training: tests/attention/test_lsh.py has both.
Of experts it is the full pass of evaluation, which drops nothing.

All tests here are slow: each compiles the programs of two or three runs, or of nine devices.
"""

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
from jaxformer.training.metrics import read_metrics

STEPS = ("train.steps=4", "checkpoint.every_steps=2", "schedule.decay_steps=4", "model.dropout_rate=0.1")
# The argument of the config, and its changes.
RUNS = {
    "reversible": ("size=tiny", ()),
    "reformer": (
        "size=tiny,model=reformer",
        (
            "model.positions=axial",
            "model.mlp_chunk_size=8",
            "model.attention_args.local.window=5",
            "model.attention_args.lsh.num_buckets=4",
            "model.attention_args.lsh.chunk_size=8",
            "loss.chunk_size=8",
        ),
    ),
    "sparse": (
        "size=tiny,model=sparse",
        ("model.positions=axial", "model.use=interleaved", "model.stride=5", "model.num_summary=1"),
    ),
}


def _figures(workdir):
    return [{**record, "tokens_per_second": None} for record in read_metrics(workdir / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_stopped_run_goes_on_exactly(name, text, tiny_config, tmp_path):
    arg, changes = RUNS[name]

    def train(workdir, *more):
        run = tiny_config(text, *STEPS, *changes, *more, arg=arg)
        if name == "reversible":
            with run.config.unlocked():
                run.config.model.residual = "reversible"
        train_and_evaluate(run, workdir)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(straight)
    train(stopped, "train.steps=2")
    train(stopped)
    model, expected, _ = load_run(straight)
    assert model.config.residual == ("plain" if name == "sparse" else "reversible")
    jax.tree.map(np.testing.assert_array_equal, expected, load_run(stopped)[1])
    # The stopped run was evaluated at its end too.
    lines = [line for line in _figures(stopped) if (line["split"], line["step"]) != ("validation", 2)]
    assert lines == _figures(straight)
    assert "".join(generate_from_run(straight, ["be"], max_new_tokens=3, seed=1))


# The model's name, and what differs from the fields of the program. Reformer without biases: the gradient of keys'
# biases is zero but for rounding, of which Adam makes steps of full length.
MESH_MODELS = {
    "reversible": ("gpt", {"residual": "reversible"}),
    "reformer": (
        "reformer",
        {
            "num_layers": 2,
            "axial_shape": (2, 4),
            "attention": ("local", "lsh"),
            "attention_args": {
                "local": {"window": 2},
                "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 2},
            },
            "attention_dropout_rate": 0.0,
            "mlp_chunk_size": 4,
            "use_bias": False,
        },
    ),
    "sparse": (
        "sparse_transformer",
        {
            "num_layers": 2,
            "axial_shape": (3, 3),
            "pattern": "fixed",
            "use": "interleaved",
            "stride": 3,
            "num_summary": 1,
            "attention_dropout_rate": 0.0,
        },
    ),
}
MESHES = ("data=8", "data=2,fsdp=2,tensor=2")
PROGRAM = """
import mesh_program
mesh_program.MODEL = {model!r}
mesh_program.FIELDS |= {fields!r}
mesh_program.main(*{meshes!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MESH_MODELS)
def test_eight_devices_train_like_one(name):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Unoptimised code compiles in half the time; what it computes is the same.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)]),
    }
    model, fields = MESH_MODELS[name]
    program = PROGRAM.format(model=model, fields=fields, meshes=MESHES)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])["reports"]
    for mesh in MESHES:
        report = reports[mesh]
        np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)
        assert report["difference_before"] < 1e-6
        assert report["difference_after"] < 2e-3
        assert report["list"] == []
