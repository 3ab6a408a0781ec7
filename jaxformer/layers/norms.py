"""Normalisation layers: scale and bias parameters around ``functional.layer_norm`` and ``functional.rms_norm``."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import layer_norm, rms_norm


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
