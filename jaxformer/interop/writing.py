"""Writing tensors as safetensors: one file, or several of a limited size with an index, each made when it is due."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxformer.interop.files import DTYPES, INDEX, SINGLE
from jaxformer.interop.rules import Rule, Source, to_stored


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
      name: in the file.
      parts: (path of a parameter, its layer or None, its rule), in the order in which they stand side by side.
      dtype: as files name it; None = the parameters'.
    """

    name: str
    parts: tuple[tuple[str, int | None, Rule], ...]
    dtype: str | None = None

    def make(self, params: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its numbers."""
        arrays = []
        for path, layer, rule in self.parts:
            array = params[path] if layer is None else params[path][layer]
            arrays.append(to_stored(array, rule))
        axis = 0 if self.parts[0][2].transposed else -1
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        return np.ascontiguousarray(joined, None if self.dtype is None else DTYPES[self.dtype])

    def num_bytes(self, params: Mapping[str, np.ndarray]) -> int:
        """Its size."""
        total = 0
        for path, layer, _ in self.parts:
            leaf = params[path]
            size = leaf.size if layer is None else leaf.size // leaf.shape[0]
            total += size * np.dtype(leaf.dtype if self.dtype is None else DTYPES[self.dtype]).itemsize
        return total


def parts_by_name(sources: Mapping[str, Source]) -> dict[str, tuple[tuple[str, int | None, Rule], ...]]:
    """The parameters that each tensor is made of, in order."""
    found: dict[str, list[tuple[str, int | None, Rule]]] = {}
    for path, source in sources.items():
        for layer, name in enumerate(source.names):
            found.setdefault(name, []).append((path, layer if source.stacked else None, source.rule))
    return {name: tuple(sorted(parts, key=lambda part: part[2].part)) for name, parts in found.items()}


def write_tensors(
    directory: Path, tensors: Sequence[Tensor], params: Mapping[str, np.ndarray], max_file_bytes: int
) -> list[str]:
    """Writes the tensors and, of several files, their index; returns the files' names.

    Args:
      directory: where to.
      tensors: in order.
      params: parameters by path.
      max_file_bytes: size from which on another file is begun.
    """
    import safetensors.numpy

    groups: list[list[Tensor]] = []
    size = total = 0
    for tensor in tensors:
        bytes_ = tensor.num_bytes(params)
        if not groups or size + bytes_ > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size, total = size + bytes_, total + bytes_
    names = [SINGLE] if len(groups) < 2 else [_name(number, len(groups)) for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups or [[]]):
        made = {tensor.name: tensor.make(params) for tensor in group}
        safetensors.numpy.save_file(made, directory / name, metadata={"format": "pt"})
    if len(groups) > 1:
        places = {tensor.name: name for name, group in zip(names, groups) for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return names


def _name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"
