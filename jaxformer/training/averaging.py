"""Averaging of weights: a running average of the parameters after each update, which evaluation uses.

With decay d and n updates so far the average is the weighted mean of the parameters after each of them, weights
proportional to d^(n - i): the exponential moving average with its bias corrected, as Adam's moments are. It is kept in
corrected form, average += (1 - d) / (1 - d^n) * (params - average), so that it needs no correction when it is read:
after the first update it is the parameters themselves, and the values drawn at the start never enter. Polyak and
Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; Kingma and Ba 2015, "Adam", arXiv:1412.6980,
sections 3 and 7.2. Deviation from common code, which starts from the drawn parameters and raises the decay from step to
step instead.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


class Average(flax.struct.PyTreeNode):
    """The average and what it is of.

    Attributes:
      updates: int32 scalar: how many updates it is of; steps that were skipped are none.
      params: a tree like the parameters, of float32 or wider.
    """

    updates: Any
    params: Any


def check_average_decay(decay: Any) -> None:
    """Refuses a decay out of range; of a traced one nothing is known.

    Raises:
      ValueError: it is neither in [0, 1) nor None.
    """
    if decay is not None and not isinstance(decay, jax.core.Tracer) and not 0.0 <= decay < 1.0:
        raise ValueError(f"average_decay is {decay}, must be at least 0 and below 1, or None for no average")


def start_average(params: Any) -> Average:
    """The average of no updates: a copy of the parameters, for whoever evaluates before the first."""
    copies = jax.tree.map(lambda leaf: jnp.array(leaf, average_dtype(leaf.dtype), copy=True), params)
    return Average(jnp.zeros((), jnp.int32), copies)


def average_dtype(dtype: Any) -> Any:
    """The dtype in which parameters of a dtype are averaged."""
    return jnp.promote_types(jnp.float32, dtype)


def update_average(average: Average, params: Any, decay: Any) -> Average:
    """Takes the parameters after an update into the average.

    Args:
      average: of the updates before.
      params: after this one.
      decay: in [0, 1), a number or a traced scalar; the average is of the last 1 / (1 - decay) updates or so.

    Returns:
      The average of one update more.
    """
    updates = average.updates + 1
    decay = jnp.asarray(decay, jnp.float32)
    # Through expm1, as 1 - decay^updates alone loses the digits of a decay close to 1.
    weight = jnp.minimum((1.0 - decay) / -jnp.expm1(updates.astype(jnp.float32) * jnp.log(decay)), 1.0)

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        own = weight.astype(old.dtype)
        return (1 - own) * old + own * new.astype(old.dtype)

    return Average(updates, jax.tree.map(mix, average.params, params))


def averaged_params(average: Any, params: Any) -> Any:
    """The averaged parameters in the dtypes of the parameters.

    Args:
      average: a tree like the parameters, of the dtypes of an average.
      params: arrays, or their shapes and dtypes.
    """
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), average, params)
