"""What follows a schedule's warm-up, by name: the learning rate as a function of the steps since its end.

Numbers that are no counts of steps (the rate, fractions, factors, powers) may be traced, so that many runs with
different ones share a compiled program; then nothing checks their range.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

_LONGEST = 2**31  # steps are int32
_COOLDOWN_SHARE = 5  # Hägele et al. 2024: a fifth of all steps is as good as any larger share
_DEFAULT_CYCLES = 3
_EXPONENTIAL_REST = 0.01


class Phase(NamedTuple):
    """Where a decay begins and ends.

    Attributes:
      name: of the schedule, for messages.
      peak: the rate at its start; a number or a traced scalar.
      warmup_steps: the step at which it starts.
      decay_steps: the step, counted from the run's first, at which it ends; None = not said.
      final_fraction: the final rate as a fraction of the peak.
    """

    name: str
    peak: Any
    warmup_steps: int
    decay_steps: int | None
    final_fraction: Any

    @property
    def steps(self) -> int:
        """How long it lasts.

        Raises:
          ValueError: it has no end, or ends before it starts.
        """
        if self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps is {self.decay_steps}, must be above warmup_steps={self.warmup_steps} for {self.name!r}"
            )
        return self.decay_steps - self.warmup_steps


class Decay(NamedTuple):
    """A decay.

    Attributes:
      rate: from the steps since the warm-up's end to the rate; below 0 its value is not used.
      steps: after so many of them it changes no more; None = it never ends, or never changes.
    """

    rate: optax.Schedule
    steps: int | None


def check_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None, most: float = math.inf
) -> None:
    """Refuses a number out of range; of a traced one nothing is known.

    Args:
      name: of the argument.
      value: the number.
      least: it may be this and more.
      above: it must be more than this.
      most: it may be this and less.

    Raises:
      ValueError: it is out of range, or no number.
    """
    if isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, (str, bytes, type(None))):
        raise ValueError(f"{name} is {value!r}, must be a number")
    if not (value <= most and (least is None or value >= least) and (above is None or value > above)):
        low = f"above {above}" if least is None else f"at least {least}"
        raise ValueError(f"{name} is {value}, must be {low}{'' if most == math.inf else f' and at most {most}'}")


def constant_decay(phase: Phase) -> Decay:
    """Holds the rate for ever; reads neither ``decay_steps`` nor ``final_fraction``."""
    return Decay(optax.constant_schedule(phase.peak), None)


def linear_decay(phase: Phase) -> Decay:
    """Falls along a straight line to ``final_fraction`` of the rate, reached at ``decay_steps``."""
    return Decay(optax.linear_schedule(phase.peak, phase.peak * phase.final_fraction, phase.steps), phase.steps)


def cosine_decay(phase: Phase) -> Decay:
    """Falls along half a cosine to ``final_fraction`` of the rate, reached at ``decay_steps``.

    Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5,
    without restarts.
    """
    return Decay(optax.cosine_decay_schedule(phase.peak, phase.steps, alpha=phase.final_fraction), phase.steps)


def polynomial_decay(phase: Phase, *, power: Any = 2.0) -> Decay:
    """final + (peak - final) * (1 - progress)^power, progress from 0 at the warm-up's end to 1 at ``decay_steps``."""
    check_number("power", power, above=0.0)
    steps, final = phase.steps, phase.peak * phase.final_fraction

    def rate(step: Any) -> Any:
        # Not optax's: where a compiler divides by a reciprocal, its last step has a negative base, whose power is NaN.
        rest = jnp.clip(1.0 - _since(step) / steps, 0.0, 1.0)
        return final + (phase.peak - final) * rest**power

    return Decay(rate, steps)


def inverse_sqrt_decay(phase: Phase) -> Decay:
    """Falls as sqrt(warmup_steps / step) for ever; reads neither ``decay_steps`` nor ``final_fraction``.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, equation 3.
    """
    warmup = phase.warmup_steps
    if not warmup:
        raise ValueError("warmup_steps is 0, must be at least 1 for 'inverse_sqrt', whose highest rate depends on it")
    # Also asked within the warm-up, for steps below 0, though not used there.
    return Decay(lambda step: phase.peak * jnp.sqrt(warmup / jnp.maximum(warmup + step, 1)), None)


def inverse_time_decay(phase: Phase, *, decay_rate: Any = 1.0, transition_steps: int | None = None) -> Decay:
    """peak / (1 + decay_rate * k / transition_steps) at k steps after the warm-up, for ever.

    By itself it is the 1/t of Robbins and Monro 1951, "A Stochastic Approximation Method", section 5: with
    ``transition_steps`` = ``warmup_steps`` (1 without a warm-up) the rate of step t is peak * warmup_steps / t. Reads
    neither ``decay_steps`` nor ``final_fraction``.
    """
    check_number("decay_rate", decay_rate, above=0.0)
    scale = max(phase.warmup_steps, 1) if transition_steps is None else transition_steps
    check_number("transition_steps", scale, least=1)
    return Decay(lambda step: phase.peak / (1.0 + decay_rate * _since(step) / scale), None)


def exponential_decay(phase: Phase, *, decay_rate: Any = None, transition_steps: int | None = None) -> Decay:
    """peak * decay_rate^(k / transition_steps) at k steps after the warm-up, never below ``final_fraction`` of peak.

    Without a ``decay_rate`` it is the one that reaches ``final_fraction``, or a hundredth where that is 0, at
    ``decay_steps``; with one ``decay_steps`` isn't read, and ``transition_steps`` is 1 where it isn't given.
    """
    final = phase.peak * phase.final_fraction
    if decay_rate is None:
        if transition_steps is not None:
            raise ValueError(f"transition_steps is {transition_steps}, must be None where decay_rate is")
        scale = phase.steps
        factor = jnp.where(phase.final_fraction > 0.0, phase.final_fraction, _EXPONENTIAL_REST)
        ends = not isinstance(phase.final_fraction, jax.core.Tracer) and phase.final_fraction > 0.0
    else:
        check_number("decay_rate of 'exponential'", decay_rate, above=0.0, most=1.0)
        factor, ends, scale = decay_rate, False, 1 if transition_steps is None else transition_steps
        check_number("transition_steps", scale, least=1)
    factor = jnp.asarray(factor, jnp.float32)
    # Not optax's, which compares the decay rate.
    return Decay(
        lambda step: jnp.maximum(phase.peak * factor ** (_since(step) / scale), final), scale if ends else None
    )


def step_decay(
    phase: Phase, *, boundaries: Sequence[int] | None = None, factors: Sequence[float] | None = None
) -> Decay:
    """The rate is multiplied by a factor from each boundary on, a step counted from the run's first.

    He et al. 2016, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2: 0.1 after half and
    three quarters of the steps, which is what comes by itself between the warm-up's end and ``decay_steps``; with
    ``boundaries`` that isn't read. Reads no ``final_fraction``.
    """
    warmup = phase.warmup_steps
    if boundaries is None:
        boundaries = sorted({warmup + -(-phase.steps // 2), warmup + -(-3 * phase.steps // 4)})
    elif any(isinstance(boundary, bool) or not isinstance(boundary, (int, np.integer)) for boundary in boundaries):
        raise ValueError(f"boundaries are {tuple(boundaries)}, must be whole numbers of steps")
    elif any(later <= earlier for earlier, later in itertools.pairwise((warmup, *boundaries))):
        raise ValueError(f"boundaries are {tuple(boundaries)}, must ascend from above warmup_steps={warmup}")
    factors = (0.1,) * len(boundaries) if factors is None else factors
    if len(factors) != len(boundaries):
        raise ValueError(f"factors are {tuple(factors)}, must be as many as boundaries={tuple(boundaries)}")
    for factor in factors:
        check_number("factors has one that", factor, above=0.0)
    since = [boundary - warmup for boundary in boundaries]
    rate = optax.piecewise_constant_schedule(phase.peak, dict(zip(since, factors)))
    return Decay(rate, since[-1] if since else None)


def warmup_stable_decay(phase: Phase, *, cooldown_steps: int | None = None, cooldown_form: str = "1-sqrt") -> Decay:
    """Holds the rate, then falls in the last ``cooldown_steps`` before ``decay_steps`` to ``final_fraction`` of it.

    Hu et al. 2024, "MiniCPM", arXiv:2404.06395, section 4; its form 1 - sqrt(progress) is that of Hägele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392, section 3. Other
    forms are ``linear`` and ``cosine``. By itself the cooldown takes a fifth of ``decay_steps``. One of 0 steps falls
    at once, at ``decay_steps``; one as long as all steps after the warm-up leaves no phase in which the rate holds.
    """
    if cooldown_form not in _COOLDOWNS:
        raise ValueError(f"cooldown_form is {cooldown_form!r}, must be one of {', '.join(_COOLDOWNS)}")
    if cooldown_steps is None:
        cooldown_steps = min(phase.steps, -(-(phase.warmup_steps + phase.steps) // _COOLDOWN_SHARE))
    check_number("cooldown_steps", cooldown_steps, least=0, most=phase.steps)
    cooldown = optax.constant_schedule(phase.peak * phase.final_fraction)
    if cooldown_steps:
        cooldown = _COOLDOWNS[cooldown_form](phase.peak, cooldown_steps, phase.final_fraction)
    holding = optax.constant_schedule(phase.peak)
    return Decay(optax.join_schedules([holding, cooldown], [phase.steps - cooldown_steps]), phase.steps)


def _one_minus_sqrt(peak: Any, steps: int, final_fraction: Any) -> optax.Schedule:
    def rate(step: Any) -> Any:
        return peak * (1.0 - (1.0 - final_fraction) * jnp.sqrt(jnp.clip(step, 0, steps) / steps))

    return rate


_COOLDOWNS: dict[str, Callable[[Any, int, Any], optax.Schedule]] = {
    "1-sqrt": _one_minus_sqrt,
    "cosine": optax.cosine_decay_schedule,
    "linear": lambda peak, steps, final_fraction: optax.linear_schedule(peak, peak * final_fraction, steps),
}


def cosine_restarts(
    phase: Phase, *, cycle_steps: int | None = None, cycle_growth: int = 2, peak_decay: Any = 1.0
) -> Decay:
    """Half cosines one after the other, for ever, from a peak towards ``final_fraction`` of the first peak.

    A cycle lasts ``cycle_growth`` times as long as that before it, and its peak is ``peak_decay`` times as high, but
    not below the lowest rate. The step after a cycle's last is the first of the next and has its peak: the lowest rate
    itself is never used. By themselves three cycles end at ``decay_steps``, which with ``cycle_steps`` isn't read.
    Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, section 3: T_0 = cycle_steps, T_mult = cycle_growth; its
    peaks do not decay.
    """
    check_number("cycle_growth", cycle_growth, least=1)
    check_number("peak_decay", peak_decay, above=0.0, most=1.0)
    if cycle_steps is None:
        cycle_steps = -(-phase.steps // sum(cycle_growth**cycle for cycle in range(_DEFAULT_CYCLES)))
    check_number("cycle_steps", cycle_steps, least=1)
    place = _places(cycle_steps, cycle_growth)

    def rate(step: Any) -> Float[Array, ""]:
        cycle, done, length = place(jnp.maximum(jnp.asarray(step, jnp.int32), 0))
        lowest = phase.peak * phase.final_fraction
        factor = jnp.asarray(peak_decay, jnp.float32) ** jnp.asarray(cycle, jnp.float32)
        peak = jnp.maximum(phase.peak * factor, lowest)
        return lowest + (peak - lowest) * 0.5 * (1.0 + jnp.cos(jnp.pi * done / length))

    return Decay(rate, None)


def _places(cycle_steps: int, cycle_growth: int) -> Callable[[Any], tuple[Any, Any, Any]]:
    """From steps to cycle, steps into it and its length, in whole numbers: a restart comes at no other step."""
    if cycle_growth == 1:
        return lambda step: (step // cycle_steps, step % cycle_steps, cycle_steps)
    starts, lengths = [0], [cycle_steps]
    while starts[-1] + lengths[-1] < _LONGEST:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(min(lengths[-1] * cycle_growth, _LONGEST - 1))

    def place(step: Any) -> tuple[Any, Any, Any]:
        cycle = jnp.sum(step >= np.asarray(starts, np.int32)) - 1
        return cycle, step - jnp.asarray(starts, jnp.int32)[cycle], jnp.asarray(lengths, jnp.int32)[cycle]

    return place


def _since(step: Any) -> Any:
    # Decays are also asked within the warm-up, where powers of large negative numbers would overflow.
    return jnp.maximum(step, 0)
