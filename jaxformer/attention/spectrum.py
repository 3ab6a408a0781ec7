"""How close attention is to low rank: singular values of matrices of weights, and two measures of their number."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxformer.functional import compute_dtype


def attention_spectrum(weights: ArrayLike) -> tuple[Float[Array, "... R"], Float[Array, "... R"]]:
    """Singular values of matrices of attention weights, and their normalised cumulative sum: O(T S min(T, S)) time.

    What Wang et al. plot: how much of the sum of all singular values the first i make up, on average over heads and
    examples. Few of them making up nearly all is why `linformer_attention` works.
    Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768, section 3, figure 1.

    Args:
      weights: floating [.., T, S], as any `..._attention_weights` returns them. Rows and columns of padding are zeros
        and add zeros to the spectrum.

    Returns:
      float32 (float64 for float64 weights) singular values [.., min(T, S)], in falling order, and fractions
      [.., min(T, S)] that rise to 1; zeros for a matrix of zeros.

    Raises:
      ValueError: weights are not floating or not matrices.
    """
    weights = jnp.asarray(weights)
    if weights.ndim < 2 or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"weights is {weights.dtype} {weights.shape}; it must be floating [.., queries, keys].")
    values = jnp.linalg.svd(weights.astype(compute_dtype(weights.dtype)), compute_uv=False)
    return values, jnp.cumsum(_fractions(values), -1)


def effective_rank(weights: ArrayLike) -> Float[Array, "..."]:
    """The number of singular values that matter, as the exponential of their entropy: 1 up to the rank.

    exp(- sum of p log p), p being the singular values divided by their sum: n for n equal values, 1 for a single one.
    Roy, Vetterli 2007, "The effective rank: a measure of effective dimensionality", EUSIPCO, pages 606-610.

    Args:
      weights: floating [.., T, S], as in `attention_spectrum`.

    Returns:
      float32 (float64 for float64 weights) [..]; 0 for a matrix of zeros.

    Raises:
      ValueError: weights are not floating or not matrices.
    """
    values, _ = attention_spectrum(weights)
    fractions = _fractions(values)
    present = fractions > 0
    entropy = -jnp.where(present, fractions * jnp.log(jnp.where(present, fractions, 1)), 0).sum(-1)
    return jnp.where(present.any(-1), jnp.exp(entropy), jnp.zeros((), values.dtype))


def rank_for_share(weights: ArrayLike, share: float = 0.9) -> Int[Array, "..."]:
    """How many singular values make up `share` of the sum of all: the rank that Linformer's figure reads off.

    The least r such that the r largest are at least `share` of the sum.
    Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768, section 3, figure 1.

    Args:
      weights: floating [.., T, S], as in `attention_spectrum`.
      share: fraction in (0, 1).

    Returns:
      int32 [..]; 0 for a matrix of zeros.

    Raises:
      ValueError: weights are not floating or not matrices, or share is out of range.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share is {share}; it must be in (0, 1).")
    values, cumulative = attention_spectrum(weights)
    fewer = (cumulative < jnp.asarray(share, cumulative.dtype)).sum(-1, dtype=jnp.int32)
    return jnp.where(values.any(-1), fewer + 1, 0)


def _fractions(values: Float[Array, "... R"]) -> Float[Array, "... R"]:
    total = values.sum(-1, keepdims=True)
    return values / jnp.where(total == 0, jnp.ones((), values.dtype), total)
