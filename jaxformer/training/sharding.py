"""Device meshes and layouts: where parameters, optimizer state and batches live.

Model code knows no mesh. A table of rules maps parameter paths to mesh axes, the compiler does the rest (all axes are
of type Auto). Optimizer moments follow their parameters because their paths end in the parameter's path. Layout as in
Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3 (``tensor``), and Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054 (``fsdp``).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.training.parameter_paths import parameter_path

MESH_AXES = ("data", "fsdp", "tensor", "expert")
"""data: rows of the batch; fsdp: rows, and slices of the parameters; tensor: heads and features; expert: experts."""

BATCH_AXES = ("data", "fsdp")

PartitionRules = Sequence[tuple[str, tuple[str | None, ...]]]

PARTITION_RULES: PartitionRules = (
    (r"experts/(gate|up)/kernel$", ("expert", "fsdp", "tensor")),
    (r"experts/down/kernel$", ("expert", "tensor", "fsdp")),
    (r"experts/(gate|up)/bias$", ("expert", "tensor")),
    (r"experts/down/bias$", ("expert", None)),
    (r"token_embedding/embedding$", ("tensor", "fsdp")),
    (r"position_embedding/(axis_\d+/)?embedding$", (None, "fsdp")),
    (r"(query|key|value|gate|up|head)/kernel$", ("fsdp", "tensor")),
    (r"(query|key|value|gate|up|head)/bias$", ("tensor",)),
    (r"(out|down)/kernel$", ("tensor", "fsdp")),
)
"""(regular expression, mesh axis of each of the last dimensions); the first that finds a path wins. Dimensions before
those, such as the layers of a stack, and parameters that no rule finds are the same on every device."""


def make_mesh(
    *, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges devices in a mesh with the axes ``MESH_AXES``.

    Args:
      data: devices along the axis; -1, for one axis at most: all that remain.
      fsdp: the same.
      tensor: the same.
      expert: the same.
      devices: the devices; None = all of all processes.

    Returns:
      The mesh, its axes of type Auto.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or two are -1.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, expert)))
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
        raise ValueError(f"mesh sizes are {sizes}, must be at least 1, one of them at most -1 (the rest)")
    taken = int(np.prod([size for size in sizes.values() if size != -1]))
    if free and len(devices) % taken == 0:
        sizes[free[0]] = len(devices) // taken
    if int(np.prod(list(sizes.values()))) != len(devices):
        raise ValueError(f"mesh sizes are {sizes}, must multiply to the number of devices, {len(devices)}")
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices)


def partition_spec(
    path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: PartitionRules = PARTITION_RULES
) -> tuple[PartitionSpec, list[str]]:
    """Finds how one array is laid out.

    Args:
      path: the array's path in its tree, joined by ``/``.
      shape: its shape.
      mesh: the mesh, or an abstract one where there are no such devices.
      rules: table like ``PARTITION_RULES``.

    Returns:
      The layout, and a line for each dimension that should have been split but does not divide.
    """
    axes = next((axes for pattern, axes in rules if re.search(pattern, path)), ())
    if len(axes) > len(shape):
        return PartitionSpec(), []
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    kept: list[str | None] = []
    replicated = []
    for dim, axis in zip(shape, axes):
        divides = axis is None or dim % mesh.shape[axis] == 0
        kept.append(axis if divides else None)
        if not divides:
            replicated.append(f"{path} {shape}: {dim} does not divide by {axis}={mesh.shape[axis]}")
    return PartitionSpec(*kept), replicated


def state_shardings(
    abstract_state: Any, mesh: Mesh | AbstractMesh, rules: PartitionRules = PARTITION_RULES
) -> tuple[Any, list[str]]:
    """Lays out a train state.

    Args:
      abstract_state: tree of shapes.
      mesh: the mesh, or an abstract one where there are no such devices.
      rules: table like ``PARTITION_RULES``.

    Returns:
      A tree of ``NamedSharding`` like the state, and a line for each dimension that is replicated because it does
      not divide by its axis.
    """
    replicated: list[str] = []

    def sharding(path, leaf):
        spec, lines = partition_spec(parameter_path(path), leaf.shape, mesh, rules)
        replicated.extend(lines)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, abstract_state), replicated


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the layout of a batch: rows split over the axes ``data`` and ``fsdp``."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def shard_batch(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Places a batch on the mesh.

    Args:
      batch: this process's rows of every array, as ``data_shard`` assigns them.
      mesh: the mesh.

    Returns:
      Global arrays, rows split over ``data`` and ``fsdp``.

    Raises:
      ValueError: the rows do not divide by the devices that this process feeds.
    """
    sharding = batch_sharding(mesh)
    _, count = data_shard(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"] // count
    for name, rows in batch.items():
        if rows.shape[0] % parts:
            raise ValueError(f"batch[{name!r}] has {rows.shape[0]} rows in this process, must divide by {parts}")
    return {name: jax.make_array_from_process_local_data(sharding, np.asarray(rows)) for name, rows in batch.items()}


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Tells which part of each batch this process has to load.

    Processes whose devices hold the same rows (they split the model, not the batch) load the same part.

    Returns:
      The part's index and the number of parts.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    slices: Any = batch_sharding(mesh).devices_indices_map((rows,))
    first_rows: dict[int, int] = {}
    for device, (part,) in slices.items():
        start = part.indices(rows)[0]
        first_rows[device.process_index] = min(start, first_rows.get(device.process_index, rows))
    order = sorted(set(first_rows.values()))
    return order.index(first_rows[jax.process_index()]), len(order)
