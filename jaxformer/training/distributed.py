"""Several processes as one program, on JAX's own engine."""

import os

import jax

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_distributed(timeout: int = 300) -> bool:
    """Joins the other processes of a run, if the environment names a coordinator.

    Set ``JAX_COORDINATOR_ADDRESS=host:port``, and ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` unless the cluster
    (Slurm, Open MPI, Kubernetes, Cloud TPU) tells them. Call before anything else touches a device.

    Args:
      timeout: seconds to wait for the others.

    Returns:
      True if this process is now one of several; False if the environment names no coordinator.

    Raises:
      ValueError: a variable is not an integer, or only one of the two numbers is set.
    """
    address, *numbers = (os.environ.get(name) for name in ENVIRONMENT)
    if address is None:
        return False
    if (numbers[0] is None) != (numbers[1] is None):
        raise ValueError(f"{ENVIRONMENT[1]} is {numbers[0]}, {ENVIRONMENT[2]} is {numbers[1]}: set both or neither")
    num_processes, process_id = (_integer(name, text) for name, text in zip(ENVIRONMENT[1:], numbers))
    jax.distributed.initialize(address, num_processes, process_id, initialization_timeout=timeout)
    return True


def _integer(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, must be a non-negative integer")
    return int(text)
