"""How a tensor of a checkpoint lies in a parameter: names as data, orientation, and parts of fused tensors."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

LAYER = "{}"
"""Stands for the number of a layer in the names of tensors."""

_UNROLLED = re.compile(r"(^|/)layers_(\d+)(/|$)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter and the tensor (of each layer) that it is read from.

    Attributes:
      path: of the parameter, joined by ``/``; of layers in the stacked layout: ``decoder/layers/attention/out/kernel``.
      name: of the tensor, with ``{}`` for the number of the layer.
      transposed: the tensor is [outputs, inputs], as PyTorch's Linear has it, and the parameter [inputs, outputs].
      part: (number, count): the tensor holds that many parameters side by side along its last axis.
    """

    path: str
    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)


def linear(path: str, name: str) -> tuple[Rule, ...]:
    """Kernel and bias of a PyTorch Linear, which is stored [outputs, inputs]."""
    return Rule(f"{path}/kernel", f"{name}.weight", transposed=True), Rule(f"{path}/bias", f"{name}.bias")


def fused(paths: Sequence[str], name: str) -> tuple[Rule, ...]:
    """Kernels and biases of GPT-2's Conv1D, which is stored [inputs, outputs], several side by side."""
    parts = [(path, (number, len(paths))) for number, path in enumerate(paths)]
    return tuple(
        Rule(f"{path}/{ours}", f"{name}.{theirs}", part=part)
        for path, part in parts
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    )


def norm(path: str, name: str) -> tuple[Rule, ...]:
    """Scale and bias of a norm."""
    return Rule(f"{path}/scale", f"{name}.weight"), Rule(f"{path}/bias", f"{name}.bias")


def table(path: str, name: str) -> tuple[Rule, ...]:
    """Rows of an embedding."""
    return (Rule(f"{path}/embedding", f"{name}.weight"),)


def split_layer(path: str) -> tuple[str, int | None]:
    """A parameter's path in the stacked layout, and its layer where it stands in an unrolled stack."""
    found = _UNROLLED.search(path)
    if found is None:
        return path, None
    return _UNROLLED.sub(r"\1layers\3", path), int(found.group(2))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one parameter comes from.

    Attributes:
      rule: the rule that found it.
      names: the tensor's name; of a stacked parameter those of all layers, in order.
      stacked: the parameter has a leading axis of layers.
    """

    rule: Rule
    names: tuple[str, ...]
    stacked: bool

    def stored_index(self, index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of a stored tensor that hold the slices ``index`` of one layer's parameter of that shape."""
        number, count = self.rule.part
        if count > 1:
            start, stop, _ = index[-1].indices(shape[-1])
            index = (*index[:-1], slice(start + number * shape[-1], stop + number * shape[-1]))
        return index[::-1] if self.rule.transposed else index

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that holds one layer's parameter of that shape."""
        shape = (*shape[:-1], shape[-1] * self.rule.part[1])
        return shape[::-1] if self.rule.transposed else shape


def find_sources(shapes: Mapping[str, tuple[int, ...]], rules: Sequence[Rule]) -> tuple[dict[str, Source], list[str]]:
    """Where each parameter comes from, and the paths that no rule knows.

    Args:
      shapes: of the parameters by path; stacked (``decoder/layers/…``) or unrolled (``decoder/layers_3/…``).
      rules: of the body and of the head.
    """
    by_path = {rule.path: rule for rule in rules}
    found, unknown = {}, []
    for path, shape in shapes.items():
        stacked_path, layer = split_layer(path)
        rule = by_path.get(stacked_path)
        if rule is None:
            unknown.append(path)
            continue
        stacked = layer is None and LAYER in rule.name
        numbers = range(shape[0]) if stacked else (layer,)
        names = tuple(rule.name.replace(LAYER, str(number)) for number in numbers)
        found[path] = Source(rule, names, stacked)
    return found, unknown


def matches(name: str, rules: Sequence[Rule]) -> bool:
    """Whether a tensor's name is that of a rule, of whatever layer."""
    return any(re.fullmatch(re.escape(rule.name).replace(r"\{\}", r"\d+"), name) for rule in rules)


def to_stored(array: np.ndarray, rule: Rule) -> np.ndarray:
    """One layer's parameter as the tensor (or the part of a fused one) holds it."""
    return array.T if rule.transposed else array
