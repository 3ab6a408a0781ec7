"""Clipping of gradients: by value, by the norm of units against that of their parameters, by the global norm."""

from typing import Any

import jax
import optax

from jaxformer.training.layerwise import over_layers

Number = float | jax.Array


def clip_gradients(
    *, value: Number | None, adaptive: Number | None, norm: Number | None, stack_axes: Any
) -> list[optax.GradientTransformation]:
    """The clips that are asked for, in this order.

    Args:
      value: highest absolute value of an element.
      adaptive: highest norm of a unit's gradient in units of its parameters' norm (which counts as 1e-3 at least): a
        column of a matrix (what feeds one output) or a whole vector is a unit, of every layer and expert by itself.
        Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization", arXiv:2102.06171,
        equation 3; there the last layer is left out, here none is.
      norm: highest norm of all gradients together. Pascanu et al. 2013, "On the difficulty of training recurrent
        neural networks", arXiv:1211.5063, algorithm 1.
      stack_axes: tree like the parameters: how many leading axes are those of stacks.

    Returns:
      The transformations; None has none.
    """
    links = []
    if value is not None:
        links.append(optax.clip(value))
    if adaptive is not None:
        links.append(over_layers(optax.adaptive_grad_clip(adaptive), stack_axes))
    if norm is not None:
        links.append(optax.clip_by_global_norm(norm))
    return links
