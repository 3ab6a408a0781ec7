"""Learning-rate schedules by name.

Convention: step 0 is the first update and uses ``schedule(0)``; the value reported for a step is the one used in it.
Steps are updates of the parameters, never micro-batches. A linear warm-up starts from zero and reaches the full rate at
step ``warmup_steps``; a warm-up of zero steps starts at the full rate. ``decay_steps`` is the step at which the final
rate is reached, counted from step 0, warm-up included; it is a key of its own, so that a longer run never changes the
rates of the steps already taken. Beyond it the final rate holds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Schedule = Callable[[jax.Array | int], Float[Array, ""]]


def constant_decay(learning_rate: float, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Holds the rate for ever: ``decay_steps`` and ``final_fraction`` have nothing to say here."""
    del decay_steps, final_fraction
    return optax.constant_schedule(learning_rate)


def linear_decay(learning_rate: float, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Falls along a straight line to ``final_fraction`` of the rate."""
    return optax.linear_schedule(learning_rate, learning_rate * final_fraction, decay_steps)


def cosine_decay(learning_rate: float, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Falls along half a cosine to ``final_fraction`` of the rate.

    Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5,
    without restarts.
    """
    return optax.cosine_decay_schedule(learning_rate, decay_steps, alpha=final_fraction)


SCHEDULES: dict[str, Callable[[float, int, float], optax.Schedule]] = {
    "constant": constant_decay,
    "cosine": cosine_decay,
    "linear": linear_decay,
}


def make_schedule(
    name: str = "cosine",
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: float = 0.0,
) -> Schedule:
    """Builds the schedule called ``name``: a linear warm-up, then the decay.

    Args:
      name: a key of ``SCHEDULES``.
      learning_rate: the highest rate, reached at step ``warmup_steps``.
      warmup_steps: steps of linear warm-up from zero; 0 = none.
      decay_steps: step (warm-up included) at which the final rate is reached; only ``constant`` does without.
      final_fraction: final rate as a fraction of ``learning_rate``, in [0, 1].

    Returns:
      A function from the step (int, counted from 0) to the rate used in it, a float32 scalar.

    Raises:
      ValueError: unknown name, negative steps, a fraction outside [0, 1], or a decay that ends within the warm-up.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule name is {name!r}, must be one of {sorted(SCHEDULES)}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}, must be at least 0")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction is {final_fraction}, must be in [0, 1]")
    if name == "constant":
        decay_steps = warmup_steps + 1
    if decay_steps is None or decay_steps <= warmup_steps:
        raise ValueError(f"decay_steps is {decay_steps}, must be above warmup_steps={warmup_steps} for {name!r}")
    decay = SCHEDULES[name](learning_rate, decay_steps - warmup_steps, final_fraction)
    warmup = optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1))
    joined = optax.join_schedules([warmup, decay], [warmup_steps])
    return lambda step: jnp.asarray(joined(step), jnp.float32)
