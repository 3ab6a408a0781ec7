"""Local attention: a sliding window, by its own name."""

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.patterns import Window, local
from jaxformer.attention.sparse import sparse_attention, sparse_attention_weights


def local_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    window: Window,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
) -> Float[Array, "B T N Hv"]:
    """Local attention: each query sees a window of keys around it, O(T window) time, O(T) memory.

    softmax(scale * query keyᵀ) value over keys from `before` tokens back to `after` tokens ahead: `sparse_attention`
    with the pattern `local(window)`. For long sequences whose dependencies are short, and between layers of other
    kinds: a stack of L layers reaches L windows.
    Parmar et al. 2018, "Image Transformer", arXiv:1802.05751, section 3.2; Beltagy et al. 2020, "Longformer",
    arXiv:2004.05150, section 3.1. Each query's window is its own, not that of a block.

    Args:
      query: floating [B, T, N, H].
      key: [B, T, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, T, K, Hv].
      window: tokens seen on each side besides the token itself, or (before, after); None = all on that side. Causal
        sets `after` to 0.
      key_mask: bool or 0/1 int [B or 1, T], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys behind the query.
      query_segments, key_segments: int [B or 1, T]: only tokens of equal segments see each other. One alone serves
        both.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.
      dropout_rate: fraction of the weights that is dropped, in [0, 1), rounded to a multiple of 2^-16.
      rng: one typed key for dropout; None = no dropout.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, queries that are not the keys' tokens, or a negative window.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import local_attention
        >>> query = key = jnp.zeros((1, 3, 1, 2))  # all keys alike: outputs are means of what is seen
        >>> value = jnp.array([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> local_attention(query, key, value, window=1, causal=True).ravel().tolist()
        [0.0, 1.5, 4.5]
    """
    return sparse_attention(
        query,
        key,
        value,
        pattern=local(window),
        key_mask=key_mask,
        causal=causal,
        query_segments=query_segments,
        key_segments=key_segments,
        scale=scale,
        dropout_rate=dropout_rate,
        rng=rng,
    )


def local_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    window: Window,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `local_attention` gives each value, before dropout: O(T²) time and memory, for plots and tests.

    softmax(scale * query keyᵀ) over the window. Beltagy et al. 2020, "Longformer", arXiv:2004.05150, section 3.1.

    Args:
      query, key, window, key_mask, causal, query_segments, key_segments, scale: as in `local_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as in `local_attention`.
    """
    return sparse_attention_weights(
        query,
        key,
        pattern=local(window),
        key_mask=key_mask,
        causal=causal,
        query_segments=query_segments,
        key_segments=key_segments,
        scale=scale,
    )
