"""Weight decay: which parameters, by their paths, and where in the update.

Decoupled decay is added to the direction, L2 to the gradient. What is decoupled is multiplied by the learning rate of
the step, as in optax: ``params -= rate * (direction + weight_decay * params)``; or, with
``decay_multiplier="schedule"``, as published, by the schedule's multiplier alone, which is the rate over its peak:
``params -= rate * direction + (rate / peak) * weight_decay * params``. So the paper's decay is optax's times the peak.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.training.parameter_paths import compile_pattern, shapes_by_path

NO_DECAY = (r"(^|/|_)(bias|scale|embedding)$",)
"""Parameters that weight decay leaves alone: biases, norm scales, and tables of embeddings and positions."""

DECAY_MULTIPLIERS = ("rate", "schedule")


class DecayReport(NamedTuple):
    """Which parameters weight decay touches, and which nothing does.

    Attributes:
      decayed: path of each decayed parameter, with its shape.
      excluded: path of each parameter left alone, with its shape.
      frozen: path of each parameter that does not learn, with the shape of what does not: of some layers of a stack,
        theirs.
    """

    decayed: dict[str, tuple[int, ...]]
    excluded: dict[str, tuple[int, ...]]
    frozen: dict[str, tuple[int, ...]] = {}  # noqa: RUF012

    def summary(self) -> str:
        """Returns a line for the decayed parameters, one for the excluded, and one for the frozen if there are any."""
        groups = [("weight decay", self.decayed), ("no weight decay", self.excluded)]
        groups += [("frozen", self.frozen)] if self.frozen else []
        return "\n".join(
            f"{title} ({sum(map(math.prod, shapes.values())):,} parameters): {', '.join(shapes) or 'none'}"
            for title, shapes in groups
        )


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
    shapes = shapes_by_path(params)
    patterns = [compile_pattern("no_decay", pattern, shapes) for pattern in no_decay]
    excluded = {path for path in shapes if any(pattern.search(path) for pattern in patterns)}
    return DecayReport(
        decayed={path: shape for path, shape in shapes.items() if path not in excluded},
        excluded={path: shape for path, shape in shapes.items() if path in excluded},
    )


def decoupled_decay(
    weight_decay: float | jax.Array, decay_multiplier: str, mask: Any, peak_rate: float | jax.Array
) -> optax.GradientTransformation:
    """Adds decay to the direction, before the rate multiplies both.

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2, line 12.

    Args:
      weight_decay: decay of a step, in units of what multiplies it.
      decay_multiplier: "rate" or "schedule" (see above).
      mask: tree of bools like the parameters: which decay.
      peak_rate: the highest rate; a rate that is always 0 decays nothing.

    Raises:
      ValueError: another multiplier.
    """
    if decay_multiplier not in DECAY_MULTIPLIERS:
        raise ValueError(f"decay_multiplier is {decay_multiplier!r}, must be one of {', '.join(DECAY_MULTIPLIERS)}")
    if decay_multiplier == "schedule":
        peak = jnp.asarray(peak_rate, jnp.float32)
        weight_decay = jnp.where(peak > 0, weight_decay / jnp.where(peak > 0, peak, 1.0), 0.0)
    return optax.add_decayed_weights(weight_decay, mask=mask)


def decay_in_gradient(weight_decay: float | jax.Array, mask: Any) -> optax.GradientTransformation:
    """Adds decay to the gradient, the derivative of weight_decay / 2 * |params|^2 (L2).

    It comes after clipping, which is of the loss's gradient alone.
    """
    return optax.add_decayed_weights(weight_decay, mask=mask)
