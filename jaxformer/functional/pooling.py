"""One vector for a row of tokens."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.functional.checks import as_floating
from jaxformer.functional.numerics import compute_dtype

POOLINGS = ("first", "last", "mean")


def pool_tokens(hidden: ArrayLike, mask: ArrayLike | None = None, *, pooling: str = "first") -> Float[Array, "B D"]:
    """The first or the last real token's vector of each row, or the mean of the real tokens': wherever padding is.

    Args:
      hidden: floating [B, L, D].
      mask: bool or 0/1 [B, L], true = the token is real; None = all are.
      pooling: ``first``, ``last`` or ``mean``, summed in float32 or wider.

    Returns:
      [B, D] in hidden.dtype. A row without a real token gives its first token, its last one, or zeros.

    Raises:
      ValueError: an unknown pooling, or shapes that do not fit.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import pool_tokens
        >>> hidden = jnp.array([[[1.0], [3.0], [100.0]]])
        >>> pool_tokens(hidden, jnp.array([[1, 1, 0]]), pooling="mean").tolist()
        [[2.0]]
    """
    hidden = as_floating(hidden, "hidden")
    if hidden.ndim != 3 or not hidden.shape[1]:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [batch, tokens, features] with a token.")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
    length = hidden.shape[1]
    real = jnp.ones(hidden.shape[:2], bool) if mask is None else jnp.asarray(mask).astype(bool)
    if real.shape != hidden.shape[:2]:
        raise ValueError(f"mask has shape {real.shape}; it must be {hidden.shape[:2]}.")
    if pooling == "mean":
        wide = jnp.where(real[..., None], hidden.astype(compute_dtype(hidden.dtype)), 0)
        count = jnp.maximum(real.sum(1, keepdims=True), 1).astype(wide.dtype)
        return (wide.sum(1) / count).astype(hidden.dtype)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    if pooling == "first":
        index = jnp.where(real, places, length).min(1) % length
    else:
        index = jnp.where(real, places, -1).max(1) % length
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
