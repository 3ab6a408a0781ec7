"""The tensors of a checkpoint folder: one safetensors file or several with an index, memory-mapped, read by slices."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.interop.errors import PretrainedError, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")

# Names of dtypes in the files; what is not among them are numbers that no parameter is made of.
DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


class TensorFiles:
    """All tensors of a folder by name; nothing is read before a slice of it is asked for.

    Args:
      directory: holds ``model.safetensors``, or its index and the files that this names.

    Attributes:
      names: where each tensor stands: name to file.

    Raises:
      PretrainedError: there are no such files, the only ones there are would have to be unpickled, or the index names
        tensors that are not there.
    """

    def __init__(self, directory: Path):
        import safetensors

        self._opened: dict[Path, Any] = {}
        self._open = safetensors.safe_open
        self._slices: dict[str, Any] = {}
        if (directory / SINGLE).is_file():
            self.names = dict.fromkeys(self._file(directory / SINGLE).keys(), directory / SINGLE)
        elif (directory / INDEX).is_file():
            self.names = self._read_index(directory)
        else:
            raise PretrainedError(_nothing_to_read(directory))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype as files name it: F32, BF16, …."""
        return self._slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of a tensor, read into memory of its own.

        Args:
          name: the tensor.
          index: slices of its first axes, of step 1.

        Raises:
          PretrainedError: a dtype that no parameter has.
        """
        if self.dtype(name) not in DTYPES:
            raise PretrainedError(f"{name} is {self.dtype(name)}, must be one of {', '.join(DTYPES)}")
        found = self._slice(name)
        if not found.get_shape():
            return np.asarray(self._file(self.names[name]).get_tensor(name))
        return np.asarray(found[index or (slice(None),)])

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            self._slices[name] = self._file(self.names[name]).get_slice(name)
        return self._slices[name]

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = self._open(str(path), framework="numpy")
            except Exception as error:  # the library raises a class of its own, and OSError
                raise PretrainedError(f"{path} cannot be read: {error}") from error
        return self._opened[path]

    def _read_index(self, directory: Path) -> dict[str, Path]:
        index = read_json(directory / INDEX).get("weight_map")
        if not isinstance(index, Mapping) or not index:
            raise PretrainedError(f"{directory / INDEX} names no tensors under 'weight_map'")
        files = {name: directory / str(file) for name, file in index.items()}
        absent = {path.name for path in files.values() if path.parent != directory or not path.is_file()}
        if absent:
            raise PretrainedError(f"{directory / INDEX} names files that are not there: {listed(absent)}")
        held = {path: set(self._file(path).keys()) for path in set(files.values())}
        lost = {name for name, path in files.items() if name not in held[path]}
        if lost:
            raise PretrainedError(f"{directory / INDEX} names tensors that its files do not hold: {listed(lost)}")
        return files | {name: path for path, names in held.items() for name in names if name not in files}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      PretrainedError: there is no such file, or it is not one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PretrainedError(f"{path.parent} is not a checkpoint's folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise PretrainedError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise PretrainedError(f"{path} must be a JSON object, is {type(found).__name__}")
    return found


def _nothing_to_read(directory: Path) -> str:
    pickled = [name for name in _PICKLED if (directory / name).is_file()]
    if not pickled:
        return f"{directory} holds neither {SINGLE} nor {INDEX}"
    return (
        f"{directory} holds {pickled[0]} but no {SINGLE}: only safetensors are read, since nothing is unpickled (which "
        "could run code that the file brings); save it again as safetensors with the library that wrote it"
    )
