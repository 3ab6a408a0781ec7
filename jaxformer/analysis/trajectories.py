"""The paths of optimizers on surfaces of two variables that show what each is good and bad at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.analysis.plots import require_matplotlib


@dataclass(frozen=True)
class Surface:
    """A function of two variables.

    Attributes:
      name: key of ``SURFACES``.
      function: of a point [2], to a scalar; smooth.
      minima: all points with the lowest value.
      start: where paths usually begin.
      window: ((x from, x to), (y from, y to)) worth plotting.
      summary: what it is hard for.
    """

    name: str
    function: Callable[[Float[Array, "2"]], Float[Array, ""]]
    minima: tuple[tuple[float, float], ...]
    start: tuple[float, float]
    window: tuple[tuple[float, float], tuple[float, float]]
    summary: str

    def distance(self, point: Float[Array | np.ndarray, "... 2"]) -> Float[Array, "..."]:
        """Distance of points from the nearest minimum."""
        apart = jnp.asarray(point)[..., None, :] - jnp.asarray(self.minima).reshape(
            (1,) * (jnp.ndim(point) - 1) + (-1, 2)
        )
        return jnp.linalg.norm(apart, axis=-1).min(-1)


def _valley(point: Float[Array, "2"]) -> Float[Array, ""]:
    return 0.5 * (point[0] ** 2 + 20.0 * point[1] ** 2)


def _rosenbrock(point: Float[Array, "2"]) -> Float[Array, ""]:
    return (1.0 - point[0]) ** 2 + 100.0 * (point[1] - point[0] ** 2) ** 2


def _saddle(point: Float[Array, "2"]) -> Float[Array, ""]:
    return 0.5 * (point[0] ** 2 - point[1] ** 2) + 0.25 * point[1] ** 4


SURFACES: dict[str, Surface] = {
    "valley": Surface(
        name="valley",
        function=_valley,
        minima=((0.0, 0.0),),
        start=(-4.0, 1.5),
        window=((-5.0, 2.0), (-2.0, 2.0)),
        summary="x²/2 + 10 y²: curvatures 1 and 20, so that a rate below 2/20 crawls along the first axis",
    ),
    "rosenbrock": Surface(
        name="rosenbrock",
        function=_rosenbrock,
        minima=((1.0, 1.0),),
        start=(-1.2, 1.0),
        window=((-2.0, 2.0), (-1.0, 3.0)),
        summary="(1 - x)² + 100 (y - x²)²: a bent valley with a nearly flat floor (Rosenbrock 1960)",
    ),
    "saddle": Surface(
        name="saddle",
        function=_saddle,
        minima=((0.0, 1.0), (0.0, -1.0)),
        start=(-2.0, 0.01),
        window=((-2.5, 1.0), (-1.5, 1.5)),
        summary="(x² - y²)/2 + y⁴/4: the gradient leads to the saddle at 0 first, and off it slowly",
    ),
}
"""Surfaces by name."""


@runtime_checkable
class Optimizer(Protocol):
    """What is asked of an optimizer: an optax transformation whose update takes ``step``, as of ``make_optimizer``."""

    init: Any
    update: Any


def trajectory(
    surface: Surface | str,
    optimizer: Optimizer,
    *,
    steps: int,
    start: tuple[float, float] | None = None,
) -> Float[Array, "points 2"]:
    """The points that an optimizer visits, by the exact gradient, in one scan.

    The parameters are a tree {"kernel": [2, 1]}: a matrix of one column, so that Muon treats it as one (and goes along
    the unit vector of its momentum). ``jaxformer.training.trajectories`` has this by an optimizer's name.

    Args:
      surface: a ``Surface``, or a key of ``SURFACES``.
      optimizer: made for parameters like ``point_params()``.
      steps: updates, at least 1.
      start: the first point; None = the surface's own.

    Returns:
      float32 [steps + 1, 2]; the first is the start.

    Raises:
      ValueError: unknown surface, or steps below 1.
    """
    surface = _find(surface)
    if steps < 1:
        raise ValueError(f"steps is {steps}, must be at least 1")
    params = point_params(surface.start if start is None else start)

    def one(carry: tuple[Any, Any], step: Array) -> tuple[tuple[Any, Any], Float[Array, "2"]]:
        params, state = carry
        gradient = jax.grad(lambda params: surface.function(params["kernel"][:, 0]))(params)
        updates, state = optimizer.update(gradient, state, params, step=step)
        return (jax.tree.map(jnp.add, params, updates), state), params["kernel"][:, 0]

    (last, _), points = jax.lax.scan(one, (params, optimizer.init(params)), jnp.arange(steps))
    return jnp.concatenate([points, last["kernel"].T])


def point_params(point: tuple[float, float] = (0.0, 0.0)) -> dict[str, Float[Array, "2 1"]]:
    """The parameters that stand for a point: one kernel [2, 1]."""
    return {"kernel": jnp.asarray(point, jnp.float32)[:, None]}


def plot_trajectories(
    surface: Surface | str,
    paths: Mapping[str, Float[Array | np.ndarray, "points 2"]],
    *,
    axes: Any = None,
    resolution: int = 200,
) -> Any:
    """Draws paths over the surface's level lines (equally spaced in the logarithm), with its minima as stars.

    Needs matplotlib (the extra ``plots``).

    Args:
      surface: a ``Surface``, or a key of ``SURFACES``.
      paths: label to points.
      axes: of matplotlib, to draw into; None = those of a new figure.
      resolution: points along each axis of the level lines.

    Returns:
      The axes; ``axes.figure.savefig(...)`` writes them.

    Raises:
      ValueError: unknown surface, or no path.
      ImportError: matplotlib is not installed.
    """
    surface = _find(surface)
    if not paths:
        raise ValueError("paths is empty, must have at least one path")
    require_matplotlib()
    from matplotlib import pyplot

    if axes is None:
        axes = pyplot.subplots(figsize=(7, 5), layout="constrained")[1]
    across, up = (np.linspace(*side, resolution) for side in surface.window)
    grid = jnp.asarray(np.stack(np.meshgrid(across, up), -1), jnp.float32)
    heights = np.asarray(jax.vmap(jax.vmap(surface.function))(grid))
    axes.contour(across, up, np.log(heights - heights.min() + 1e-2), levels=25, colors="0.8", linewidths=0.6)
    for label, points in paths.items():
        axes.plot(*np.asarray(points).T, label=label, linewidth=1.2, marker=".", markersize=2)
    axes.plot(*np.asarray(surface.minima).T, "k*", markersize=10)
    axes.set(xlim=surface.window[0], ylim=surface.window[1], title=surface.name)
    axes.legend(fontsize="small")
    return axes


def _find(surface: Surface | str) -> Surface:
    if isinstance(surface, Surface):
        return surface
    if surface not in SURFACES:
        raise ValueError(f"surface is {surface!r}, must be a Surface or one of {sorted(SURFACES)}")
    return SURFACES[surface]
