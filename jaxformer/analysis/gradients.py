"""Whether a gradient is right: reverse mode against central differences in float64, for any loss and any tree."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

WHOLE = "(all together)"
"""Name of the row for directions that move every parameter at once."""


class GradientRow(NamedTuple):
    """How the derivatives by one leaf of the tree agree.

    Attributes:
      path: the leaf's path, keys joined by ``/``; or ``WHOLE``.
      num_probes: directions and coordinates that were tried.
      max_error: the largest relative error (see ``check_gradients``); infinite where something is not finite.
      median_error: the median one.
      worst: which probe has the largest error: a coordinate's index, or "direction 2".
      analytic: what the gradient says there, in units of the loss per unit of the parameter.
      numeric: what the difference says there.
    """

    path: str
    num_probes: int
    max_error: float
    median_error: float
    worst: str
    analytic: float
    numeric: float


@dataclass(frozen=True)
class GradientReport:
    """What ``check_gradients`` found.

    Attributes:
      loss: value at the parameters.
      rows: one for each floating leaf that has elements, in the tree's order, and one for all together.
      narrow_dtypes: floating dtypes narrower than float64 that the loss computes in somewhere. Of no account where
        they only choose (a hash, a mask); elsewhere differences are rounded to them, and errors are near 1e-2.
    """

    loss: float
    rows: tuple[GradientRow, ...]
    narrow_dtypes: tuple[str, ...]

    @property
    def max_error(self) -> float:
        """The largest relative error of all."""
        return max(row.max_error for row in self.rows)

    def ok(self, tolerance: float = 1e-6) -> bool:
        """Whether no relative error is above ``tolerance``."""
        return self.max_error <= tolerance

    def summary(self) -> str:
        """A table of text, a line for each row, the largest error first."""
        width = max(len(row.path) for row in self.rows)
        lines = [f"loss {self.loss:.6g}, largest relative error {self.max_error:.2e}"]
        lines += [
            f"{row.path:<{width}}  max {row.max_error:.2e}  median {row.median_error:.2e}  of {row.num_probes:>3}; "
            f"worst {row.worst}: gradient {row.analytic:.9g}, difference {row.numeric:.9g}"
            for row in sorted(self.rows, key=lambda row: -row.max_error)
        ]
        if self.narrow_dtypes:
            lines.append(f"the loss computes in {', '.join(self.narrow_dtypes)} too, which rounds what passes there")
        return "\n".join(lines)


def check_gradients(
    loss: Callable[[Any], Any],
    params: Any,
    *,
    num_directions: int = 3,
    num_coordinates: int = 5,
    step_size: float = 1e-5,
    seed: int = 0,
) -> GradientReport:
    """Compares ``jax.grad(loss)`` with central differences, (loss(p + h u) - loss(p - h u)) / 2h, in float64.

    The differences see the loss as it is called without differentiation, so a wrong backward rule, and a forward rule
    that strays from the function, both show. Each leaf is moved along random unit vectors and along single
    coordinates, and all together along random unit vectors. The relative error of a probe is

        |analytic - numeric| / max(|analytic|, |numeric|, floor)

    with floor = the larger of 1e-3 max |gradient| and 1e6 times the rounding of a difference, eps |loss| / h: a
    derivative below it cannot be measured to six digits. The difference is off by h²/6 times the third derivative
    besides, so a right gradient shows errors from 1e-11 to 1e-7.

    The loss must be smooth within h of the parameters. Hard choices (buckets, top k, routing, ReLU's side, halting)
    are held by a small step except where a parameter stands on the edge of one; there another seed of the parameters
    tells edge from fault. What the loss treats as constant by intent (``stop_gradient``) is an error here: hold it
    fixed in the loss.

    It costs two compilations and 2 (num_directions (leaves + 1) + num_coordinates leaves) evaluations. It runs in
    float64 whether or not ``jax_enable_x64`` is set, so a loss must compute in its parameters' dtype: a model needs
    ``dtype=jnp.float64``, or none of its own.

    Args:
      loss: pure function of the parameters, to a scalar.
      params: tree of arrays of any floating dtype; leaves of other dtypes are passed through and held constant.
      num_directions: random unit vectors for each leaf, and for all together.
      num_coordinates: coordinates of each leaf, drawn without replacement; all of a leaf that has no more.
      step_size: h, in units of the parameters.
      seed: of the directions and coordinates.

    Returns:
      The report; ``report.ok()`` and ``report.summary()`` are what most need.

    Raises:
      ValueError: no floating leaf with elements, complex leaves, a loss that is no float64 scalar, counts that leave
        nothing to try, or a step that is not above 0.
    """
    _check_counts(num_directions, num_coordinates, step_size)
    with jax.enable_x64(True):
        tree = _Tree.of(params)
        traced = jax.jit(loss).trace(tree.restore(tree.vector))
        _check_loss(traced.out_info)
        compiled = traced.lower().compile()
        gradient = tree.flatten(jax.jit(jax.grad(lambda floating: loss(tree.merge(floating))))(tree.floating()))

        def value(vector: Float[np.ndarray, "P"]) -> float:
            return float(compiled(tree.restore(vector)))

        at = value(tree.vector)
        largest = np.abs(gradient[np.isfinite(gradient)]).max(initial=0.0)
        floor = max(1e-3 * largest, 1e6 * np.finfo(np.float64).eps * abs(at) / step_size)
        random = np.random.default_rng(seed)
        rows = []
        for path, start, shape in tree.parts():
            probes = _probes(random, path, start, shape, num_directions, num_coordinates, tree.vector.size)
            rows.append(_row(path, probes, value, tree.vector, gradient, step_size, float(floor)))
    return GradientReport(loss=at, rows=tuple(rows), narrow_dtypes=_narrow_dtypes(str(traced.jaxpr)))


@dataclass(frozen=True)
class _Tree:
    """A tree whose floating leaves are also one float64 vector."""

    leaves: list[Any]
    structure: Any
    paths: dict[int, str]
    vector: Float[np.ndarray, "P"]

    @classmethod
    def of(cls, params: Any) -> "_Tree":
        entries, structure = jax.tree_util.tree_flatten_with_path(params)
        leaves: list[Any] = []
        paths = {}
        for index, (path, leaf) in enumerate(entries):
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
            if not jax.dtypes.issubdtype(jax.numpy.result_type(leaf), np.inexact):
                leaves.append(leaf)
                continue
            if jax.dtypes.issubdtype(jax.numpy.result_type(leaf), np.complexfloating):
                raise ValueError(f"params has the complex leaf {name!r}, must be real: give its parts")
            leaves.append(np.asarray(leaf, np.float64))
            if leaves[index].size:
                paths[index] = name
        if not paths:
            raise ValueError("params has no floating leaf with elements, must have one to differentiate by")
        return cls(leaves, structure, paths, np.concatenate([leaves[index].ravel() for index in paths]))

    def restore(self, vector: Float[np.ndarray, "P"]) -> Any:
        leaves, start = list(self.leaves), 0
        for index in self.paths:
            size = leaves[index].size
            leaves[index] = vector[start : start + size].reshape(leaves[index].shape)
            start += size
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def floating(self) -> list[Any]:
        return [self.leaves[index] for index in self.paths]

    def merge(self, floating: list[Any]) -> Any:
        leaves = list(self.leaves)
        for index, leaf in zip(self.paths, floating, strict=True):
            leaves[index] = leaf
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def flatten(self, floating: list[Any]) -> Float[np.ndarray, "P"]:
        return np.concatenate([np.asarray(leaf).ravel() for leaf in floating])

    def parts(self) -> Iterator[tuple[str, int, tuple[int, ...] | None]]:
        """Path, start in the vector and shape of each leaf; last, without a shape, all together."""
        start = 0
        for index, path in self.paths.items():
            yield path, start, self.leaves[index].shape
            start += self.leaves[index].size
        yield WHOLE, 0, None


def _probes(
    random: np.random.Generator,
    path: str,
    start: int,
    shape: tuple[int, ...] | None,
    num_directions: int,
    num_coordinates: int,
    total: int,
) -> Iterator[tuple[str, Float[np.ndarray, "P"]]]:
    """The vectors of unit length along which a part is moved, each with its name."""
    size = total if shape is None else math.prod(shape)
    for number in range(num_directions):
        vector = np.zeros(total)
        drawn = random.standard_normal(size)
        vector[start : start + size] = drawn / np.linalg.norm(drawn)
        yield f"direction {number}", vector
    if shape is not None:
        for flat in random.choice(size, min(num_coordinates, size), replace=False):
            vector = np.zeros(total)
            vector[start + flat] = 1.0
            yield str(tuple(map(int, np.unravel_index(flat, shape)))), vector


def _row(
    path: str,
    probes: Iterator[tuple[str, Float[np.ndarray, "P"]]],
    value: Callable[[Float[np.ndarray, "P"]], float],
    at: Float[np.ndarray, "P"],
    gradient: Float[np.ndarray, "P"],
    step_size: float,
    floor: float,
) -> GradientRow:
    found = []
    for name, direction in probes:
        numeric = (value(at + step_size * direction) - value(at - step_size * direction)) / (2 * step_size)
        moved = direction != 0.0  # NaN elsewhere is another row's
        analytic = float(gradient[moved] @ direction[moved])
        found.append((_relative_error(analytic, numeric, floor), name, analytic, numeric))
    if not found:
        return GradientRow(path, 0, 0.0, 0.0, "none", 0.0, 0.0)
    error, name, analytic, numeric = max(found, key=lambda entry: entry[0])
    median = float(np.median([entry[0] for entry in found]))
    return GradientRow(path, len(found), error, median, name, analytic, numeric)


def _relative_error(analytic: float, numeric: float, floor: float) -> float:
    if not (math.isfinite(analytic) and math.isfinite(numeric)):
        return math.inf
    scale = max(abs(analytic), abs(numeric), floor)
    return abs(analytic - numeric) / scale if scale else 0.0


def _check_counts(num_directions: int, num_coordinates: int, step_size: float) -> None:
    for name, count in (("num_directions", num_directions), ("num_coordinates", num_coordinates)):
        if count < 0:
            raise ValueError(f"{name} is {count}, must be at least 0")
    if num_directions + num_coordinates == 0:
        raise ValueError("num_directions and num_coordinates are both 0, one must be above 0")
    if not step_size > 0.0:
        raise ValueError(f"step_size is {step_size}, must be above 0")


def _check_loss(output: Any) -> None:
    shape, dtype = getattr(output, "shape", None), getattr(output, "dtype", None)
    if shape != () or dtype != np.float64:
        raise ValueError(
            f"loss gives {output} for float64 parameters, must give a float64 scalar: let it compute in the dtype of "
            f"its parameters, a model with dtype=jnp.float64"
        )


def _narrow_dtypes(program: str) -> tuple[str, ...]:
    named = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    return tuple(name for short, name in named.items() if re.search(rf"\b{short}\[", program))
