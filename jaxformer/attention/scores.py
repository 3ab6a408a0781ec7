"""Attention from any function of a query and a key, by blocks of pairs that neither pass of it keeps.

A block of queries meets all keys, its scores made from one block of keys after the other; both are recomputed for the
backward pass, so that memory is O(T + S) for one block's scores at a time, whatever a score takes to compute.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxformer.attention.cache import KeyValueCache, add_tokens, slot_terms
from jaxformer.attention.inputs import as_array, check_count, check_tensor, check_value, hide_missing
from jaxformer.attention.products import einsum
from jaxformer.attention.shared_query_key import same_position
from jaxformer.attention.terms import Terms, make_terms
from jaxformer.functional import combine_masks, compute_dtype, masked_softmax

# Queries [B, t, N, ..] and keys [B, s, K, ..] of a block to logits [B, N, t, s].
Score: TypeAlias = Callable[[Array, Array], Array]
BLOCK_SIZE = 64


def check_apart(query: ArrayLike, key: ArrayLike) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K Hk"]]:
    """Query and key of one batch and dtype, whose features need not be as many."""
    query = check_tensor(query, "query", "[batch, queries, heads, head_dim]")
    key = check_tensor(key, "key", "[batch, keys, kv_heads, key_dim]")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query {query.shape} and key {key.shape} must have equal batch sizes.")
    if query.dtype != key.dtype:
        raise ValueError(f"query is {query.dtype} and key is {key.dtype}; they must have the same dtype.")
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads and key has {num_kv_heads}; key heads must divide query heads.")
    if 0 in (query.shape[3], key.shape[3]):
        raise ValueError(f"query {query.shape} and key {key.shape} must have at least one feature.")
    return query, key


def check_array(array: ArrayLike, name: str, *shapes: tuple[int | str, ...]) -> Float[Array, "..."]:
    """The array, refused unless it is floating and of one of the shapes; a name stands for any size above 0."""
    array = as_array(array, name)

    def fits(shape: tuple[int | str, ...]) -> bool:
        pairs = zip(array.shape, shape)
        return array.ndim == len(shape) and all(
            size == wanted or (isinstance(wanted, str) and size > 0) for size, wanted in pairs
        )

    if not any(fits(shape) for shape in shapes):
        wanted = " or ".join(str(list(shape)).replace("'", "") for shape in shapes)
        raise ValueError(f"{name} has shape {array.shape}; it must be {wanted}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} is {array.dtype}; it must be floating.")
    return array


def core_terms(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K Hk"],
    key_mask: ArrayLike | None,
    causal: bool,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Terms:
    """Who sees whom by the core arguments."""
    terms, _ = make_terms(
        (len(query), query.shape[2], query.shape[1], key.shape[1]),
        key_mask=key_mask,
        causal=causal,
        query_positions=None,
        key_positions=None,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=None,
        bias=None,
    )
    return terms


def attend_scores(
    score: Score,
    query: Array,
    key: Array,
    value: Float[Array, "B S K Hv"],
    terms: Terms,
    block_size: int,
    others_only: bool = False,
) -> Float[Array, "B T N Hv"]:
    """softmax(score(query, key)) value over the visible keys, or over those at other positions than the query's."""
    check_count(block_size, "block_size")
    batch_size, length, num_heads = query.shape[:3]
    num_kv_heads, value_dim = value.shape[2:]
    if 0 in (length, value.size):
        return jnp.zeros((batch_size, length, num_heads, value_dim), value.dtype)

    def attend(weights: Float[Array, "B N t S"]) -> Float[Array, "B t N Hv"]:
        grouped = weights.reshape(batch_size, num_kv_heads, -1, *weights.shape[2:])
        output = einsum("bkgts,bskv->btkgv", grouped, value.astype(weights.dtype), weights.dtype)
        return output.reshape(*output.shape[:2], num_heads, value_dim).astype(value.dtype)

    blocks = _over_queries(attend, score, query, key, terms, block_size, others_only)
    return jnp.moveaxis(blocks, 0, 1).reshape(batch_size, -1, num_heads, value_dim)[:, :length]


def score_weights(
    score: Score, query: Array, key: Array, terms: Terms, others_only: bool = False
) -> Float[Array, "B N T S"]:
    """The weights of `attend_scores`."""
    batch_size, length, num_heads = query.shape[:3]
    num_keys = key.shape[1]
    if 0 in (length, num_keys):
        return jnp.zeros((batch_size, num_heads, length, num_keys), compute_dtype(query.dtype))
    blocks = _over_queries(lambda weights: weights, score, query, key, terms, BLOCK_SIZE, others_only)
    return jnp.moveaxis(blocks, 0, 2).reshape(batch_size, num_heads, -1, num_keys)[:, :, :length]


def step_scores(
    prepare: Callable[[Array, Array], tuple[Score, Array, Array]],
    cache: KeyValueCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K Hk"],
    value: ArrayLike,
    layer: ArrayLike | None,
    positions: ArrayLike | None,
    key_mask: ArrayLike | None,
    segments: ArrayLike | None,
    others_only: bool = False,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into the cache and attends from them; `prepare` makes the score and what it scores.

    With `others_only` from each to the tokens at other positions than its own.
    """
    value = check_value(value, key)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} tokens and key {key.shape[1]}; a step adds the same to both.")
    cache, now = add_tokens(cache, key, value, layer, positions, segments, key_mask)
    terms, _ = slot_terms(now, query.shape)
    score, queries, keys = prepare(query, now.key.swapaxes(1, 2))
    output = attend_scores(score, queries, keys, now.value.swapaxes(1, 2), terms, BLOCK_SIZE, others_only)
    return output.astype(value.dtype), cache


def hide_keys(key: Array, value: Array, terms: Terms) -> tuple[Array, Array]:
    """Zeros where no key exists."""
    return hide_missing(key, terms.key_mask), hide_missing(value, terms.key_mask)


def _over_queries(
    use: Callable[[Array], Array],
    score: Score,
    query: Array,
    key: Array,
    terms: Terms,
    block_size: int,
    others_only: bool,
) -> Array:
    """`use` of the weights [B, N, t, S] of one block of queries after the other, stacked."""
    length, num_keys = query.shape[1], key.shape[1]
    size = min(block_size, length)
    starts = jnp.arange(0, length, size, dtype=jnp.int32)
    blocks = _blocks(query, size)
    padded = _pad_queries(terms, len(starts) * size)
    key_blocks = _blocks(key, min(block_size, num_keys))

    @jax.checkpoint
    def one(tokens: tuple[Array, Int[Array, ""]]) -> Array:
        queries, start = tokens
        logits = lax.map(jax.checkpoint(lambda keys: score(queries, keys)), key_blocks)
        logits = jnp.moveaxis(logits, 0, 3).reshape(*logits.shape[1:4], -1)[..., :num_keys]
        block = padded.block(start, size, 0, num_keys)
        others = ~same_position(*block.positions()) if others_only else None
        return use(masked_softmax(logits, combine_masks(block.visible(), others)))

    return lax.map(one, (blocks, starts))


def _blocks(array: Array, size: int) -> Array:
    """[B, T, ..] as [blocks, B, size, ..], filled up with zeros."""
    blocks = -(-array.shape[1] // size)
    array = jnp.pad(array, [(0, 0), (0, blocks * size - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
    return jnp.moveaxis(array.reshape(len(array), blocks, size, *array.shape[2:]), 1, 0)


def _pad_queries(terms: Terms, length: int) -> Terms:
    """The terms with more queries, whose outputs are cut off again."""

    def pad(numbers: Array | None) -> Array | None:
        return None if numbers is None else jnp.pad(numbers, ((0, 0), (0, length - numbers.shape[1])))

    return replace(
        terms,
        query_positions=pad(terms.query_positions),
        query_segments=pad(terms.query_segments),
        num_queries=length,
    )
