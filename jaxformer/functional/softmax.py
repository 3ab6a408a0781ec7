"""Softmax over what may be seen: a row with nothing to see gives zeros, and no NaN in any gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.functional.checks import as_floating
from jaxformer.functional.masks import as_mask
from jaxformer.functional.numerics import compute_dtype


def masked_softmax(logits: ArrayLike, mask: ArrayLike | None = None, axis: int = -1) -> Float[Array, "..."]:
    """Softmax over the entries that the mask shows; zeros where it shows none.

    exp(logit) / sum of exp(logit) over the visible entries, where an empty sum gives 0 (as in the ONNX Attention
    operator and PyTorch's safe softmax), not 0/0 or a uniform average. A row whose logits are all -inf is empty too.
    Masked entries get exactly 0 and pass no gradient, whatever they hold, NaN and infinity included.

    Args:
      logits: floating [...]; computed in float32, or float64 if they are float64.
      mask: bool or 0/1 int that broadcasts to the shape of logits, True = visible; None = all visible.
      axis: the axis that is normalised.

    Returns:
      Weights of the shape and dtype of logits: sums of 1 along axis, or 0 in an empty row.

    Raises:
      ValueError: logits are not floating or have no axis, or the mask does not broadcast to their shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import masked_softmax
        >>> masked_softmax(jnp.zeros((2, 2)), jnp.array([[True, True], [False, False]])).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    logits = as_floating(logits, "logits")
    scores = logits.astype(compute_dtype(logits.dtype))
    if mask is not None:
        scores = jnp.where(_broadcast_mask(mask, logits.shape), scores, -jnp.inf)
    # The bound keeps -inf - (-inf) = NaN out of an empty row: its exponentials are 0 instead.
    highest = jnp.maximum(scores.max(axis, keepdims=True, initial=-jnp.inf), jnp.finfo(scores.dtype).min)
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(highest))
    total = exponentials.sum(axis, keepdims=True)
    return (exponentials / jnp.where(total == 0, 1, total)).astype(logits.dtype)


def _broadcast_mask(mask: ArrayLike, shape: tuple[int, ...]) -> Array:
    """The mask as bool with the rank of `shape`, refused where it would not fit into it."""
    mask = as_mask(mask)
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"mask {mask.shape} does not broadcast to the logits {shape}.")
    return mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
