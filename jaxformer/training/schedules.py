"""Learning-rate schedules by name.

Convention: step 0 is the first update and uses ``schedule(0)``; the value reported for a step is the one used in it.
Steps are updates of the parameters, never micro-batches. A linear warm-up starts from zero and reaches the full rate at
step ``warmup_steps``; a warm-up of zero steps starts at the full rate. ``decay_steps`` is the step at which the final
rate is reached, counted from step 0, warm-up included; it is a key of its own, so that a longer run never changes the
rates of the steps already taken. Beyond it the final rate holds. ``constant`` and ``inverse_sqrt`` never end.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Schedule = Callable[[jax.Array | int], Float[Array, ""]]


def constant_decay(learning_rate: float, warmup_steps: int, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Holds the rate for ever: ``decay_steps`` and ``final_fraction`` have nothing to say here."""
    del warmup_steps, decay_steps, final_fraction
    return optax.constant_schedule(learning_rate)


def linear_decay(learning_rate: float, warmup_steps: int, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Falls along a straight line to ``final_fraction`` of the rate."""
    del warmup_steps
    return optax.linear_schedule(learning_rate, learning_rate * final_fraction, decay_steps)


def cosine_decay(learning_rate: float, warmup_steps: int, decay_steps: int, final_fraction: float) -> optax.Schedule:
    """Falls along half a cosine to ``final_fraction`` of the rate.

    Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5,
    without restarts.
    """
    del warmup_steps
    return optax.cosine_decay_schedule(learning_rate, decay_steps, alpha=final_fraction)


def inverse_sqrt_decay(
    learning_rate: float, warmup_steps: int, decay_steps: int, final_fraction: float
) -> optax.Schedule:
    """Falls as sqrt(warmup_steps / step) for ever: ``decay_steps`` and ``final_fraction`` have nothing to say here.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, equation 3.
    """
    del decay_steps, final_fraction
    # Also asked within the warm-up, for steps below 0, though not used there.
    return lambda step: learning_rate * jnp.sqrt(warmup_steps / jnp.maximum(warmup_steps + step, 1))


SCHEDULES: dict[str, Callable[[float, int, int, float], optax.Schedule]] = {
    "constant": constant_decay,
    "cosine": cosine_decay,
    "inverse_sqrt": inverse_sqrt_decay,
    "linear": linear_decay,
}
"""By name: what follows the warm-up, as a function of the steps since its end.

Each takes the highest rate, the steps of the warm-up, the steps from its end to the final rate, and the final fraction.
"""

_ENDLESS = ("constant", "inverse_sqrt")


def make_schedule(
    name: str = "cosine",
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: float = 0.0,
    embed_dim: int | None = None,
) -> Schedule:
    """Builds the schedule called ``name``: a linear warm-up, then the decay.

    The 2017 paper's is ``make_schedule("inverse_sqrt", learning_rate=1.0, warmup_steps=4000, embed_dim=512)``.

    Args:
      name: a key of ``SCHEDULES``.
      learning_rate: the highest rate, reached at step ``warmup_steps``; with ``embed_dim`` a factor, 1 as published.
      warmup_steps: steps of linear warm-up from zero; 0 = none, which ``inverse_sqrt`` can't do.
      decay_steps: step (warm-up included) at which the final rate is reached; ``constant`` and ``inverse_sqrt`` do
        without and don't read it.
      final_fraction: final rate as a fraction of ``learning_rate``, in [0, 1]; likewise.
      embed_dim: of ``inverse_sqrt``: the model's width, which makes the rate of a step
        learning_rate * embed_dim^-0.5 * min(step^-0.5, step * warmup_steps^-1.5); None = learning_rate is the highest.

    Returns:
      A function from the step (int, counted from 0) to the rate used in it, a float32 scalar.

    Raises:
      ValueError: unknown name, negative steps, a fraction outside [0, 1], a decay that ends within the warm-up, or a
        width or lack of warm-up that the schedule has no meaning for.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule name is {name!r}, must be one of {sorted(SCHEDULES)}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}, must be at least 0")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction is {final_fraction}, must be in [0, 1]")
    if embed_dim is not None and (name != "inverse_sqrt" or embed_dim < 1):
        raise ValueError(f"embed_dim is {embed_dim}, must be at least 1 for 'inverse_sqrt' and None for {name!r}")
    if name == "inverse_sqrt" and not warmup_steps:
        raise ValueError("warmup_steps is 0, must be at least 1 for 'inverse_sqrt', whose highest rate depends on it")
    if name in _ENDLESS:
        decay_steps = warmup_steps + 1
    if decay_steps is None or decay_steps <= warmup_steps:
        raise ValueError(f"decay_steps is {decay_steps}, must be above warmup_steps={warmup_steps} for {name!r}")
    if embed_dim is not None:
        learning_rate *= (embed_dim * warmup_steps) ** -0.5
    decay = SCHEDULES[name](learning_rate, warmup_steps, decay_steps - warmup_steps, final_fraction)
    warmup = optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1))
    joined = optax.join_schedules([warmup, decay], [warmup_steps])
    return lambda step: jnp.asarray(joined(step), jnp.float32)
