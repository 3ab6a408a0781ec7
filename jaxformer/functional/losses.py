"""Cross-entropy as sums and counts, so that losses of any batches, hosts or accumulation steps add up exactly."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxformer.functional.checks import as_floating, as_integers
from jaxformer.functional.numerics import compute_dtype


class CrossEntropy(NamedTuple):
    """Sums over supervised tokens. Sums of several batches may be added, leaf by leaf, before dividing.

    Attributes:
      loss_sum: weighted sum of the cross-entropy (nats), with label smoothing but without z-loss.
      weight_sum: sum of the weights: the number of supervised tokens if there are none given.
      num_correct: sum of the weights of the tokens whose label has the highest logit.
      z_loss_sum: z_loss times the weighted sum of logsumexp², to be added to loss_sum in training.
    """

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    num_correct: Float[Array, ""]
    z_loss_sum: Float[Array, ""]


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    ignore_label: int = -100,
) -> CrossEntropy:
    """Cross-entropy of integer labels, summed over the tokens that are supervised.

    logsumexp(logits) - logit of the label; with smoothing s the target is (1 - s) at the label plus s / V everywhere
    (Szegedy et al. 2016, arXiv:1512.00567, section 7). z_loss * logsumexp² keeps the normaliser near 1 (Chowdhery et
    al. 2022, "PaLM", arXiv:2204.02311, section 5). What stands at tokens that are ignored or of weight 0, NaN included,
    reaches neither the sums nor the gradients. A label outside [0, vocab_size) gives NaN, never another token's loss.

    Args:
      logits: floating [..., V].
      labels: int [...], in [0, vocab_size), or ignore_label where the token is not supervised.
      weights: real [...], weight of each token's loss; None = 1.
      label_smoothing: share of the target that is spread evenly over the vocabulary, in [0, 1).
      z_loss: coefficient of logsumexp², at least 0; usually 1e-4.
      vocab_size: number of real tokens where V is padded: later columns take part in nothing. None = V.
      ignore_label: label of tokens without supervision.

    Returns:
      CrossEntropy of float32 scalars (float64 for float64 logits).

    Raises:
      ValueError: shapes or dtypes that do not fit, or a number outside its range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import cross_entropy, mean_loss
        >>> sums = cross_entropy(jnp.zeros((1, 3, 4)), jnp.array([[2, 0, -100]]))  # the last is not supervised
        >>> round(float(mean_loss(sums.loss_sum, sums.weight_sum)), 4)  # log(4)
        1.3863
    """
    logits, labels = as_floating(logits, "logits"), as_integers(labels, "labels")
    _check_options(label_smoothing, z_loss, vocab_size, logits.shape[-1])
    weights = _token_weights(weights, labels, logits.shape[:-1], compute_dtype(logits.dtype), ignore_label)
    return _sums(logits, labels, weights, label_smoothing, z_loss, vocab_size)


def chunked_cross_entropy(
    hidden: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    chunk_size: int,
    weights: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    ignore_label: int = -100,
) -> CrossEntropy:
    """`cross_entropy` of hidden @ kernel in O(chunk_size * V) memory: the logits of all tokens never exist at once.

    Chunks are computed one after the other and once more in the backward pass: for a quarter more arithmetic in the
    output layer, its memory no longer grows with batch and length. Worth it where tokens * V fills the device.

    Args:
      hidden: floating [..., D], the inputs of the output layer.
      kernel: floating [D, V], cast to the dtype of hidden for the product; its gradient adds up in its own dtype.
      labels: int [...], as in `cross_entropy`.
      chunk_size: number of tokens whose logits exist at once, at least 1. Every chunk takes tokens from the whole
        batch, so that with a sharded batch all devices work on it (chunk_size being a multiple of their number).
      weights: see `cross_entropy`, as are label_smoothing, z_loss, vocab_size and ignore_label.
      label_smoothing: share of the target that is spread evenly over the vocabulary, in [0, 1).
      z_loss: coefficient of logsumexp², at least 0.
      vocab_size: number of real tokens where V is padded; None = V.
      ignore_label: label of tokens without supervision.

    Returns:
      CrossEntropy of float32 scalars (float64 for float64 hidden).

    Raises:
      ValueError: shapes or dtypes that do not fit, or a number outside its range.
    """
    hidden, kernel = as_floating(hidden, "hidden"), as_floating(kernel, "kernel")
    labels = as_integers(labels, "labels")
    if kernel.ndim != 2 or kernel.shape[0] != hidden.shape[-1]:
        raise ValueError(f"kernel has shape {kernel.shape}; it must be [{hidden.shape[-1]}, V] for {hidden.shape}.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1 token.")
    _check_options(label_smoothing, z_loss, vocab_size, kernel.shape[1])
    weights = _token_weights(weights, labels, hidden.shape[:-1], compute_dtype(hidden.dtype), ignore_label)
    tokens = (hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), weights.reshape(-1))

    @jax.checkpoint
    def add_chunk(sums: CrossEntropy, chunk: tuple[Array, Array, Array]) -> tuple[CrossEntropy, None]:
        logits = _project(chunk[0], kernel, chunk[2])
        chunk_sums = _sums(logits, chunk[1], chunk[2], label_smoothing, z_loss, vocab_size)
        return jax.tree.map(jnp.add, sums, chunk_sums), None

    zeros = CrossEntropy(*jnp.zeros((4,), weights.dtype))
    return jax.lax.scan(add_chunk, zeros, jax.tree.map(lambda array: _chunks(array, chunk_size), tokens))[0]


def mean_loss(loss_sum: ArrayLike, weight_sum: ArrayLike) -> Float[Array, ""]:
    """loss_sum / weight_sum; 0 with gradient 0 if no token is supervised.

    Args:
      loss_sum: floating scalar, over the whole step.
      weight_sum: floating scalar, over the whole step.

    Returns:
      Scalar in the dtype of loss_sum.
    """
    loss_sum = jnp.asarray(loss_sum)
    weight_sum = jnp.asarray(weight_sum).astype(loss_sum.dtype)
    supervised = weight_sum != 0
    return jnp.where(supervised, loss_sum / jnp.where(supervised, weight_sum, 1), 0)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _sums(
    logits: Float[Array, "*tokens V"],
    labels: Int[Array, "*tokens"],
    weights: Float[Array, "*tokens"],
    label_smoothing: float,
    z_loss: float,
    vocab_size: int | None,
) -> CrossEntropy:
    """The sums, where weight 0 marks what is not supervised. Every pass over the logits is counted here."""
    columns, dtype = logits.shape[-1], weights.dtype
    size = vocab_size or columns
    supervised = weights != 0
    # Labels out of range, negative ones too, go where the gather fills in NaN; an ignored one is never gathered.
    # Comparing every column with the label instead would cost a further pass.
    index = jnp.where(supervised, jnp.where((labels >= 0) & (labels < size), labels, columns), 0)
    label_logit = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill")[..., 0].astype(dtype)
    highest = jax.lax.stop_gradient(logits[..., :size].max(-1)).astype(dtype)
    highest = jnp.where(supervised, jnp.maximum(highest, jnp.finfo(dtype).min), 0)
    # `where`, not a product with the weights, so that NaN at an unsupervised token has no gradient either.
    shifted = jnp.where(supervised[..., None], logits.astype(dtype) - highest[..., None], 0)
    log_sum = jnp.log(jnp.exp(_real_columns(shifted, size, -jnp.inf)).sum(-1))
    label_shifted = jnp.where(supervised, label_logit - highest, 0)
    if label_smoothing:
        mean_shifted = _real_columns(shifted, size, 0.0).sum(-1) / size
        label_shifted = (1 - label_smoothing) * label_shifted + label_smoothing * mean_shifted
    correct = _first_highest(logits, highest, size) == index
    return CrossEntropy(
        loss_sum=(weights * (log_sum - label_shifted)).sum(),
        weight_sum=weights.sum(),
        num_correct=jnp.where(correct, weights, 0).sum(),
        z_loss_sum=z_loss * (weights * jnp.square(log_sum + highest)).sum() if z_loss else jnp.zeros((), dtype),
    )


def _project(
    hidden: Float[Array, "chunk D"], kernel: Float[Array, "D V"], weights: Float[Array, "chunk"]
) -> Float[Array, "chunk V"]:
    """Logits of a chunk; unsupervised tokens are zeroed, since NaN there would reach the kernel's gradient."""
    hidden = jnp.where(weights[:, None] != 0, hidden, 0)
    return jnp.dot(hidden, kernel.astype(hidden.dtype), preferred_element_type=weights.dtype)


def _chunks(tokens: Array, chunk_size: int) -> Array:
    """[N, ...] as [chunks, chunk_size, ...], filled up with zeros (of weight 0); chunk c takes every c-th token."""
    num_chunks = -(-tokens.shape[0] // chunk_size)
    padding = [(0, num_chunks * chunk_size - tokens.shape[0])] + [(0, 0)] * (tokens.ndim - 1)
    return jnp.pad(tokens, padding).reshape(chunk_size, num_chunks, *tokens.shape[1:]).swapaxes(0, 1)


def _real_columns(values: Float[Array, "*tokens V"], size: int, fill: float) -> Float[Array, "*tokens V"]:
    """The values with columns from `size` on replaced: cheaper than a slice, whose gradient is a padded copy."""
    if size == values.shape[-1]:
        return values
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1) < size, values, fill)


def _first_highest(
    logits: Float[Array, "*tokens V"], highest: Float[Array, "*tokens"], size: int
) -> Int[Array, "*tokens"]:
    """argmax over the real columns, given the maximum that has been computed anyway."""
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_highest = (logits.astype(highest.dtype) == highest[..., None]) & (columns < size)
    return jnp.where(is_highest, columns, logits.shape[-1]).min(-1)


def _token_weights(
    weights: ArrayLike | None,
    labels: Int[Array, "*tokens"],
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    ignore_label: int,
) -> Float[Array, "*tokens"]:
    """Weight of every token, 0 where it is ignored."""
    if labels.shape != shape:
        raise ValueError(f"labels have shape {labels.shape}; they must be {shape}, one per token.")
    supervised = labels != ignore_label
    if weights is None:
        return supervised.astype(dtype)
    weights = jnp.asarray(weights)
    if weights.shape != shape:
        raise ValueError(f"weights have shape {weights.shape}; they must be {shape}, one per token.")
    return jnp.where(supervised, weights.astype(dtype), 0)


def _check_options(label_smoothing: float, z_loss: float, vocab_size: int | None, columns: int) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be within [0, 1).")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is {z_loss}; it must be at least 0.")
    if vocab_size is not None and not 1 <= vocab_size <= columns:
        raise ValueError(f"vocab_size is {vocab_size}; it must be within 1 and the {columns} columns of the logits.")
