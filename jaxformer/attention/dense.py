"""Dense attention: every query on every key that it may see, in three implementations of one meaning."""

from collections.abc import Callable

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.blockwise import blockwise_attention
from jaxformer.attention.cudnn import cudnn_attention, why_not_cudnn
from jaxformer.attention.inputs import (
    check_count,
    check_dropout,
    check_query_key,
    check_scale,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.plain import plain_attention, plain_weights
from jaxformer.attention.terms import Bias, Terms, make_terms

IMPLEMENTATIONS = ("xla", "blockwise", "cudnn")


def dense_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | Callable | None = None,
    scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str | None = None,
    block_size: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """Dense attention: each query sees every key it may, O(T S) time, O(T + S) memory (blockwise) or O(T S) (xla).

    softmax(scale * query keyᵀ + bias) value, over the visible keys. The reference that all other kinds approximate or
    restrict. Each of K key heads serves N / K query heads (grouped and multi-query attention).
    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, equation 1. A query that sees nothing gets
    zeros, and causal attention aligns the last query with the last key.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys at later positions than the query's.
      query_positions, key_positions: int [B or 1, T] and [B or 1, S], in tokens, for the causal rule and position
        biases. Default: keys at 0 .. S - 1, queries being the last T of them. One alone serves both if T = S.
      query_segments, key_segments: int [B or 1, T] and [B or 1, S]: only tokens of equal segments see each other. One
        alone serves both if T = S.
      mask: bool or 0/1 int that broadcasts to [B, N, T, S], True = may attend.
      bias: added to the logits: a floating array that broadcasts to [B, N, T, S], or a pytree that is called with
        query and key positions, `AlibiBias` or `RelativeBias`, for each block. Gets gradients.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.
      dropout_rate: fraction of the weights that is dropped, in [0, 1), rounded to a multiple of 2^-16.
      rng: one typed key for dropout; None = no dropout.
      implementation: "xla" (the whole matrix of weights in memory), "blockwise" (a running softmax over blocks of keys
        with a backward pass that recomputes; no pure forward-mode differentiation) or "cudnn" (GPU; no mask, bias,
        segments or dropout). All mean the same; the default is the fastest that supports the case.
      block_size: tokens per block of "blockwise", which it selects if no implementation is named; chosen by size and
        backend if None.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; T > S where positions matter and are not given; an unknown
        implementation, or one that does not support the case; a dropout_rate or block_size out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import dense_attention
        >>> query = key = jnp.zeros((1, 3, 1, 2))  # all keys alike: outputs are means of what is seen
        >>> value = jnp.array([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> dense_attention(query, key, value, causal=True).ravel().tolist()
        [0.0, 1.5, 3.0]
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    batch_size, num_queries, num_heads, head_dim = query.shape
    terms, bias = make_terms(
        (batch_size, num_heads, num_queries, key.shape[1]),
        key_mask=key_mask,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=mask,
        bias=bias,
    )
    scale = check_scale(scale, head_dim)
    dropout_rate = check_dropout(dropout_rate, rng)
    implementation = choose_implementation(implementation, block_size, query, key, value, bias, terms, dropout_rate)
    query = scale_query(query, scale)
    key, value = hide_missing(key, terms.key_mask), hide_missing(value, terms.key_mask)
    if implementation == "cudnn":
        return cudnn_attention(query, key, value, terms.causal)
    if implementation == "xla":
        return plain_attention(query, key, value, bias, terms, dropout_rate, rng)
    return blockwise_attention(query, key, value, bias, terms, dropout_rate, rng, block_size)


def dense_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | Callable | None = None,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `dense_attention` gives each value, before dropout: O(T S) time and memory.

    softmax(scale * query keyᵀ + bias) over the visible keys. For plots and tests.
    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, equation 1.

    Args:
      query, key, key_mask, causal, query_positions, key_positions, query_segments, key_segments, mask, bias, scale: as
        in `dense_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, or T > S where positions matter and are not given.
    """
    query, key = check_query_key(query, key)
    batch_size, num_queries, num_heads, head_dim = query.shape
    terms, bias = make_terms(
        (batch_size, num_heads, num_queries, key.shape[1]),
        key_mask=key_mask,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=mask,
        bias=bias,
    )
    query = scale_query(query, check_scale(scale, head_dim))
    return plain_weights(query, hide_missing(key, terms.key_mask), bias, terms)


def choose_implementation(
    implementation: str | None,
    block_size: int | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
    dropout_rate: float,
) -> str:
    """The implementation asked for, refused where it does not support the case, or the fastest that does."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is {implementation!r}; it must be one of {IMPLEMENTATIONS} or None.")
    if block_size is not None:
        check_count(block_size, "block_size")
        if implementation not in (None, "blockwise"):
            raise ValueError(f"block_size is {block_size}; it goes with implementation 'blockwise' only.")
    if implementation == "cudnn":
        reason = why_not_cudnn(query, key, value, bias, terms, dropout_rate)
        if reason:
            raise ValueError(f"implementation 'cudnn' does not support this case: {reason}.")
    if implementation is not None:
        return implementation
    if block_size is not None:
        return "blockwise"
    if jax.default_backend() == "gpu" and why_not_cudnn(query, key, value, bias, terms, dropout_rate) is None:
        return "cudnn"
    return "blockwise" if _blocks_pay(terms) else "xla"


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Bias,
    terms: Terms,
) -> Float[Array, "B T N Hv"]:
    """Attention on checked and scaled inputs that hold zeros where no key exists, in the form that suits their size."""
    if _blocks_pay(terms):
        return blockwise_attention(query, key, value, bias, terms, 0.0, None, None)
    return plain_attention(query, key, value, bias, terms, 0.0, None)


def _blocks_pay(terms: Terms) -> bool:
    """Whether recomputing by blocks beats keeping the whole matrix, which depends on its size and the backend.

    On CPUs the transposed layout of the blockwise form pays from some dozens of tokens on; accelerators run the plain
    form well until the matrix strains their memory.
    """
    smaller = min(terms.num_queries, terms.num_keys)
    return smaller >= (64 if jax.default_backend() == "cpu" else 1024)
