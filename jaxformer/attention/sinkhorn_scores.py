"""Sinkhorn balancing: scores between blocks become a soft permutation, causally too, and what blocks are scored by."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.inputs import as_array, check_count, check_flag, check_key_mask, check_number
from jaxformer.functional import as_mask, compute_dtype

# Least temperature, and bound of the scores over it, far inside float32's range.
LEAST_TEMPERATURE, LARGEST = 1e-30, 1e28


def sinkhorn(
    scores: ArrayLike,
    num_iterations: int = 8,
    *,
    temperature: float = 1.0,
    mask: ArrayLike | None = None,
    causal: bool = False,
) -> Float[Array, "... M M"]:
    """A soft permutation from scores: rows and columns are scaled to sums of 1 in turn, O(M²) time a round.

    exp(scores / temperature), then `num_iterations` times columns and rows, all in the log domain, so that no score is
    too large. Tends to the one doubly stochastic matrix of this form; rows are exact after any number of rounds.
    Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, section 3, after Sinkhorn 1964. The paper
    scales rows first and columns last: here each row ends as the weights of a mean.

    Causal: row i keeps the columns before it, j < i, so that row 0 is empty. A column's sum runs over the rows up to
    i alone: a row takes of a column what the rows before it have left, and no entry depends on a later row or column.

    Args:
      scores: floating [.., M, M], row i's wish for column j. Computed in float32, or float64 if they are float64. -inf
        is an entry of 0, as by the mask, and scores / temperature beyond 1e28 count as that.
        Gumbel noise, if any, is added by the caller, in training only.
      num_iterations: rounds, at least 1.
      temperature: at least 1e-30; lower is closer to a hard permutation.
      mask: bool or 0/1 int that broadcasts to scores, False = the entry is 0. Sums run over the rest.
      causal: rows see earlier columns only, and depend on earlier rows only.

    Returns:
      [.., M, M] in the dtype of computation: rows of sum 1, or 0 where a row has no entry.

    Raises:
      ValueError: scores that are not floating and square, a mask that does not fit, or a number out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import sinkhorn
        >>> sinkhorn(jnp.array([[0.0, -jnp.inf], [0.0, 0.0]]), 50).round(1).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    scores = as_array(scores, "scores")
    if not jnp.issubdtype(scores.dtype, jnp.floating) or scores.ndim < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"scores is {scores.dtype} {scores.shape}; it must be floating and square in its last axes.")
    check_count(num_iterations, "num_iterations")
    check_flag(causal, "causal")
    check_number(temperature, "temperature", LEAST_TEMPERATURE)
    entries = scores != -jnp.inf
    if mask is not None:
        mask = as_mask(mask)
        try:
            entries = entries & jnp.broadcast_to(mask, scores.shape)
        except ValueError:
            raise ValueError(f"mask {mask.shape} does not broadcast to the scores {scores.shape}.") from None
    if causal:
        entries = jnp.tril(entries, -1)
    return _balance(scores, entries, num_iterations, temperature, causal)


def _balance(
    scores: Float[Array, "... M M"],
    entries: Bool[Array, "... M M"],
    num_iterations: int,
    temperature: float,
    causal: bool,
) -> Float[Array, "... M M"]:
    dtype = compute_dtype(scores.dtype)
    # Bounded, so that sums and differences are finite; the constant passes no gradient to what takes no part.
    scores = jnp.where(entries, scores.astype(dtype), jnp.zeros((), dtype)) / jnp.asarray(temperature, dtype)
    scores = jnp.clip(scores, -LARGEST, LARGEST)
    # Finite, so that no difference of two of them is NaN, and far below any score.
    nothing = jnp.asarray(-1e30, dtype)

    def keep(logits: Array) -> Array:
        return jnp.where(entries, logits, nothing)

    def one_round(logits: Array, _: None) -> tuple[Array, None]:
        if causal:
            columns = lax.associative_scan(jnp.logaddexp, logits, axis=logits.ndim - 2)
        else:
            columns = jax.nn.logsumexp(logits, -2, keepdims=True)
        logits = keep(logits - columns)
        return keep(logits - jax.nn.logsumexp(logits, -1, keepdims=True)), None

    logits, _ = lax.scan(one_round, keep(scores), length=num_iterations)
    return jnp.where(entries, jnp.exp(logits), jnp.zeros((), dtype))


def block_summaries(
    x: ArrayLike, block_size: int, *, key_mask: ArrayLike | None = None, causal: bool = False
) -> Float[Array, "B M D"]:
    """One vector for each block of tokens, from which a sorting network computes the scores between blocks.

    The mean of the block's tokens that exist; causal: the mean of all tokens from the first up to the block's own first
    token, so that a summary holds nothing that any query of its block may not see.
    Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, section 3, where tokens are summed: a mean has one
    scale at any length and any amount of padding.

    Args:
      x: floating [B, T, D], the layer's input.
      block_size: tokens per block; the last block may be shorter.
      key_mask: bool or 0/1 int [B or 1, T], True = the token exists. What x holds elsewhere changes nothing.
      causal: summaries hold no later token than the block's first.

    Returns:
      [B, M, D] in x.dtype, M being T / block_size rounded up; zeros where there is no token to take the mean of.

    Raises:
      ValueError: x or key_mask of another shape or dtype, or a block_size below 1.
    """
    x = as_array(x, "x")
    if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; it must be floating [batch, tokens, features].")
    check_count(block_size, "block_size")
    check_flag(causal, "causal")
    batch_size, length, size = x.shape
    dtype = compute_dtype(x.dtype)
    key_mask = check_key_mask(key_mask, batch_size, length)
    mask = jnp.ones((1, length), bool) if key_mask is None else key_mask
    tokens = jnp.where(mask[:, :, None], x.astype(dtype), jnp.zeros((), dtype))
    num_blocks = -(-length // block_size)
    fill = num_blocks * block_size - length
    tokens = jnp.pad(tokens, [(0, 0), (0, fill), (0, 0)]).reshape(batch_size, num_blocks, block_size, size)
    counts = jnp.pad(mask, [(0, 0), (0, fill)]).astype(dtype).reshape(mask.shape[0], num_blocks, block_size, 1)
    sums, totals = tokens.sum(2), counts.sum(2)
    if causal:
        sums, totals = _before(sums) + tokens[:, :, 0], _before(totals) + counts[:, :, 0]
    return (sums / jnp.maximum(totals, 1)).astype(x.dtype)


def _before(sums: Float[Array, "#B M D"]) -> Float[Array, "#B M D"]:
    """The sum of all earlier blocks."""
    return jnp.pad(jnp.cumsum(sums, 1), [(0, 0), (1, 0), (0, 0)])[:, : sums.shape[1]]
