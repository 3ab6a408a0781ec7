"""What sparse kinds share: chosen and added global tokens around the patterns of groups of heads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.dense import dense_attention
from jaxformer.attention.global_tokens import GlobalTokens, columns
from jaxformer.attention.inputs import (
    check_dropout,
    check_flag,
    check_key_mask,
    check_query_key,
    check_scale,
    check_token_numbers,
    hide_missing,
    scale_query,
)
from jaxformer.attention.part_blocks import Source
from jaxformer.attention.patterns import Pattern
from jaxformer.attention.plain import plain_weights
from jaxformer.attention.sparse_engine import Part, attend_parts
from jaxformer.attention.terms import Terms


class Tensors(NamedTuple):
    """Queries, scaled already, and keys and values."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K Hv"]


class SparseTerms(NamedTuple):
    """Who sees whom, beside the patterns.

    Attributes:
      key_mask: True where the key exists.
      query_segments, key_segments: tokens of different segments do not see each other.
      tokens: chosen tokens that see all and are seen by all.
      added: keys and values beside the sequence that every query sees.
      causal: keys behind the query are hidden.
      dropout_rate, rng: fraction of the weights that is dropped.
    """

    key_mask: Bool[Array, "#B T"] | None
    query_segments: Int[Array, "#B T"] | None
    key_segments: Int[Array, "#B T"] | None
    tokens: GlobalTokens | None
    added: tuple[Float[Array, "B G K H"], Float[Array, "B G K Hv"]] | None
    causal: bool
    dropout_rate: float
    rng: Array | None

    def fold(self, number: int) -> Array | None:
        """Random numbers of their own for one part of the computation."""
        return None if self.rng is None else jax.random.fold_in(self.rng, number)


def check_queries(
    query: ArrayLike, key: ArrayLike, scale: ArrayLike | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Scaled queries and keys of the same tokens."""
    query, key = check_query_key(query, key)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}; a pattern is laid on the tokens of one "
            "sequence, so they must be the same."
        )
    return scale_query(query, check_scale(scale, query.shape[3])), key


def make_sparse_terms(
    key: Float[Array, "B T K H"],
    *,
    causal: bool,
    key_mask: ArrayLike | None,
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
    tokens: GlobalTokens | None = None,
    added: tuple[Float[Array, "B G K H"], Float[Array, "B G K Hv"]] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
) -> SparseTerms:
    """The checked terms of an attention among the tokens of `key`."""
    batch_size, length = key.shape[:2]
    segments = check_token_numbers(query_segments, key_segments, "segments", batch_size, length, length)
    key_mask = check_key_mask(key_mask, batch_size, length)
    return SparseTerms(
        key_mask, *segments, tokens, added, check_flag(causal, "causal"), check_dropout(dropout_rate, rng), rng
    )


def check_patterns(pattern: Pattern | tuple[Pattern, ...], num_heads: int, num_kv_heads: int) -> tuple[Pattern, ...]:
    """One pattern for each of as many equal groups of heads."""
    patterns = tuple(pattern) if isinstance(pattern, tuple | list) else (pattern,)
    if not patterns or not all(isinstance(one, Pattern) for one in patterns):
        raise ValueError(f"pattern is {pattern!r}; it must be a pattern, or a tuple of one per group of heads.")
    count = len(patterns)
    if num_heads % count or (num_kv_heads % count and count % num_kv_heads):
        raise ValueError(
            f"pattern has {count} parts for {num_heads} heads and {num_kv_heads} key heads; it must divide the heads, "
            "and divide the key heads or be a multiple of them."
        )
    return patterns


def attend_sparse(
    patterns: tuple[Pattern, ...], tensors: Tensors, row_tensors: Tensors, terms: SparseTerms
) -> Float[Array, "B T N Hv"]:
    """Attention by patterns, one for each of as many groups of heads; rows of chosen tokens are dense.

    Those rows use `row_tensors`. Keys of other rows that are chosen tokens leave the pattern and are seen as columns,
    so that none counts twice.
    """
    query, key, value = tensors
    num_heads, num_kv_heads, count = query.shape[2], key.shape[2], len(patterns)
    if 0 in (query.size, value.size):
        return jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
    tokens = terms.tokens
    key, value = hide_missing(key, terms.key_mask), hide_missing(value, terms.key_mask)
    outputs = []
    for number, pattern in enumerate(patterns):
        heads = slice(number * num_heads // count, (number + 1) * num_heads // count)
        first = number * num_kv_heads // count
        kv_heads = slice(first, max(first + 1, (number + 1) * num_kv_heads // count))
        parts, sources = _parts(pattern, key[:, :, kv_heads], value[:, :, kv_heads], kv_heads, terms)
        own = query[:, :, heads]
        outputs.append(attend_parts(parts, own, terms.query_segments, sources, terms.dropout_rate, terms.fold(number)))
    output = outputs[0] if count == 1 else jnp.concatenate(outputs, 2)
    if tokens is None:
        return output
    return tokens.replace(output, _rows(row_tensors, tokens, terms).astype(value.dtype))


def _parts(
    pattern: Pattern,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    kv_heads: slice,
    terms: SparseTerms,
) -> tuple[list[Part], tuple[Source, ...]]:
    """The pattern's components, and columns of the chosen and of the added tokens."""
    length, tokens = key.shape[1], terms.tokens
    parts = [Part(component, 0) for component in pattern.components(length, terms.causal)]
    if tokens is None:
        sources = [Source(key, value, terms.key_mask, None, terms.key_segments)]
    else:
        others = ~tokens.chosen if terms.key_mask is None else terms.key_mask & ~tokens.chosen
        mask = tokens.exists if terms.key_mask is None else tokens.take(terms.key_mask)
        segments = None if terms.key_segments is None else tokens.take(terms.key_segments)
        sources = [
            Source(key, value, others, None, terms.key_segments),
            Source(tokens.take(key), tokens.take(value), mask, tokens.positions, segments),
        ]
        looks_back = (lambda queries, keys: keys <= queries) if terms.causal else None
        parts.append(Part(columns(length, tokens.positions.shape[1], looks_back), 1))
    if terms.added is not None and terms.added[0].shape[1]:
        parts.append(Part(columns(length, terms.added[0].shape[1], None), len(sources)))
        sources.append(Source(*(array[:, :, kv_heads] for array in terms.added)))
    return parts, tuple(sources)


def _rows(tensors: Tensors, tokens: GlobalTokens, terms: SparseTerms) -> Float[Array, "B M N Hv"]:
    """The rows of the chosen tokens: dense attention."""
    key, value = hide_missing(tensors.key, terms.key_mask), hide_missing(tensors.value, terms.key_mask)
    segments = None if terms.query_segments is None else tokens.take(terms.query_segments)
    mask = see_from(terms, tokens.positions, segments, key.shape[1])
    if terms.added is not None:
        key, value = (jnp.concatenate([one, other], 1) for one, other in zip(terms.added, (key, value)))
        mask = _with_added(mask, terms.added[0].shape[1])
    return dense_attention(
        tokens.take(tensors.query),
        key,
        value,
        mask=mask,
        scale=1.0,
        dropout_rate=terms.dropout_rate,
        rng=terms.fold(2**31),
    )


def see_from(
    terms: SparseTerms, positions: Int[Array, "#B M"], segments: Int[Array, "#B M"] | None, length: int
) -> Bool[Array, "#B 1 M T"]:
    """Which keys queries at these positions, of these segments, see where no pattern restricts them."""
    keys = jnp.arange(length, dtype=jnp.int32)[None, None, :]
    seen = (keys <= positions[:, :, None]) | (not terms.causal)
    if terms.key_mask is not None:
        seen &= terms.key_mask[:, None, :]
    if segments is not None and terms.key_segments is not None:
        seen &= segments[:, :, None] == terms.key_segments[:, None, :]
    return seen[:, None]


def _with_added(mask: Bool[Array, "..."], added: int) -> Bool[Array, "..."]:
    """A mask over keys with columns of added tokens before them."""
    return jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (added, 0)), constant_values=True)


def sparse_weights(
    patterns: tuple[Pattern, ...],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    terms: SparseTerms,
) -> Float[Array, "B N T GT"]:
    """The implied matrix, columns of added tokens first, every row with the same projections."""
    length, num_heads = query.shape[1], query.shape[2]
    seen = jnp.stack([jnp.asarray(pattern.mask(length)) for pattern in patterns])[None]
    seen = seen if len(patterns) == 1 else seen.repeat(num_heads // len(patterns), 1)
    if terms.tokens is not None:
        seen = seen | terms.tokens.chosen[:, None, :, None] | terms.tokens.chosen[:, None, None, :]
    own = Terms(
        key_mask=terms.key_mask,
        query_segments=terms.query_segments,
        key_segments=terms.key_segments,
        mask=seen,
        num_queries=length,
        num_keys=length,
        causal=terms.causal,
    )
    key = hide_missing(key, terms.key_mask)
    if terms.added is None:
        return plain_weights(query, key, None, own)
    visible = own.visible()
    assert visible is not None  # A pattern's mask is one.
    mask = _with_added(visible, terms.added[0].shape[1])
    key = jnp.concatenate([terms.added[0], key], 1)
    return plain_weights(query, key, None, Terms(mask=mask, num_queries=length, num_keys=key.shape[1]))
