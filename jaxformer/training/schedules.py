"""Learning-rate schedules by name.

Convention: step 0 is the first update and uses ``schedule(0)``; the value reported for a step is the one used in it.
Steps are updates of the parameters, never micro-batches. A linear warm-up starts from zero and reaches the full rate at
step ``warmup_steps``; a warm-up of zero steps starts at the full rate. ``decay_steps`` is the step at which the final
rate is reached, counted from step 0, warm-up included; it is a key of its own, so that a longer run never changes the
rates of the steps already taken. Beyond it the final rate holds. Some schedules have an end of another kind, or none:
each function in ``decays`` says what it reads.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxformer.training.decays import (
    Decay,
    Phase,
    check_number,
    constant_decay,
    cosine_decay,
    cosine_restarts,
    exponential_decay,
    inverse_sqrt_decay,
    inverse_time_decay,
    linear_decay,
    polynomial_decay,
    step_decay,
    warmup_stable_decay,
)

Schedule = Callable[[jax.Array | int], Float[Array, ""]]

_HIGHEST = float(np.finfo(np.float32).max)  # rates are float32

SCHEDULES: dict[str, Callable[..., Decay]] = {
    "constant": constant_decay,
    "cosine": cosine_decay,
    "cosine_restarts": cosine_restarts,
    "exponential": exponential_decay,
    "inverse_sqrt": inverse_sqrt_decay,
    "inverse_time": inverse_time_decay,
    "linear": linear_decay,
    "polynomial": polynomial_decay,
    "step": step_decay,
    "warmup_stable_decay": warmup_stable_decay,
}
"""By name: what follows the warm-up. The arguments beyond the phase are fields that this schedule has, others not."""


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """A schedule: called with a step (int, counted from 0) it gives the rate used in it, a float32 scalar.

    Attributes:
      rate: from the step to the rate, of any dtype.
      peak: the highest rate, reached at the warm-up's end; a number, or a traced scalar.
      last_change: the first step of the final rate; None = there is none.
    """

    rate: optax.Schedule
    peak: Any
    last_change: int | None

    def __call__(self, step: jax.Array | int) -> Float[Array, ""]:
        """The rate of a step."""
        return jnp.asarray(self.rate(step), jnp.float32)


def make_schedule(
    name: str = "cosine",
    *,
    learning_rate: Any,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: Any = 0.0,
    embed_dim: int | None = None,
    power: Any = None,
    decay_rate: Any = None,
    transition_steps: int | None = None,
    boundaries: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    cooldown_steps: int | None = None,
    cooldown_form: str | None = None,
    cycle_steps: int | None = None,
    cycle_growth: int | None = None,
    peak_decay: Any = None,
) -> RateSchedule:
    """Builds the schedule called ``name``: a linear warm-up, then the decay.

    The 2017 paper's is ``make_schedule("inverse_sqrt", learning_rate=1.0, warmup_steps=4000, embed_dim=512)``.

    Numbers that are no steps may be traced scalars, whose range nobody checks.

    Args:
      name: a key of ``SCHEDULES``.
      learning_rate: the highest rate, reached at step ``warmup_steps``; with ``embed_dim`` a factor, 1 as published.
      warmup_steps: steps of linear warm-up from zero; 0 = none, which ``inverse_sqrt`` can't do.
      decay_steps: step (warm-up included) at which the final rate is reached; schedules without such an end don't
        read it.
      final_fraction: final rate as a fraction of ``learning_rate``, in [0, 1]; likewise.
      embed_dim: of ``inverse_sqrt``: the model's width, which makes the rate of a step
        learning_rate * embed_dim^-0.5 * min(step^-0.5, step * warmup_steps^-1.5); None = learning_rate is the highest.
      power: of ``polynomial_decay``; here and below None = the schedule's own value.
      decay_rate: of ``exponential_decay`` and ``inverse_time_decay``.
      transition_steps: of the same: steps.
      boundaries: of ``step_decay``: steps, counted from 0, warm-up included.
      factors: of the same: of the rate before.
      cooldown_steps: of ``warmup_stable_decay``: steps.
      cooldown_form: of the same: 1-sqrt, cosine, linear.
      cycle_steps: of ``cosine_restarts``: steps of the first cycle.
      cycle_growth: of the same: factor of the length from cycle to cycle.
      peak_decay: of the same: factor of the peak.

    Returns:
      A function from the step (int, counted from 0) to the rate used in it, a float32 scalar, which also tells its
      peak.

    Raises:
      ValueError: unknown name, a field that this schedule doesn't have, negative steps, a number out of range, a decay
        that ends within the warm-up, or a width or lack of warm-up that the schedule has no meaning for.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule name is {name!r}, must be one of {sorted(SCHEDULES)}")
    check_number("learning_rate", learning_rate, least=0.0, most=_HIGHEST)
    check_number("warmup_steps", warmup_steps, least=0)
    check_number("final_fraction", final_fraction, least=0.0, most=1.0)
    if embed_dim is not None and (name != "inverse_sqrt" or embed_dim < 1):
        raise ValueError(f"embed_dim is {embed_dim}, must be at least 1 for 'inverse_sqrt' and None for {name!r}")
    if embed_dim is not None and warmup_steps:
        learning_rate = learning_rate * (embed_dim * warmup_steps) ** -0.5
    given = {
        "power": power,
        "decay_rate": decay_rate,
        "transition_steps": transition_steps,
        "boundaries": boundaries,
        "factors": factors,
        "cooldown_steps": cooldown_steps,
        "cooldown_form": cooldown_form,
        "cycle_steps": cycle_steps,
        "cycle_growth": cycle_growth,
        "peak_decay": peak_decay,
    }
    phase = Phase(name, learning_rate, warmup_steps, decay_steps, final_fraction)
    decay = SCHEDULES[name](phase, **_own(name, given))
    warmup = optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1))
    last_change = None if decay.steps is None else warmup_steps + decay.steps
    return RateSchedule(optax.join_schedules([warmup, decay.rate], [warmup_steps]), learning_rate, last_change)


def _own(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are said.

    Raises:
      ValueError: the schedule has no such field.
    """
    said = {field: value for field, value in given.items() if value is not None}
    known = list(inspect.signature(SCHEDULES[name]).parameters)[1:]
    for field, value in said.items():
        if field not in known:
            raise ValueError(
                f"{field} is {value}, must be None for schedule {name!r}, which has "
                f"{', '.join(known) if known else 'no fields of its own'}"
            )
    return said
