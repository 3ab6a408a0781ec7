"""Meshes and layouts: rules on paths, and training on eight simulated devices equal to training on one."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxformer.models import MODELS
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.sharding import (
    BATCH_AXES,
    MESH_AXES,
    data_shard,
    make_mesh,
    partition_spec,
    shard_batch,
    state_shardings,
)
from jaxformer.training.state import abstract_params, abstract_state

PROGRAM = pathlib.Path(__file__).with_name("mesh_program.py")


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.get(name, 1) for name in MESH_AXES), MESH_AXES)


@functools.cache
def report_of(sizes):
    """What the training program reports of a mesh, from a process of its own with eight simulated devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Unoptimised code compiles in half the time; what it computes is the same.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, str(PROGRAM), sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["reports"][sizes]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["data=2,fsdp=2,tensor=2", "data=8"])
def test_eight_devices_train_like_one(sizes):
    report = report_of(sizes)
    assert report["losses"][-1] < report["losses"][0]
    np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)
    assert report["difference_before"] < 1e-6
    assert report["difference_after"] < 1e-4


def test_parameters_and_moments_stay_split_over_the_mesh():
    report = report_of("data=2,fsdp=2,tensor=2")
    up = "decoder/layers/mlp/up/kernel"
    for name in (f"params/{up}", f"average/params/{up}", *(f"opt_state/1/{moment}/{up}" for moment in ("mu", "nu"))):
        assert report["layouts"][name] == str(PartitionSpec(None, "fsdp", "tensor")), name
    assert report["list"] == []


@pytest.mark.slow
def test_splitting_rows_moves_no_rows_between_devices():
    assert report_of("data=8")["kinds"] == ["all-reduce"]


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("params/decoder/layers/attention/query/kernel", (3, 8, 12), (None, "fsdp", "tensor")),
        ("params/decoder/layers_1/attention/query/kernel", (8, 12), ("fsdp", "tensor")),
        ("opt_state/1/mu/decoder/layers/attention/out/kernel", (3, 12, 8), (None, "tensor", "fsdp")),
        ("params/decoder/layers/mlp/down/kernel", (3, 20, 8), (None, "tensor", "fsdp")),
        ("params/decoder/layers/mlp/up/bias", (3, 20), (None, "tensor")),
        ("params/decoder/layers/mlp/experts/gate/kernel", (3, 4, 8, 20), (None, "expert", "fsdp", "tensor")),
        ("params/decoder/layers/mlp/experts/down/kernel", (3, 4, 20, 8), (None, "expert", "tensor", "fsdp")),
        ("params/decoder/layers/mlp/experts/up/bias", (3, 4, 20), (None, "expert", "tensor")),
        ("params/decoder/layers/mlp/experts/down/bias", (3, 4, 8), (None, "expert", None)),
        ("params/decoder/layers/mlp/shared/up/kernel", (3, 8, 20), (None, "fsdp", "tensor")),
        ("params/token_embedding/embedding", (14, 8), ("tensor", "fsdp")),
        ("params/decoder/position_embedding/embedding", (7, 8), (None, "fsdp")),
        ("params/decoder/layers/mlp/down/bias", (3, 8), (None, None)),
        ("params/decoder/final_norm/scale", (8,), (None,)),
        ("opt_state/1/count", (), ()),
    ],
)
def test_rules_lay_out_by_path(path, shape, expected):
    spec, replicated = partition_spec(path, shape, abstract_mesh(data=2, fsdp=2, tensor=2, expert=2))
    assert tuple(spec) == expected
    assert replicated == []


def test_dimension_that_does_not_divide_is_replicated_and_listed():
    spec, replicated = partition_spec("token_embedding/embedding", (13, 8), abstract_mesh(fsdp=4, tensor=2))
    assert tuple(spec) == (None, "fsdp")
    assert replicated == ["token_embedding/embedding (13, 8): 13 does not divide by tensor=2"]


def test_every_matrix_of_a_model_is_split_and_its_moments_with_it():
    model = MODELS["gpt"](
        "tiny", activation="swiglu", num_kv_heads=2, tie_embeddings=False, vocab_multiple=2, positions="rotary"
    )
    batch = {"tokens": jnp.zeros((2, 5), jnp.int32)}
    optimizer, _ = make_optimizer(learning_rate=0.1, params=abstract_params(model, batch))
    shardings, replicated = state_shardings(abstract_state(model, optimizer, batch), abstract_mesh(fsdp=2, tensor=2))
    assert replicated == []
    specs = jax.tree.map(lambda sharding: tuple(sharding.spec), shardings)
    is_spec = {"is_leaf": lambda node: type(node) is tuple}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs.params, **is_spec):
        name = jax.tree_util.keystr(path)
        assert ({"fsdp", "tensor"} <= set(spec)) == ("kernel" in name or "embedding" in name), name
    moments = specs.opt_state[1]
    assert moments.mu == moments.nu == specs.params


def test_mesh_has_every_axis_of_type_auto():
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert data_shard(mesh) == (0, 1)
    assert set(BATCH_AXES) < set(MESH_AXES)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"fsdp": 3}, {"data": -1, "fsdp": -1}, {"tensor": 0}, {"data": -2}])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="mesh sizes are"):
        make_mesh(**sizes, devices=jax.devices()[:1])


def test_batch_keeps_its_values_on_the_mesh():
    mesh = make_mesh(devices=jax.devices()[:1])
    batch = {"tokens": np.arange(15, dtype=np.int32).reshape(3, 5)}
    placed = shard_batch(batch, mesh)
    np.testing.assert_array_equal(placed["tokens"], batch["tokens"])
    assert placed["tokens"].sharding.spec == PartitionSpec(BATCH_AXES)
