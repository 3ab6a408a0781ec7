"""RMSProp's centred second moment: gradients over a running estimate of their standard deviation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.training.layerwise import Number


class CenteredState(NamedTuple):
    """Running means of gradients and of their squares, each like the parameters."""

    mean: Any
    square: Any


def scale_by_deviation(
    b2: Number, epsilon: Number, initial_scale: Number, epsilon_in_root: bool
) -> optax.GradientTransformation:
    """Divides g by the root of v - m^2, where v and m are running means of g^2 and g: Graves 2013, arXiv:1308.0850.

    Unlike ``optax.scale_by_stddev`` it takes v - m^2 to be at least 0, below which rounding puts it where gradients
    hardly change.

    Args:
      b2: decay rate of both means.
      epsilon: added to the root, or within it.
      initial_scale: v before the first update.
      epsilon_in_root: where epsilon is.
    """

    def init(params):
        square = jax.tree.map(lambda leaf: jnp.full_like(leaf, initial_scale), params)
        return CenteredState(jax.tree.map(jnp.zeros_like, params), square)

    def divide(leaf, mean, square):
        variance = jnp.maximum(square - jnp.square(mean), 0.0)
        return leaf / (jnp.sqrt(variance + epsilon) if epsilon_in_root else jnp.sqrt(variance) + epsilon)

    def update(updates, state, params=None):
        del params
        mean = jax.tree.map(lambda leaf, old: b2 * old + (1.0 - b2) * leaf, updates, state.mean)
        square = jax.tree.map(lambda leaf, old: b2 * old + (1.0 - b2) * jnp.square(leaf), updates, state.square)
        return jax.tree.map(divide, updates, mean, square), CenteredState(mean, square)

    return optax.GradientTransformation(init, update)
