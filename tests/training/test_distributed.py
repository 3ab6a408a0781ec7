"""Several processes as one program: two over loopback train like one device."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxformer.training.distributed import start_distributed

PROGRAM = pathlib.Path(__file__).with_name("mesh_program.py")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


MESH = "data=2,fsdp=2,tensor=2"


def start_process(process_id, num_processes, address):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Unoptimised code compiles in half the time; what it computes is the same.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(process_id),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), MESH],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_train_like_one_device():
    address = f"127.0.0.1:{free_port()}"
    processes = [start_process(index, 2, address) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
    answers = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert [answer["processes"] for answer in answers] == [2, 2]
    first, second = (answer["reports"][MESH] for answer in answers)
    np.testing.assert_allclose(first["losses"], first["single_losses"], rtol=0, atol=1e-5)
    assert first["difference_before"] < 1e-6
    assert first["losses"] == second["losses"]
    # Each loads half of the rows; were the model alone split, both would load them all.
    assert (first["data_shard"], second["data_shard"]) == ([0, 2], [1, 2])
    assert first["whole_model_shard"] == second["whole_model_shard"] == [0, 1]


def test_without_a_coordinator_nothing_starts(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    assert start_distributed() is False


@pytest.mark.parametrize(
    ("num_processes", "process_id", "message"),
    [("2", None, "set both or neither"), ("two", "0", "JAX_NUM_PROCESSES is 'two'"), ("2", "-1", "JAX_PROCESS_ID")],
)
def test_bad_environment_is_refused(monkeypatch, num_processes, process_id, message):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    for name, value in (("JAX_NUM_PROCESSES", num_processes), ("JAX_PROCESS_ID", process_id)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        start_distributed()
