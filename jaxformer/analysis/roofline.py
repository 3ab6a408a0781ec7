"""The least time of a model's phases on a device, and what bounds it: its arithmetic or its memory.

    cost = model_cost(gpt("small", dtype="bfloat16"), batch_size=8, length=1024)
    roofline(cost, DEVICES["h100"])["decode"].bound  # "memory"

Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model for multicore architectures",
CACM 52(4). A part takes the longer of operations / peak and bytes / bandwidth, and parts follow one another. Real
programs take longer: kernels reach some share of the peaks, and element-wise operations read and write besides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxformer.analysis.costs.work import Work
from jaxformer.analysis.model_cost import ModelCost

COMPUTE = "compute"
MEMORY = "memory"


@dataclass(frozen=True)
class Device:
    """Peak figures of one accelerator.

    Attributes:
      peak_operations: of dense matrix products, operations per second, by dtype of what is multiplied; float32 as JAX
        multiplies it by default (`jax.lax.Precision.DEFAULT`: TF32 on GPUs that have it, bfloat16 on TPUs).
      bandwidth: of its memory, bytes per second.
      memory_bytes: how much it holds; None = not known.
      source: where the figures stand.
    """

    peak_operations: Mapping[str, float]
    bandwidth: float
    memory_bytes: float | None = None
    source: str = ""


def _gpu(half: float, single: float, bandwidth: float, gigabytes: float, source: str) -> Device:
    peaks = {"bfloat16": half, "float16": half, "float32": single}
    return Device(peaks, bandwidth, gigabytes * 1e9, source)


def _tpu(peak: float, bandwidth: float, gigabytes: float, source: str) -> Device:
    return _gpu(peak, peak, bandwidth, gigabytes, source)


DEVICES: dict[str, Device] = {
    "a100": _gpu(312e12, 156e12, 2039e9, 80, "NVIDIA A100 80GB SXM datasheet, without sparsity"),
    "h100": _gpu(989.4e12, 494.7e12, 3350e9, 80, "NVIDIA H100 SXM datasheet, without sparsity"),
    "h200": _gpu(989.4e12, 494.7e12, 4800e9, 141, "NVIDIA H200 SXM datasheet, without sparsity"),
    "l4": _gpu(121e12, 60e12, 300e9, 24, "NVIDIA L4 datasheet, without sparsity"),
    "t4": Device({"float16": 65e12, "float32": 8.1e12}, 320e9, 16e9, "NVIDIA T4 datasheet (no bfloat16 units)"),
    "tpu_v4": _tpu(275e12, 1200e9, 34.4, "Google Cloud documentation, TPU v4, per chip (32 GiB)"),
    "tpu_v5e": _tpu(197e12, 819e9, 16, "Google Cloud documentation, TPU v5e, per chip"),
    "tpu_v5p": _tpu(459e12, 2765e9, 95, "Google Cloud documentation, TPU v5p, per chip"),
    "tpu_v6e": _tpu(918e12, 1638e9, 32, "Google Cloud documentation, TPU v6e, per chip"),
}
"""Accelerators by name."""


def choose_device(name: str | None, peak_operations: float | None, bandwidth: float | None) -> Device | None:
    """A device by name, or one of given figures, for every dtype; None for neither.

    Raises:
      ValueError: an unknown name, both, or one figure without the other.
    """
    if name is None and peak_operations is None and bandwidth is None:
        return None
    if name is not None and (peak_operations is not None or bandwidth is not None):
        raise ValueError(f"device is {name!r}; peak_flops and bandwidth must then be left out.")
    if name is not None and name not in DEVICES:
        raise ValueError(
            f"device is {name!r}; it must be one of {', '.join(DEVICES)}, or give peak_flops and bandwidth."
        )
    if name is not None:
        return DEVICES[name]
    if peak_operations is None or bandwidth is None:
        raise ValueError(f"peak_flops is {peak_operations} and bandwidth {bandwidth}; both must be given, or neither.")
    return _gpu(peak_operations, peak_operations, bandwidth, math.inf, "given")


@dataclass(frozen=True)
class Bound:
    """The least time of a pass, and why.

    Attributes:
      seconds: the least time.
      compute_seconds: of which parts that wait for arithmetic take so much.
      bound: ``compute`` or ``memory``: what the greater part of the time is spent on.
      parts: the same of each part; empty in a part's own.
    """

    seconds: float
    compute_seconds: float
    bound: str
    parts: Mapping[str, "Bound"]


def roofline(cost: ModelCost, device: Device) -> dict[str, Bound]:
    """The least time of each phase of a model on a device.

    Args:
      cost: of the model.
      device: one of `DEVICES`, or figures of your own.

    Returns:
      `Bound` by phase, each with its parts.

    Raises:
      ValueError: figures that are not positive, or no peak of the model's dtype.
    """
    peak = device.peak_operations.get(cost.dtype)
    if peak is None:
        known = ", ".join(device.peak_operations)
        raise ValueError(f"device has no peak of {cost.dtype}, the model's dtype; it must be one of {known}.")
    for name, value in {"peak_operations": peak, "bandwidth": device.bandwidth}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be a positive number.")
    return {
        phase: _together({part: _bound(work, peak, device.bandwidth) for part, work in works.items()})
        for phase, works in cost.phases.items()
    }


def _bound(work: Work, peak: float, bandwidth: float) -> Bound:
    compute, memory = work.matmul / peak, work.moved_bytes / bandwidth
    if compute >= memory:
        return Bound(compute, compute, COMPUTE, {})
    return Bound(memory, 0.0, MEMORY, {})


def _together(parts: Mapping[str, Bound]) -> Bound:
    seconds = sum(part.seconds for part in parts.values())
    compute = sum(part.compute_seconds for part in parts.values())
    return Bound(seconds, compute, COMPUTE if 2 * compute >= seconds else MEMORY, parts)
