"""Batch normalisation: statistics over the real tokens of a batch, and the running averages that evaluation uses."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.checks import as_floating
from jaxformer.functional.masks import as_mask
from jaxformer.functional.numerics import compute_dtype


class BatchStatistics(NamedTuple):
    """What ``batch_statistics`` returns.

    Attributes:
      mean: of the tokens that count [D]; 0 where none does.
      variance: their mean squared deviation from it (biased: divided by their number) [D]; 0 where none counts.
      num_tokens: how many they are, int32 [].
    """

    mean: Float[Array, "D"]
    variance: Float[Array, "D"]
    num_tokens: Int[Array, ""]


def batch_statistics(x: ArrayLike, *, mask: ArrayLike | None = None) -> BatchStatistics:
    """Mean and variance of every feature over all axes but the last: of a batch of sequences, over (batch, length).

    Ioffe, Szegedy 2015, "Batch Normalization", arXiv:1502.03167, algorithm 1. The variance is the mean squared
    deviation from the mean (two passes). With the rows of x spread over devices inside one jitted function, the sums
    are those of all devices; under ``shard_map`` or ``pmap`` they would be each device's own.

    Args:
      x: floating [..., D], two axes or more.
      mask: bool or 0/1 [...], true = the token counts. What it hides, NaN and infinity included, is in no sum and gets
        no gradient. None = all count.

    Returns:
      ``BatchStatistics``, mean and variance in float32, or float64 if x is float64.

    Raises:
      ValueError: x is not floating or has less than two axes, or mask has other axes.
    """
    x, real = _tokens(x, mask)
    axes = tuple(range(x.ndim - 1))
    values = jnp.where(real, x.astype(compute_dtype(x.dtype)), 0)
    count = real.sum(dtype=jnp.int32)
    divisor = jnp.maximum(count, 1).astype(values.dtype)
    mean = values.sum(axes) / divisor
    deviations = jnp.where(real, values - jnp.expand_dims(mean, axes), 0)
    return BatchStatistics(mean, jnp.square(deviations).sum(axes) / divisor, count)


def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mean: ArrayLike,
    variance: ArrayLike,
    mask: ArrayLike | None = None,
    epsilon: float = 1e-5,
) -> Float[Array, "..."]:
    """Batch normalisation with given statistics: (x - mean) / sqrt(variance + epsilon) * scale + bias, by feature.

    Ioffe, Szegedy 2015, "Batch Normalization", arXiv:1502.03167: algorithm 1 with the mean and the variance of
    ``batch_statistics`` of the same x and mask (training; gradients pass through both), algorithm 2 with running ones
    (evaluation: every token by itself, whatever stands beside it in the batch). In training a token's output depends on
    all others of the batch: later ones and those of other rows too, so that nothing made of it is causal.

    Args:
      x: floating [..., D], two axes or more.
      scale: floating [D], or None for 1.
      bias: floating [D], or None for 0.
      mean: floating [D].
      variance: floating [D], at least 0.
      mask: bool or 0/1 [...], true = the token exists. The others' output is 0, and they get no gradient. None = all
        exist.
      epsilon: added to the variance, above 0.

    Returns:
      [..., D] in x.dtype; computed in float32, or float64 if x is float64.

    Raises:
      ValueError: x is not floating or has less than two axes; mask has other axes; or another array is not [D].
    """
    x, real = _tokens(x, mask)
    arrays = {"mean": mean, "variance": variance, "scale": scale, "bias": bias}
    by_feature = {name: _by_feature(array, x, name) for name, array in arrays.items() if array is not None}
    # Before the products: a hidden NaN times a gradient of zero would be NaN.
    values = jnp.where(real, x.astype(compute_dtype(x.dtype)), 0)
    normalised = (values - by_feature["mean"]) * jax.lax.rsqrt(by_feature["variance"] + epsilon)
    if scale is not None:
        normalised = normalised * by_feature["scale"]
    if bias is not None:
        normalised = normalised + by_feature["bias"]
    return jnp.where(real, normalised, 0).astype(x.dtype)


def update_running(
    mean: ArrayLike, variance: ArrayLike, statistics: BatchStatistics, *, momentum: float = 0.9
) -> tuple[Float[Array, "D"], Float[Array, "D"]]:
    """Running averages after one more batch: running = momentum * running + (1 - momentum) * batch.

    So momentum is the share that is kept (PyTorch's is 1 - momentum). The variance that enters is the unbiased one,
    n / (n - 1) times that of the batch, as in Ioffe, Szegedy 2015, arXiv:1502.03167, algorithm 2, step 10; of a
    single token it is 0. The averages begin as 0 and 1 and are not corrected for it: after n batches that beginning has
    the share momentum^n in them. A batch without tokens changes nothing.

    Args:
      mean: running mean, floating [D].
      variance: running variance, floating [D].
      statistics: of the batch; no gradient passes through them.
      momentum: in [0, 1].

    Returns:
      The new running mean and variance, in the dtypes of the old.

    Raises:
      ValueError: momentum is out of range, or an array is not floating [D].
    """
    if isinstance(momentum, int | float) and not 0 <= momentum <= 1:
        raise ValueError(f"momentum={momentum!r} must be in [0, 1]")
    count = statistics.num_tokens
    correction = count.astype(statistics.variance.dtype) / jnp.maximum(count - 1, 1).astype(statistics.variance.dtype)

    def average(old: ArrayLike, new: Array, name: str) -> Array:
        old = as_floating(old, name)
        if old.shape != new.shape:
            raise ValueError(f"{name} has shape {old.shape}; it must be {new.shape}, like the statistics'.")
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        return jnp.where(count > 0, momentum * old + (1 - momentum) * new, old)

    return average(mean, statistics.mean, "mean"), average(variance, statistics.variance * correction, "variance")


def _tokens(x: ArrayLike, mask: ArrayLike | None) -> tuple[Float[Array, "*tokens D"], Bool[Array, "*tokens 1"]]:
    """Both checked, the mask with an axis for the features."""
    x = as_floating(x, "x", min_rank=2)
    mask = jnp.ones(x.shape[:-1], bool) if mask is None else as_mask(mask)
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {mask.shape}; it must be {x.shape[:-1]} for x {x.shape}.")
    return x, mask[..., None]


def _by_feature(array: ArrayLike, x: Float[Array, "*tokens D"], name: str) -> Float[Array, "*ones D"]:
    """A [D] array in the rank of x and the dtype of the computation."""
    array = as_floating(array, name)
    if array.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {array.shape}; it must be {x.shape[-1:]} for x {x.shape}.")
    return jnp.expand_dims(array.astype(compute_dtype(x.dtype)), tuple(range(x.ndim - 1)))
