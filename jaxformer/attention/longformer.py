"""Longformer attention: a sliding window, and global tokens with projections of their own."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.global_tokens import GlobalTokens, choose_tokens
from jaxformer.attention.inputs import (
    check_indices,
    check_query_key,
    check_scale,
    check_tensor,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.patterns import Window, dilated
from jaxformer.attention.plain import plain_weights
from jaxformer.attention.sparse_terms import (
    Tensors,
    attend_sparse,
    check_queries,
    make_sparse_terms,
    see_from,
    sparse_weights,
)
from jaxformer.attention.terms import Terms


def longformer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    global_query: ArrayLike,
    global_key: ArrayLike,
    global_value: ArrayLike,
    window: Window,
    dilation: int = 1,
    global_indices: Sequence[int] = (),
    global_mask: ArrayLike | None = None,
    num_global: int | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
) -> Float[Array, "B T N Hv"]:
    """Longformer attention: each token sees a window and the global tokens, which see all, O(T (window + M)) time.

    softmax(scale * query keyᵀ) value over window and global keys for ordinary tokens; for the M global tokens
    softmax(scale * global_query global_keyᵀ) global_value over all keys. O(T) memory. For long documents with a task
    that names a few tokens to look at all of it: the first one in classification, the question's in question answering.
    Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150, section 3.1. Ordinary tokens use
    the local projections for global keys too. The window here is one-sided: the paper's w is 2 window. The paper has no
    causal form; here global tokens then look back only, so that nothing comes from the future.

    Args:
      query: floating [B, T, N, H].
      key: [B, T, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, T, K, Hv].
      global_query, global_key, global_value: the same shapes and dtypes, from projections of their own (in the paper
        they start as copies of the others); only global tokens' queries are used.
      window: tokens seen on each side besides the token itself, or (before, after). Causal sets `after` to 0.
      dilation: distance from one token of the window to the next.
      global_indices: static, places of the global tokens, the same in every example; those beyond T are absent.
      global_mask: bool or 0/1 int [B or 1, T], global tokens of each example, in place of global_indices.
      num_global: static, the most tokens that a row of global_mask holds.
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
      ValueError: shapes or dtypes that do not fit; queries that are not the keys' tokens; both global_indices and
        global_mask; global_mask without num_global or, where its values are known, with more tokens than that.
    """
    query, key = check_queries(query, key, scale)
    value = check_value(value, key)
    global_query, global_key = _check_rows(global_query, global_key, query, key, scale)
    global_value = check_tensor(global_value, "global_value", "[batch, keys, kv_heads, value_dim]")
    if global_value.shape != value.shape:
        raise ValueError(f"global_value has shape {global_value.shape}; it must be that of value, {value.shape}.")
    if global_value.dtype != value.dtype:
        raise ValueError(f"global_value is {global_value.dtype} and value is {value.dtype}; they must be the same.")
    terms = make_sparse_terms(
        key,
        causal=causal,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        tokens=_choose(global_indices, global_mask, num_global, *query.shape[:2]),
        dropout_rate=dropout_rate,
        rng=rng,
    )
    rows = Tensors(global_query, global_key, global_value)
    return attend_sparse((dilated(window, dilation),), Tensors(query, key, value), rows, terms)


def longformer_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    global_query: ArrayLike,
    global_key: ArrayLike,
    window: Window,
    dilation: int = 1,
    global_indices: Sequence[int] = (),
    global_mask: ArrayLike | None = None,
    num_global: int | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights of `longformer_attention` before dropout: O(T²) time and memory, for plots and tests.

    Rows of global tokens are weights of global_value, others of value.
    Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150, section 3.1.

    Args:
      query, key, global_query, global_key, window, dilation, global_indices, global_mask, num_global, key_mask, causal,
        query_segments, key_segments, scale: as in `longformer_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as in `longformer_attention`.
    """
    query, key = check_queries(query, key, scale)
    global_query, global_key = _check_rows(global_query, global_key, query, key, scale)
    tokens = _choose(global_indices, global_mask, num_global, *query.shape[:2])
    terms = make_sparse_terms(
        key,
        causal=causal,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        tokens=tokens,
    )
    weights = sparse_weights((dilated(window, dilation),), query, key, terms)
    if tokens is None:
        return weights
    length = query.shape[1]
    everyone = jnp.arange(length, dtype=jnp.int32)[None]
    seen = see_from(terms, everyone, terms.query_segments, length)
    rows = Terms(mask=seen, num_queries=length, num_keys=length)
    row_weights = plain_weights(global_query, hide_missing(global_key, terms.key_mask), None, rows)
    return jnp.where(tokens.chosen[:, None, :, None], row_weights.astype(weights.dtype), weights)


def _check_rows(
    global_query: ArrayLike,
    global_key: ArrayLike,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    scale: ArrayLike | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Scaled global queries and global keys, of the shapes of queries and keys."""
    axes = "[batch, tokens, heads, head_dim]"
    global_query = check_tensor(global_query, "global_query", axes)
    global_key = check_tensor(global_key, "global_key", axes)
    for array, name, beside in ((global_query, "global_query", query), (global_key, "global_key", key)):
        if array.shape != beside.shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {beside.shape}.")
        if array.dtype != beside.dtype:
            raise ValueError(f"{name} is {array.dtype} and query is {beside.dtype}; they must be the same.")
    global_query, global_key = check_query_key(global_query, global_key)
    return scale_query(global_query, check_scale(scale, query.shape[3])), global_key


def _choose(
    global_indices: Sequence[int], global_mask: ArrayLike | None, num_global: int | None, batch_size: int, length: int
) -> GlobalTokens | None:
    """The global tokens, named either way."""
    indices = check_indices(global_indices, "global_indices")
    if not indices:
        return choose_tokens(global_mask, num_global, batch_size, length)
    if global_mask is not None:
        raise ValueError("global_indices and global_mask both name the global tokens; give one of them.")
    mask: Bool[np.ndarray, "1 T"] = np.isin(np.arange(length), indices)[None]
    return choose_tokens(mask, int(mask.sum()), batch_size, length) if mask.any() else None
