"""From tensors in files to parameters on their devices, one at a time, each device reading its own slices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxformer.interop.checkpoint import Checkpoint
from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.files import DTYPES
from jaxformer.interop.rules import Source

Shardings = Callable[[str, tuple[int, ...]], Sharding] | Sharding | None


def read_parameter(
    checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> jax.Array:
    """One parameter; of a stacked one each layer goes into its place of an array that was made before.

    Args:
      checkpoint: whose files are read.
      source: where the parameter comes from.
      shape: the parameter's.
      dtype: the parameter's; values are converted one tensor at a time.
      sharding: where it goes. Only the slices that this process's devices hold are read.
    """
    read: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        # Devices that hold the same slices share what was read.
        key = tuple(one.indices(size) for one, size in zip(index or (), shape))
        if key not in read:
            read[key] = _read(checkpoint, source, shape, dtype, tuple(slice(*bounds) for bounds in key))
        return read[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _read(
    checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    def layer(number: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        stored = checkpoint.files.read(checkpoint.stored[source.names[number]], source.stored_index(index, shape))
        return stored.T if source.rule.transposed else stored

    if not source.stacked:
        return np.ascontiguousarray(layer(0, index, shape), dtype)
    numbers = range(*index[0].indices(shape[0]))
    out = np.empty((len(numbers), *(one.stop - one.start for one in index[1:])), dtype)
    for row, number in enumerate(numbers):
        out[row] = layer(number, index[1:], shape[1:])
    return out


def check_shapes(
    checkpoint: Checkpoint, sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """What is wrong with tensors that have not the shape that config.json asks for, by the parameter's path."""
    wrong = {}
    for path, source in sources.items():
        expected = source.stored_shape(shapes[path][1:] if source.stacked else shapes[path])
        for name in source.names:
            found = checkpoint.files.shape(checkpoint.stored[name])
            if found != expected:
                wrong[path] = f"{checkpoint.stored[name]} is {list(found)}, must be {list(expected)}"
    return wrong


def widest_dtype(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> str:
    """The dtype that holds every value of the tensors, by name.

    Raises:
      PretrainedError: a tensor is of another kind than numbers with a point.
    """
    kinds = {checkpoint.files.dtype(checkpoint.stored[name]) for source in sources.values() for name in source.names}
    unknown = kinds - set(DTYPES)
    if unknown:
        raise PretrainedError(
            f"{checkpoint.directory} holds tensors of dtype {', '.join(sorted(unknown))}, must be one of "
            f"{', '.join(DTYPES)}: quantised weights can't be read"
        )
    widest = jnp.dtype(jnp.bfloat16) if kinds == {"BF16"} else None
    for kind in sorted(kinds):
        widest = DTYPES[kind] if widest is None else jnp.promote_types(widest, DTYPES[kind])
    return "float32" if widest is None else str(widest)


def find_sharding(shardings: Shardings, path: str, shape: tuple[int, ...]) -> Sharding:
    """Where a parameter goes: as asked for, else to the first device."""
    if shardings is None:
        return SingleDeviceSharding(jax.devices()[0])
    return shardings if isinstance(shardings, Sharding) else shardings(path, shape)
