"""Paths on the surfaces of ``jaxformer.analysis.trajectories``, of optimizers by name and over a hyperparameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.analysis.trajectories import SURFACES, Surface, point_params, trajectory
from jaxformer.training.optimizers import OPTIMIZERS, hyperparameters, make_optimizer

RATES: dict[str, dict[str, float]] = {
    "valley": {"gradient_descent": 0.06, "sgd": 0.06, "momentum": 0.02, "muon": 0.3},
    "rosenbrock": {
        "gradient_descent": 0.002,
        "sgd": 0.002,
        "momentum": 0.002,
        "adam": 0.3,
        "adam_l2": 0.3,
        "lion": 0.01,
    },
    "saddle": {},
}
"""Rates that suit an optimizer on a surface; where there is none, ``USUAL_RATE``."""

USUAL_RATE = {"valley": 0.1, "rosenbrock": 0.03, "saddle": 0.1}
"""That of the optimizers whose steps have about the rate's length, whatever the gradient's."""

# A point near 0 has no scale that an update could be relative to.
_SETTINGS: dict[str, dict[str, Any]] = {"adafactor": {"relative_scale": False}}


def named_trajectory(
    surface: Surface | str,
    optimizer: str,
    *,
    learning_rate: Any,
    steps: int,
    start: tuple[float, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Float[Array, "points 2"]:
    """The points that the optimizer called ``optimizer`` visits at a constant rate.

    Without clipping, and without weight decay where ``settings`` gives none: the path is that of the rule alone.

    Args:
      surface: a ``Surface``, or a key of ``SURFACES``.
      optimizer: a key of ``OPTIMIZERS``.
      learning_rate: of every step.
      steps: updates, at least 1.
      start: the first point; None = the surface's own.
      settings: hyperparameters of the optimizer, by name.

    Returns:
      float32 [steps + 1, 2]; the first is the start.

    Raises:
      ValueError: an unknown name, or a value out of range.
    """
    known = hyperparameters(optimizer)
    given: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in known else {}
    given |= settings or {}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"settings has {', '.join(unknown)}, must be of optimizer {optimizer!r}: {', '.join(known)}")
    made, _ = make_optimizer(
        optimizer, learning_rate=learning_rate, params=point_params(), no_decay=(), clip_norm=None, **given
    )
    return trajectory(surface, made, steps=steps, start=start)


def every_trajectory(surface: str, *, steps: int = 300) -> dict[str, Float[Array, "points 2"]]:
    """The path of every optimizer, each at a rate that suits it, for ``plot_trajectories``.

    Args:
      surface: a key of ``SURFACES``.
      steps: updates, at least 1.

    Returns:
      Path [steps + 1, 2] by the optimizer's name.

    Raises:
      ValueError: unknown surface, or steps below 1.
    """
    if surface not in SURFACES:
        raise ValueError(f"surface is {surface!r}, must be one of {sorted(SURFACES)}")
    rates = {name: RATES[surface].get(name, USUAL_RATE[surface]) for name in OPTIMIZERS}

    def run(rates: dict[str, Array]) -> dict[str, Float[Array, "points 2"]]:
        return {
            name: named_trajectory(surface, name, learning_rate=rate, steps=steps, settings=_SETTINGS.get(name))
            for name, rate in rates.items()
        }

    return jax.jit(run)(jax.tree.map(jnp.float32, rates))


def trajectories_over(
    surface: Surface | str,
    optimizer: str,
    field: str,
    values: Sequence[float],
    *,
    learning_rate: float,
    steps: int,
    start: tuple[float, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Float[Array, "values points 2"]:
    """Paths for several values of one number, in one compiled program: how a decay rate changes what Adam does.

    ``field="b2"``: at 0 every step of "rmsprop" has the rate's length along each axis, and the path rattles about the
    minimum. The nearer to 1, the longer its first steps, 1 / sqrt(1 - b2) rates, since its average begins at 0, and the
    longer it remembers how steep the start was. "adam" corrects for the beginning: its first step is one rate.
    ``field="b1"`` for "adam": the larger, the further the path overshoots.

    Args:
      surface: a ``Surface``, or a key of ``SURFACES``.
      optimizer: a key of ``OPTIMIZERS``.
      field: the hyperparameter, or "learning_rate".
      values: of the field, each in its range.
      learning_rate: of the other fields' paths.
      steps: updates, at least 1.
      start: the first point; None = the surface's own.
      settings: the other hyperparameters, by name.

    Returns:
      float32 [values, steps + 1, 2].

    Raises:
      ValueError: an unknown name, or no value.
    """
    if not values:
        raise ValueError("values is empty, must have at least one")

    def path(value: Array) -> Float[Array, "points 2"]:
        given = {"learning_rate": learning_rate, **(settings or {}), field: value}
        rate = given.pop("learning_rate")
        return named_trajectory(surface, optimizer, learning_rate=rate, steps=steps, start=start, settings=given)

    return jax.jit(jax.vmap(path))(jnp.asarray(values, jnp.float32))
