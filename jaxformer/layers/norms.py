"""Normalisation layers: parameters, and running averages, around the formulas of ``functional``."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.functional import batch_norm, batch_statistics, compute_dtype, layer_norm, rms_norm, update_running
from jaxformer.layers.state import STATE


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, statistics in float32.

    Ba et al. 2016, "Layer Normalization", arXiv:1607.06450, equation 4.

    Args:
      epsilon: added to the variance.
      use_bias: whether to add a learned bias.
      param_dtype: dtype of ``scale`` and ``bias`` [embed_dim].

    Returns:
      An array of the input's shape and dtype.
    """

    epsilon: float = 1e-5
    use_bias: bool = True
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise ``x`` over its last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.param_dtype) if self.use_bias else None
        return layer_norm(x, scale, bias, epsilon=self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, statistics in float32, no mean and no bias.

    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4.

    Args:
      epsilon: added to the mean square.
      param_dtype: dtype of ``scale`` [embed_dim].

    Returns:
      An array of the input's shape and dtype.
    """

    epsilon: float = 1e-6
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise ``x`` over its last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        return rms_norm(x, scale, epsilon=self.epsilon)


class BatchNorm(nn.Module):
    """Batch normalisation of every feature over the real tokens of the batch, statistics in float32.

    Ioffe & Szegedy 2015, "Batch Normalization", arXiv:1502.03167, algorithms 1 (training) and 2 (evaluation).

    In training (``deterministic=False``) the statistics are the batch's, and running averages of them follow in
    ``mean`` and ``variance`` of the collection "state", if that is mutable:
    running = momentum * running + (1 - momentum) * batch, of the unbiased variance, from 0 and 1
    (``functional.update_running``). Otherwise the running averages normalise, and nothing changes them.

    Under jit, rows spread over devices have the statistics of all rows. Micro-batches have each their own (ghost
    batches: Hoffer et al. 2017, arXiv:1705.08741, section 4), and the averages follow them in turn.

    In training each token's output depends on all tokens of the batch. So a causal model sees a trace of what it is to
    predict, which it lacks when it generates.

    Args:
      epsilon: added to the variance.
      momentum: share of the running averages that a training step keeps, in [0, 1].
      use_bias: whether to add a learned bias.
      param_dtype: dtype of ``scale`` and ``bias`` [features]; the averages are float32, or float64 with it.

    Returns:
      An array of the input's shape and dtype, 0 where ``mask`` is False.
    """

    epsilon: float = 1e-5
    momentum: float = 0.9
    use_bias: bool = True
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "*tokens D"], *, mask: Bool[Array, "*tokens"] | None = None, deterministic: bool = True
    ) -> Float[Array, "*tokens D"]:
        """Normalise every feature of ``x``; ``mask`` is True where a token exists (None = everywhere)."""
        shape, dtype = (x.shape[-1],), compute_dtype(self.param_dtype)
        scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype) if self.use_bias else None
        running_mean = self.variable(STATE, "mean", jnp.zeros, shape, dtype)
        running_variance = self.variable(STATE, "variance", jnp.ones, shape, dtype)
        mean, variance = running_mean.value, running_variance.value
        if not deterministic and not self.is_initializing():
            statistics = batch_statistics(x, mask=mask)
            if self.is_mutable_collection(STATE):
                running_mean.value, running_variance.value = update_running(
                    mean, variance, statistics, momentum=self.momentum
                )
            mean, variance = statistics.mean, statistics.variance
        return batch_norm(x, scale, bias, mean=mean, variance=variance, mask=mask, epsilon=self.epsilon)


NORMS = ("layer", "rms", "batch")
"""Names that ``make_norm_layer`` knows."""


def make_norm_layer(
    norm: str, *, epsilon: float, momentum: float, use_bias: bool, param_dtype: Any, name: str | None = None
) -> nn.Module:
    """The normalisation layer of that name; each takes of the settings those that it has.

    Args:
      norm: a name of ``NORMS``.
      epsilon: added to the variance or mean square.
      momentum: share of batch norm's running averages that a training step keeps.
      use_bias: whether layer norm and batch norm add a learned bias.
      param_dtype: dtype of the parameters.
      name: the module's.

    Raises:
      ValueError: an unknown name.
    """
    if norm == "layer":
        return LayerNorm(epsilon, use_bias, param_dtype, name=name)
    if norm == "rms":
        return RMSNorm(epsilon, param_dtype, name=name)
    if norm == "batch":
        return BatchNorm(epsilon, momentum, use_bias, param_dtype, name=name)
    raise ValueError(f"norm={norm!r} must be one of {', '.join(NORMS)}")
