"""Optimizers by name: gradients are clipped, an update rule makes a direction of them, the rate multiplies it.

Conventions: gradients are clipped first, over the whole step. Weight decay is selected by parameter path and, where it
is decoupled, multiplied by the learning rate of the step unless asked otherwise (see ``weight_decay``). The rate comes
from the train state's step, passed to ``update`` as ``step``, and not from a counter of the optimizer's own: the rate
reported for a step is the one used in it, also after a skipped step or a resume. Moments and their bias corrections
count the updates made.

Numbers may be traced scalars: they are checked where they are Python's, and the state's structure depends only on
names, flags and on what is None.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.training.clipping import clip_gradients
from jaxformer.training.frozen_parts import all_factors, frozen_within, of_learning, only
from jaxformer.training.layer_rates import is_head, scale_by_factors
from jaxformer.training.layerwise import Number
from jaxformer.training.parameter_paths import by_path, parameter_path, shapes_by_path, stack_axes
from jaxformer.training.schedules import Schedule
from jaxformer.training.update_rules import OPTIMIZERS, Parameters
from jaxformer.training.weight_decay import NO_DECAY, DecayReport, decay_report

__all__ = [
    "NO_DECAY",
    "OPTIMIZERS",
    "DecayReport",
    "decay_report",
    "hyperparameters",
    "make_optimizer",
    "parameter_path",
    "scale_by_rate",
]

_BELOW_1 = ("b1", "b2", "momentum")
_NOT_NEGATIVE = ("epsilon", "weight_decay", "initial_scale")
_CLIPS = ("clip_norm", "clip_value", "clip_adaptive")
_POSITIVE = (*_CLIPS, "clip_update", "decay_exponent", "smallest_scale")
_AT_LEAST_1 = ("smallest_factored", "newton_schulz_steps")


def scale_by_rate(learning_rate: Number | Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by minus the learning rate of ``step``, an extra argument of ``update`` (int scalar)."""

    def update(updates, state, params=None, *, step, **extra):
        del params, extra
        rate = learning_rate(step) if callable(learning_rate) else jnp.asarray(learning_rate, jnp.float32)
        return jax.tree.map(lambda leaf: -rate.astype(leaf.dtype) * leaf, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def hyperparameters(name: str) -> dict[str, Any]:
    """The hyperparameters of the optimizer called ``name``, with its own defaults.

    Raises:
      ValueError: unknown name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer name is {name!r}, must be one of {sorted(OPTIMIZERS)}")
    parameters = inspect.signature(OPTIMIZERS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}


def make_optimizer(
    name: str = "adamw",
    *,
    learning_rate: Number | Schedule,
    params: Any,
    b1: Number | None = None,
    b2: Number | None = None,
    epsilon: Number | None = None,
    weight_decay: Number | None = None,
    decay_multiplier: str | None = None,
    momentum: Number | None = None,
    nesterov: bool | None = None,
    epsilon_in_root: bool | None = None,
    initial_scale: Number | None = None,
    centered: bool | None = None,
    decay_exponent: Number | None = None,
    smallest_factored: int | None = None,
    clip_update: Number | None = None,
    relative_scale: bool | None = None,
    smallest_scale: Number | None = None,
    newton_schulz_steps: int | None = None,
    muon_scale: str | None = None,
    no_decay: Sequence[str] = NO_DECAY,
    clip_norm: Number | None = 1.0,
    clip_value: Number | None = None,
    clip_adaptive: Number | None = None,
    layer_decay: float | None = None,
    head_only: bool = False,
    rate_factors: Sequence[tuple[str, float]] = (),
    frozen_layers: int | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, DecayReport]:
    """Builds the optimizer called ``name``.

    Args:
      name: a key of ``OPTIMIZERS``, whose functions say what the hyperparameters mean; one that is None has the
        optimizer's own default, and one that is given must be the optimizer's.
      learning_rate: rate of a step: a number, or a schedule of the step.
      params: tree of the parameters or of their shapes.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment (lion: of the first that is kept), in [0, 1).
      epsilon: added to the root of the second moment (adafactor: to squares of gradients).
      weight_decay: decay per step.
      decay_multiplier: what multiplies decoupled decay: "rate", or "schedule" (the rate over its peak).
      momentum: factor of the running sum (muon: mean) of gradients or directions, in [0, 1).
      nesterov: whether momentum looks ahead.
      epsilon_in_root: of rmsprop: epsilon is added within the root.
      initial_scale: of rmsprop: what the second moment begins at.
      centered: of rmsprop: the variance of gradients in place of their mean square.
      decay_exponent: of adafactor: the second moment's decay rate is 1 - t^-decay_exponent.
      smallest_factored: of adafactor: fewest rows and columns of a matrix that is factored.
      clip_update: of adafactor: highest root mean square of an update, before the parameter's scale.
      relative_scale: of adafactor: updates are in units of the parameter's root mean square.
      smallest_scale: of adafactor: least such unit.
      newton_schulz_steps: of muon: steps of the iteration that makes a matrix orthogonal.
      muon_scale: of muon: "rms" or "width" (see ``scale_matrices``).
      no_decay: regular expressions on parameter paths that decay leaves alone.
      clip_norm: highest global norm of the gradients; None = no clipping.
      clip_value: highest absolute value of their elements, clipped before; None = no clipping.
      clip_adaptive: highest norm of a unit's gradient relative to its parameters', clipped between the two (see
        ``clip_gradients``); None = no clipping.
      layer_decay: factor of the rate from one layer to that below it, in (0, 1] (see ``layer_factors``); None = one
        rate for all.
      head_only: only what stands above the body learns; the body's gradients count for nothing, and it has no moments.
      rate_factors: pairs of a regular expression on paths and a factor of the rate (of direction and decay both), the
        first that finds a path; with 0 the parameters are frozen as the body with ``head_only``.
      frozen_layers: how many of the lowest layers are frozen, with all embeddings; 0 = the embeddings alone, None =
        nothing. Frozen layers within a stack have moments, which stay 0.

    Returns:
      The optax transformation, whose ``update`` takes ``step`` besides, and the report of what decays.

    Raises:
      ValueError: unknown name, a hyperparameter that the optimizer does not have, a value out of range, or a pattern
        that is malformed or matches nothing.
    """
    given = {
        "b1": b1,
        "b2": b2,
        "epsilon": epsilon,
        "weight_decay": weight_decay,
        "decay_multiplier": decay_multiplier,
        "momentum": momentum,
        "nesterov": nesterov,
        "epsilon_in_root": epsilon_in_root,
        "initial_scale": initial_scale,
        "centered": centered,
        "decay_exponent": decay_exponent,
        "smallest_factored": smallest_factored,
        "clip_update": clip_update,
        "relative_scale": relative_scale,
        "smallest_scale": smallest_scale,
        "newton_schulz_steps": newton_schulz_steps,
        "muon_scale": muon_scale,
    }
    given = {field: value for field, value in given.items() if value is not None}
    _check_known(name, given)
    _check_ranges({**given, **dict(zip(_CLIPS, (clip_norm, clip_value, clip_adaptive)))})
    shapes = shapes_by_path(params)
    report = decay_report(params, no_decay)
    factors = all_factors(shapes, layer_decay, head_only, rate_factors, frozen_layers)
    learning = {path for path, factor in factors.items() if np.any(factor)}
    report = of_learning(report, factors)
    axes = by_path(params, stack_axes)
    parameters = Parameters(
        decayed=by_path(params, report.decayed.__contains__),
        stack_axes=axes,
        matrices=by_path(params, lambda path: is_matrix(path, shapes[path])),
        peak_rate=_peak(learning_rate, decay_multiplier),
    )
    links = OPTIMIZERS[name](parameters, **given)
    clips = clip_gradients(value=clip_value, adaptive=clip_adaptive, norm=clip_norm, stack_axes=axes)
    links = [*frozen_within(params, factors), *clips, *only(params, learning, links), scale_by_rate(learning_rate)]
    if len(learning) < len(shapes):
        links.insert(0, optax.masked(optax.set_to_zero(), by_path(params, lambda path: path not in learning)))
    if any(np.any(factors[path] != 1.0) for path in learning):
        links.append(scale_by_factors(by_path(params, lambda path: factors[path] if path in learning else 1.0)))
    return optax.chain(*links), report


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix within the body: no embedding, and nothing of the head."""
    return len(shape) - stack_axes(path) == 2 and "embedding" not in path and not is_head(path)


def _peak(learning_rate: Number | Schedule, decay_multiplier: str | None) -> Number:
    """The highest learning rate, where decay needs it.

    Raises:
      ValueError: the schedule does not tell.
    """
    if not callable(learning_rate):
        return learning_rate
    peak = getattr(learning_rate, "peak", None)
    if peak is None and decay_multiplier == "schedule":
        raise ValueError("decay_multiplier is 'schedule', which needs a schedule with its peak, as of make_schedule")
    return 1.0 if peak is None else peak


def _check_known(name: str, given: Mapping[str, Any]) -> None:
    known = hyperparameters(name)
    unknown = [field for field in given if field not in known]
    if unknown:
        values = ", ".join(f"{field} = {given[field]}" for field in unknown)
        raise ValueError(
            f"{values}: optimizer {name!r} has no such hyperparameter, must be None; it has {', '.join(known)}"
        )


def _check_ranges(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name in _BELOW_1 and not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value}, must be in [0, 1)")
        if name in _NOT_NEGATIVE and not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, must be at least 0{' and finite' if value > 0.0 else ''}")
        if name in _POSITIVE and not value > 0.0:
            off = ", or None for no clipping" if name in _CLIPS else ""
            raise ValueError(f"{name} is {value}, must be above 0{off}")
        if name in _AT_LEAST_1 and not value >= 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
