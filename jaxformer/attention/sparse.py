"""Sparse attention: exact softmax over any pattern of who sees whom, computing little more than the pattern."""

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.global_tokens import check_added, choose_tokens
from jaxformer.attention.inputs import check_value
from jaxformer.attention.patterns import Pattern
from jaxformer.attention.sparse_terms import (
    Tensors,
    attend_sparse,
    check_patterns,
    check_queries,
    make_sparse_terms,
    sparse_weights,
)


def sparse_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    pattern: Pattern | tuple[Pattern, ...],
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    global_mask: ArrayLike | None = None,
    num_global: int | None = None,
    global_key: ArrayLike | None = None,
    global_value: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
) -> Float[Array, "B T N Hv"]:
    """Sparse attention: each query sees the keys of a pattern, O(pairs of the pattern) time, O(T) memory.

    softmax(scale * query keyᵀ) value, over the keys that pattern, masks and segments all show. Equal to dense attention
    with the pattern's mask, and faster where the pattern has few of the T² pairs: blocks of a reordered sequence are
    computed, at most about twice the pattern's own pairs.
    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section 4 (strided and
    fixed patterns); Zaheer et al. 2020, "Big Bird", arXiv:2007.14062, section 2. A pattern is laid on the places 0 ..
    T - 1 of a row: one that depends on distances alone (`pattern.shift_invariant`) means the same for every document
    of a packed row, others do not.

    Tokens added to the sequence, as the global input of ETC (Ainslie et al. 2020, "ETC: Encoding Long and Structured
    Inputs in Transformers", arXiv:2004.08483, section 3.2), are given by their keys and values; their own rows are
    dense:

        tokens = sparse_attention(query, key, value, pattern=local(84), global_key=k, global_value=v)
        added = dense_attention(q, concatenate([k, key], 1), concatenate([v, value], 1))

    Args:
      query: floating [B, T, N, H].
      key: [B, T, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, T, K, Hv].
      pattern: who sees whom (`jaxformer.attention.patterns`), or a tuple of patterns, one for each of as many equal
        groups of neighbouring heads.
      key_mask: bool or 0/1 int [B or 1, T], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys behind the query; the same as `pattern & causal()`, for global tokens too.
      query_segments, key_segments: int [B or 1, T]: only tokens of equal segments see each other. One alone serves
        both.
      global_mask: bool or 0/1 int [B or 1, T]: chosen tokens of each example, which see all and are seen by all, beside
        the pattern.
      num_global: static, the most chosen tokens of any row; any further ones that a traced mask holds are not global.
      global_key, global_value: floating [B or 1, G, K, H] and [B or 1, G, K, Hv], tokens beside the sequence that every
        query sees, whatever causal, key_mask and segments say; cast to key's and value's dtypes. Get gradients.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.
      dropout_rate: fraction of the weights that is dropped, in [0, 1), rounded to a multiple of 2^-16.
      rng: one typed key for dropout; None = no dropout.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; queries that are not the keys' tokens; patterns that do not divide
        the heads; global_mask without num_global or, where its values are known, with more tokens than that.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import patterns, sparse_attention
        >>> query = key = jnp.zeros((1, 3, 1, 2))  # all keys alike: outputs are means of what is seen
        >>> value = jnp.array([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> sparse_attention(query, key, value, pattern=patterns.blocks(2)).ravel().tolist()
        [1.5, 1.5, 6.0]
    """
    query, key = check_queries(query, key, scale)
    value = check_value(value, key)
    patterns = check_patterns(pattern, query.shape[2], key.shape[2])
    terms = make_sparse_terms(
        key,
        causal=causal,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        tokens=choose_tokens(global_mask, num_global, *query.shape[:2]),
        added=check_added(global_key, global_value, key, value),
        dropout_rate=dropout_rate,
        rng=rng,
    )
    tensors = Tensors(query, key, value)
    return attend_sparse(patterns, tensors, tensors, terms)


def sparse_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    pattern: Pattern | tuple[Pattern, ...],
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    global_mask: ArrayLike | None = None,
    num_global: int | None = None,
    global_key: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `sparse_attention` gives each value, before dropout: O(T²) time and memory, for plots and tests.

    softmax(scale * query keyᵀ) over the visible keys, those of added tokens first. Child et al. 2019, arXiv:1904.10509.

    Args:
      query, key, pattern, key_mask, causal, query_segments, key_segments, global_mask, num_global, global_key, scale:
        as in `sparse_attention`.

    Returns:
      float32 [B, N, T, G + T] (float64 for float64 queries), G being the added tokens: rows that sum to 1, or zeros for
      a query that sees no key.

    Raises:
      ValueError: as in `sparse_attention`.
    """
    query, key = check_queries(query, key, scale)
    terms = make_sparse_terms(
        key,
        causal=causal,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        tokens=choose_tokens(global_mask, num_global, *query.shape[:2]),
        added=check_added(global_key, global_key, key, key),
    )
    return sparse_weights(check_patterns(pattern, query.shape[2], key.shape[2]), query, key, terms)
