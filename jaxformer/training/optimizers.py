"""Optimizers by name, with weight decay selected by parameter path.

Conventions: gradients are clipped by their global norm first, over the whole step. Weight decay is decoupled and, as
in optax, multiplied by the learning rate of the step: ``params -= rate * (direction + weight_decay * params)``. The
rate comes from the train state's step, passed to ``update`` as ``step``, and not from a counter of the optimizer's
own: the rate reported for a step is the one used in it, also after a skipped step or a resume.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.training.layer_rates import HEAD_PARTS, is_head, layer_factors, scale_by_factors
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedules import Schedule

NO_DECAY = (r"(^|/|_)(bias|scale|embedding)$",)
"""Parameters that weight decay leaves alone: biases, norm scales, and tables of embeddings and positions."""


class DecayReport(NamedTuple):
    """Which parameters weight decay touches.

    Attributes:
      decayed: path of each decayed parameter, with its shape.
      excluded: path of each parameter left alone, with its shape.
    """

    decayed: dict[str, tuple[int, ...]]
    excluded: dict[str, tuple[int, ...]]

    def summary(self) -> str:
        """Returns a text of one line for the decayed and one for the excluded parameters."""
        return "\n".join(
            f"{title} ({sum(map(_size, shapes.values())):,} parameters): {', '.join(shapes) or 'none'}"
            for title, shapes in (("weight decay", self.decayed), ("no weight decay", self.excluded))
        )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def parameter_path(path: tuple[Any, ...]) -> str:
    """Returns a tree path as text: keys joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def decay_report(params: Any, no_decay: Sequence[str] = NO_DECAY) -> DecayReport:
    """Sorts parameters into decayed and excluded ones by their paths, so stacking over layers changes nothing.

    Args:
      params: tree of arrays or of their shapes.
      no_decay: regular expressions; a parameter whose path one of them finds is excluded.

    Returns:
      The report; its order is the tree's.

    Raises:
      ValueError: a pattern is no regular expression, or finds no parameter; then the message lists the paths.
    """
    patterns = [_compile(pattern) for pattern in no_decay]
    leaves = {parameter_path(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for pattern in patterns:
        if not any(map(pattern.search, leaves)):
            raise ValueError(
                f"no_decay pattern {pattern.pattern!r} matches no parameter; there are: {', '.join(leaves)}"
            )
    excluded = {path for path in leaves if any(pattern.search(path) for pattern in patterns)}
    return DecayReport(
        decayed={path: shape for path, shape in leaves.items() if path not in excluded},
        excluded={path: shape for path, shape in leaves.items() if path in excluded},
    )


def _compile(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"no_decay pattern {pattern!r} is not a regular expression: {error}") from error


def scale_by_rate(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by minus the learning rate of ``step``, an extra argument of ``update`` (int scalar)."""

    def update(updates, state, params=None, *, step, **extra):
        del params, extra
        rate = learning_rate(step) if callable(learning_rate) else jnp.asarray(learning_rate, jnp.float32)
        return jax.tree.map(lambda leaf: -rate.astype(leaf.dtype) * leaf, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def adamw(
    *, b1: float, b2: float, epsilon: float, weight_decay: float, decay_mask: Any
) -> list[optax.GradientTransformation]:
    """Adam's direction with decoupled decay: m / (sqrt(v) + epsilon) + weight_decay * params, moments bias-corrected.

    Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980, algorithm 1; Loshchilov and
    Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2 (whose schedule multiplier is
    the learning rate here).
    """
    links = [optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon)]
    if weight_decay:
        links.append(optax.add_decayed_weights(weight_decay, mask=decay_mask))
    return links


OPTIMIZERS: dict[str, Callable[..., list[optax.GradientTransformation]]] = {"adamw": adamw}


def make_optimizer(
    name: str = "adamw",
    *,
    learning_rate: float | Schedule,
    params: Any,
    b1: float = 0.9,
    b2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    no_decay: Sequence[str] = NO_DECAY,
    clip_norm: float | None = 1.0,
    layer_decay: float | None = None,
    head_only: bool = False,
) -> tuple[optax.GradientTransformationExtraArgs, DecayReport]:
    """Builds the optimizer called ``name``.

    Args:
      name: a key of ``OPTIMIZERS``.
      learning_rate: rate of a step: a number, or a schedule of the step.
      params: tree of the parameters or of their shapes, for the decay mask.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      epsilon: added to the square root of the second moment.
      weight_decay: decay per step, in units of the learning rate.
      no_decay: regular expressions on parameter paths that decay leaves alone.
      clip_norm: highest global norm of the gradients; None = no clipping.
      layer_decay: factor of the rate from one layer to that below it, in (0, 1] (see ``layer_factors``); None = one
        rate for all.
      head_only: only what stands above the body learns; the body's gradients count for nothing, and it has no moments.

    Returns:
      The optax transformation, whose ``update`` takes ``step`` besides, and the report of what decays.

    Raises:
      ValueError: unknown name, a value out of range, or a pattern that is malformed or matches nothing.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer name is {name!r}, must be one of {sorted(OPTIMIZERS)}")
    _check_ranges(b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, clip_norm=clip_norm)
    report = decay_report(params, no_decay)
    if head_only:
        report = _of_head(report)
    mask = _by_path(params, report.decayed.__contains__)
    links = OPTIMIZERS[name](b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, decay_mask=mask)
    if head_only:
        links = [optax.masked(optax.chain(*links), _by_path(params, is_head))]
    if clip_norm is not None:
        links.insert(0, optax.clip_by_global_norm(clip_norm))
    if head_only:
        links.insert(0, optax.masked(optax.set_to_zero(), _by_path(params, lambda path: not is_head(path))))
    links.append(scale_by_rate(learning_rate))
    if layer_decay is not None:
        if not 0.0 < layer_decay <= 1.0:
            raise ValueError(f"layer_decay is {layer_decay}, must be above 0 and at most 1, or None")
        factors = layer_factors({**report.decayed, **report.excluded}, layer_decay)
        links.append(scale_by_factors(_by_path(params, factors.__getitem__)))
    return optax.chain(*links), report


def _by_path(params: Any, value: Callable[[str], Any]) -> Any:
    """A tree like the parameters, with what a function says of each path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: value(parameter_path(path)), params)


def _of_head(report: DecayReport) -> DecayReport:
    """The same, where the body does not decay.

    Raises:
      ValueError: there is nothing above the body.
    """
    excluded = {path: shape for path, shape in report.decayed.items() if not is_head(path)} | report.excluded
    if not any(map(is_head, (*report.decayed, *report.excluded))):
        raise ValueError(f"head_only is True, but the model has none of the parts {', '.join(HEAD_PARTS)}")
    return DecayReport({path: shape for path, shape in report.decayed.items() if is_head(path)}, excluded)


def _check_ranges(*, clip_norm: float | None, **values: float) -> None:
    for name in ("b1", "b2"):
        if not 0.0 <= values[name] < 1.0:
            raise ValueError(f"{name} is {values[name]}, must be in [0, 1)")
    for name in ("epsilon", "weight_decay"):
        if values[name] < 0.0:
            raise ValueError(f"{name} is {values[name]}, must be at least 0")
    if clip_norm is not None and clip_norm <= 0.0:
        raise ValueError(f"clip_norm is {clip_norm}, must be above 0, or None for no clipping")
