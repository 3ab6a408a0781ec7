"""Layer normalisation and root-mean-square normalisation, with statistics in float32 at least."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.functional.checks import as_floating
from jaxformer.functional.numerics import compute_dtype


def layer_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *, epsilon: float = 1e-5
) -> Float[Array, "..."]:
    """Layer normalisation over the last axis: (x - mean) / sqrt(variance + epsilon) * scale + bias.

    Ba, Kiros, Hinton 2016, "Layer Normalization", arXiv:1607.06450, section 3. The variance is the mean squared
    deviation from the mean (two passes): mean square minus squared mean loses all digits when |mean| >> deviation.

    Args:
      x: floating [..., D].
      scale: floating [D], or None for 1.
      bias: floating [D], or None for 0.
      epsilon: added to the variance, above 0.

    Returns:
      [..., D] in x.dtype; computed in float32, or float64 if x is float64.

    Raises:
      ValueError: x is not floating or has no axis, or scale or bias is not [D].
    """
    x = as_floating(x, "x")
    values = x.astype(compute_dtype(x.dtype))
    centred = values - values.mean(-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    if scale is not None:
        normalised = normalised * _per_feature(scale, normalised, "scale")
    if bias is not None:
        normalised = normalised + _per_feature(bias, normalised, "bias")
    return normalised.astype(x.dtype)


def rms_norm(x: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6) -> Float[Array, "..."]:
    """Root-mean-square normalisation over the last axis: x / sqrt(mean of x² + epsilon) * scale.

    Zhang, Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4. Used by T5 and Llama.

    Args:
      x: floating [..., D].
      scale: floating [D], or None for 1.
      epsilon: added to the mean square, above 0.

    Returns:
      [..., D] in x.dtype; computed in float32, or float64 if x is float64.

    Raises:
      ValueError: x is not floating or has no axis, or scale is not [D].
    """
    x = as_floating(x, "x")
    values = x.astype(compute_dtype(x.dtype))
    normalised = values * jax.lax.rsqrt(jnp.square(values).mean(-1, keepdims=True) + epsilon)
    if scale is not None:
        normalised = normalised * _per_feature(scale, normalised, "scale")
    return normalised.astype(x.dtype)


def _per_feature(parameter: ArrayLike, x: Float[Array, "*batch D"], name: str) -> Float[Array, "*ones D"]:
    """A [D] parameter in the dtype and rank of x."""
    parameter = jnp.asarray(parameter)
    if parameter.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {parameter.shape}; it must be {x.shape[-1:]} for x {x.shape}.")
    return parameter.astype(x.dtype).reshape((1,) * (x.ndim - 1) + parameter.shape)
