"""Memory that a step frees is there for the next: counted in page faults of a process of its own."""

import os
import subprocess
import sys

import pytest

from jaxformer.training.memory import SWITCH, keep_freed_memory

# Pages of 4 KiB: a program with 64 MiB of temporaries meets 16,384 of them where it gets them anew.
PROGRAM = """
import resource
from jaxformer.training.memory import keep_freed_memory
print(keep_freed_memory())
import jax, jax.numpy as jnp
x = jnp.ones((4096, 64))
step = jax.jit(lambda x: (jnp.sin(x @ x.T) @ x).sum())
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# The first steps meet pages, and where the last step's memory is not free yet.
print(min(faults))
"""


def _run(**environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    was_set, faults = result.stdout.split()
    return was_set == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is the GNU C library's")
def test_a_step_meets_no_pages_anew():
    was_set, faults = _run()
    if not was_set:
        pytest.skip("not the GNU C library")
    _, usual = _run(**{SWITCH: "0"})
    assert usual > 10_000
    assert faults < usual / 20


@pytest.mark.parametrize("name", [SWITCH, "GLIBC_TUNABLES"])
def test_settings_of_the_environment_stand(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert keep_freed_memory() is False
