"""Cached decoding of sparse attention: a pattern keeps only the keys that it can still come back to."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.global_tokens import check_added
from jaxformer.attention.inputs import (
    check_count,
    check_dtype,
    check_key_mask,
    check_query_key,
    check_scale,
    check_token_numbers,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.patterns import Pattern, Window, local
from jaxformer.attention.slot_attention import NewTokens, Slots, Source, advance
from jaxformer.attention.sparse_slots import find_regions
from jaxformer.attention.sparse_terms import check_patterns
from jaxformer.attention.terms import static


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SparseCache:
    """What a pattern can still see of a sequence; a stack over depth has a leading layer axis on every leaf.

    Attributes:
      groups: slots of each group of heads, one group for each pattern.
      index: int32 [], tokens so far, padding included: the next position unless positions are given.
      max_length: longest sequence in tokens, static.
      patterns: those that the slots were laid out for, static.
    """

    groups: tuple[Slots, ...]
    index: Any
    max_length: int = static(1)
    patterns: tuple[Pattern, ...] = static(())


def init_sparse_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    pattern: Pattern | tuple[Pattern, ...],
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> SparseCache:
    """An empty cache for one layer, with slots for what the causal pattern can come back to.

    For `local(w)` these are the last w + 1 tokens, and for `blocks(size)` the last `size`, whatever max_length; chosen
    global tokens keep a slot each (and all before them, which they see), summaries theirs; columns of `strided` and
    random blocks need all tokens. A token that several parts of the pattern keep is stored for each, up to max_length.

    Args:
      batch_size: B.
      max_length: longest sequence in tokens.
      num_kv_heads: K.
      head_dim: H, of keys.
      pattern: as in `sparse_attention`.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of the stored keys and values.

    Returns:
      SparseCache, all slots empty.

    Raises:
      ValueError: a size below 1, a dtype that is not floating, or patterns that do not divide the heads.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch_size": batch_size, "max_length": max_length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "value_dim": value_dim}.items():
        check_count(size, name)
    check_dtype(dtype)
    count = len(pattern) if isinstance(pattern, tuple | list) else 1
    patterns = check_patterns(pattern, num_kv_heads * count, num_kv_heads)
    groups = []
    for one in patterns:
        slots = sum(region.size for region in find_regions(one, max_length))
        shape = (batch_size, max(1, num_kv_heads // count), slots)
        groups.append(
            Slots(
                key=jnp.zeros((*shape, head_dim), dtype),
                value=jnp.zeros((*shape, value_dim), dtype),
                positions=jnp.full((batch_size, slots), -1, jnp.int32),
            )
        )
    return SparseCache(tuple(groups), jnp.zeros((), jnp.int32), max_length, patterns)


def sparse_step(
    cache: SparseCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    pattern: Pattern | tuple[Pattern, ...],
    global_key: ArrayLike | None = None,
    global_value: ArrayLike | None = None,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], SparseCache]:
    """Attends from T new tokens to what the pattern shows of all tokens so far, causally: O(T slots) time.

    Equals the last T rows of causal `sparse_attention` over all tokens so far, whatever the tokens were split into.
    Positions in a row must increase from step to step. Padding takes no slot, so it evicts no token.

    Args:
      cache: of one layer, or stacked over depth with `layer`, made for the same pattern.
      query: floating [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, Hv].
      pattern: as in `sparse_attention`.
      global_key, global_value: floating [B or 1, G, K, H] and [B or 1, G, K, Hv], tokens beside the sequence that every
        query sees: as in `sparse_attention`, the same at each step. They take no slots; cast to the cache's dtype.
      layer: int [], which layer of a stacked cache; only its slots change, in place where the cache is a loop's carry.
      positions: int [B or 1, T], in tokens; by default they go on counting from the last step, padding included.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which no query sees. What padding's own query holds,
        NaN included, stays in its own row of the output, which means nothing.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, patterns that do not divide the heads or
        that the cache was not made for, or, where the cache is not traced, more tokens than max_length (unless the
        pattern keeps the latest tokens alone).
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    batch_size, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if num_tokens != key.shape[1]:
        raise ValueError(f"query has {num_tokens} tokens and key {key.shape[1]}; a step adds the same to both.")
    patterns = check_patterns(pattern, num_heads, num_kv_heads)
    positions, _ = check_token_numbers(positions, None, "positions", batch_size, num_tokens, num_tokens)
    key_mask = check_key_mask(key_mask, batch_size, num_tokens)
    added = check_added(global_key, global_value, key, value)
    _check_cache(cache, patterns, key, value, layer)
    index = cache.index if layer is None else cache.index[layer]
    if positions is None:
        positions = index + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    tokens = NewTokens(
        scale_query(query, check_scale(scale, head_dim)),
        hide_missing(key, key_mask),
        hide_missing(value, key_mask),
        jnp.broadcast_to(positions, (batch_size, num_tokens)),
        jnp.broadcast_to(jnp.ones((1, 1), bool) if key_mask is None else key_mask, (batch_size, num_tokens)),
    )
    count = len(patterns)
    outputs, groups = [], []
    for number, (one, slots) in enumerate(zip(patterns, cache.groups)):
        first = number * num_kv_heads // count
        kv_heads = slice(first, max(first + 1, (number + 1) * num_kv_heads // count))
        own = tokens._replace(
            query=tokens.query[:, :, number * num_heads // count : (number + 1) * num_heads // count],
            key=tokens.key[:, :, kv_heads],
            value=tokens.value[:, :, kv_heads],
        )
        output, slots = advance(
            one, find_regions(one, cache.max_length), slots, own, layer, _added_source(added, kv_heads, slots)
        )
        outputs.append(output)
        groups.append(slots)
    output = outputs[0] if count == 1 else jnp.concatenate(outputs, 2)
    index = index + jnp.int32(num_tokens)
    index = index if layer is None else cache.index.at[layer].set(index)
    return output.astype(value.dtype), replace(cache, groups=tuple(groups), index=index)


def init_local_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: Window,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> SparseCache:
    """An empty cache for one layer of `local_attention`: the last `before` + 1 tokens, whatever max_length.

    Args:
      batch_size, max_length, num_kv_heads, head_dim, value_dim, dtype: as in `init_sparse_cache`.
      window: as in `local_attention`.

    Returns:
      SparseCache, all slots empty.

    Raises:
      ValueError: as in `init_sparse_cache`, or a negative window.
    """
    return init_sparse_cache(
        batch_size, max_length, num_kv_heads, head_dim, pattern=local(window), value_dim=value_dim, dtype=dtype
    )


def local_step(
    cache: SparseCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    window: Window,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], SparseCache]:
    """`sparse_step` for `local_attention`, for any number of tokens.

    Args:
      cache: made by `init_local_cache` with the same window.
      query, key, value, layer, positions, key_mask, scale: as in `sparse_step`.
      window: as in `local_attention`.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: as in `sparse_step`, or a negative window.
    """
    return sparse_step(
        cache,
        query,
        key,
        value,
        pattern=local(window),
        layer=layer,
        positions=positions,
        key_mask=key_mask,
        scale=scale,
    )


def _added_source(
    added: tuple[Float[Array, "B G K H"], Float[Array, "B G K Hv"]] | None, kv_heads: slice, slots: Slots
) -> tuple[Source, ...]:
    """Keys and values of added tokens for some heads, like the slots; nothing where there are none."""
    if added is None or added[0].shape[1] == 0:
        return ()
    key, value = (array[:, :, kv_heads].swapaxes(1, 2).astype(slots.key.dtype) for array in added)
    return (Source(key, value, None),)


def _check_cache(
    cache: SparseCache,
    patterns: tuple[Pattern, ...],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    layer: ArrayLike | None,
) -> None:
    if cache.patterns != patterns:
        raise ValueError(f"pattern is {patterns}; the cache was made for {cache.patterns}.")
    for slots, pattern in zip(cache.groups, patterns):
        regions = find_regions(pattern, cache.max_length)
        lead = (key.shape[0], max(1, key.shape[2] // len(patterns)), sum(region.size for region in regions))
        for name, stored, new in (("key", slots.key, key), ("value", slots.value, value)):
            if stored.ndim != (4 if layer is None else 5):
                advice = "give layer for a stacked cache" if layer is None else "layer goes with a stacked cache"
                raise ValueError(f"the cache's {name} has shape {stored.shape}; {advice}.")
            if stored.shape[-4:] != (*lead, new.shape[3]):
                raise ValueError(
                    f"{name} {new.shape} with pattern {pattern} needs slots {(*lead, new.shape[3])}, the cache has "
                    f"{stored.shape[-4:]} (batch, kv_heads, slots, head size)."
                )
        used = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index.max())
        if used + key.shape[1] > cache.max_length and not all(region.endless for region in regions):
            raise ValueError(
                f"{key.shape[1]} tokens do not fit: the cache has {used} of at most {cache.max_length} (max_length)."
            )
