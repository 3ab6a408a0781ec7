"""Loss scaling: a factor of the loss that keeps gradients within the range of float16.

The loss summed over tokens is multiplied by the scale, its gradient divided by it before anything else looks at it: its
norm, clipping and optimizer see what they would see without. As powers of two change no digit, only gradients that
would have vanished or overflowed come out otherwise. A dynamic scale is halved where the gradient overflows, and that
step is skipped; after so many steps without one it is doubled. Micikevicius et al. 2018, "Mixed Precision Training",
arXiv:1710.03740, sections 3.2 and 4. Deviation: the loss that is scaled is the sum over the tokens of a micro-batch,
not their mean, so good scales are smaller by their number.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

DYNAMIC = "dynamic"
_FIRST = 2.0**15
_GROWTH_STEPS = 2000
_LEAST, _MOST = 2.0**-24, 2.0**24


class LossScale(flax.struct.PyTreeNode):
    """The scale of the step to come.

    Attributes:
      scale: float32 scalar.
      good_steps: int32 scalar: steps since it last changed, without overflow.
    """

    scale: Any
    good_steps: Any


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """How the loss is scaled.

    Attributes:
      first: the scale of step 0.
      growth_steps: steps without overflow after which it is doubled; None = it never changes.
    """

    first: float
    growth_steps: int | None

    def start(self) -> LossScale:
        """The scale of step 0, as a state."""
        return LossScale(jnp.asarray(self.first, jnp.float32), jnp.zeros((), jnp.int32))


def loss_scaling(loss_scale: str | float | None, growth_steps: int | None = None) -> LossScaling | None:
    """Reads a config's loss scale.

    Args:
      loss_scale: "dynamic", a number above 0 (also as text) for one that never changes, or None for none.
      growth_steps: of the dynamic one: steps without overflow after which it is doubled; None = 2000.

    Returns:
      How the loss is scaled; None = it isn't.

    Raises:
      ValueError: the scale is none of these, or growth_steps is below 1 or given for another than the dynamic one.
    """
    if growth_steps is not None and (loss_scale != DYNAMIC or growth_steps < 1):
        raise ValueError(
            f"loss_scale_growth_steps is {growth_steps}, must be at least 1 for loss_scale='dynamic', else None"
        )
    if loss_scale is None:
        return None
    if loss_scale == DYNAMIC:
        return LossScaling(_FIRST, growth_steps or _GROWTH_STEPS)
    try:
        first = float(loss_scale)
    except ValueError:
        first = math.nan
    if not 0.0 < first < math.inf:
        raise ValueError(f"loss_scale is {loss_scale!r}, must be 'dynamic', a number above 0, or None")
    return LossScaling(first, None)


def unscale(gradients: Any, scale: Float[Array, ""]) -> Any:
    """Divides a scaled loss's gradients by the scale, in float32 or wider."""

    def divide(leaf: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.float32, leaf.dtype)
        return (leaf.astype(wide) / scale.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(divide, gradients)


def overflowed(state: LossScale, loss: Float[Array, ""], gradient_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a gradient is not finite because of a dynamic scale: the loss is finite, and the scale can be halved."""
    return jnp.isfinite(loss) & ~jnp.isfinite(gradient_norm) & (state.scale > _LEAST)


def next_scale(state: LossScale, scaling: LossScaling, over: Bool[Array, ""], finite: Bool[Array, ""]) -> LossScale:
    """The scale of the next step.

    Args:
      state: the scale used in this one.
      scaling: dynamic.
      over: whether this step's gradient overflowed.
      finite: whether loss and gradient were finite; a step that was neither finite nor overflowed changes nothing.
    """
    good_steps = jnp.where(over, 0, state.good_steps + finite.astype(jnp.int32))
    grown = good_steps >= jnp.asarray(scaling.growth_steps, jnp.int32)
    scale = jnp.where(over, state.scale / 2.0, jnp.where(grown, jnp.minimum(state.scale * 2.0, _MOST), state.scale))
    return LossScale(scale, jnp.where(grown, 0, good_steps))
