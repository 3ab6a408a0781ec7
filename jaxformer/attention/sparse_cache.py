"""Cached decoding of sparse attention: a pattern keeps only the keys that it can still come back to."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import (
    check_key_mask,
    check_query_key,
    check_scale,
    check_token_numbers,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.pattern_algebra import CAUSAL, Pattern, intersect
from jaxformer.attention.patterns import Window, local
from jaxformer.attention.plain import plain_attention
from jaxformer.attention.sparse_slots import Region, find_regions
from jaxformer.attention.sparse_terms import check_patterns
from jaxformer.attention.stacked import read_layer
from jaxformer.attention.terms import Terms, static

# NewTokens of a prompt that are attended from at once.
CHUNK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Slots:
    """Slots of the heads that share a pattern, R for each row: those of its regions, one after the other.

    Attributes:
      key: [B, K, R, H], zeros in empty slots.
      value: [B, K, R, Hv], likewise.
      positions: int32 [B, R], position of the token in each slot, -1 in empty ones.
    """

    key: Any
    value: Any
    positions: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SparseCache:
    """What a pattern can still see of a sequence; a stack over depth has a leading layer axis on every leaf.

    Attributes:
      groups: slots of each group of heads, one group for each pattern.
      index: int32 [], tokens so far, padding included: the next position unless positions are given.
      max_length: longest sequence in tokens, static.
    """

    groups: tuple[Slots, ...]
    index: Any
    max_length: int = static(1)


class NewTokens(NamedTuple):
    """New tokens; what does not exist holds zeros."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K Hv"]
    positions: Int[Array, "B T"]
    exists: Bool[Array, "B T"]


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
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; it must be floating.")
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
    return SparseCache(tuple(groups), jnp.zeros((), jnp.int32), max_length)


def sparse_step(
    cache: SparseCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    pattern: Pattern | tuple[Pattern, ...],
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
      layer: int [], which layer of a stacked cache; only its slots change, in place where the cache is a loop's carry.
      positions: int [B or 1, T], in tokens; by default they go on counting from the last step, padding included.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which no query sees.
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
        output, slots = _advance(one, find_regions(one, cache.max_length), slots, own, layer)
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


def _check_cache(
    cache: SparseCache,
    patterns: tuple[Pattern, ...],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    layer: ArrayLike | None,
) -> None:
    if len(cache.groups) != len(patterns):
        raise ValueError(f"pattern has {len(patterns)} parts; the cache was made for {len(cache.groups)}.")
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


def _advance(
    pattern: Pattern, regions: tuple[Region, ...], slots: Slots, tokens: NewTokens, layer: ArrayLike | None
) -> tuple[Float[Array, "B T N Hv"], Slots]:
    """The output for the tokens and the slots after them, by chunks of a long prompt."""
    batch_size, num_tokens = tokens.positions.shape
    if num_tokens == 0:
        return jnp.zeros((*tokens.query.shape[:3], tokens.value.shape[3]), slots.value.dtype), slots
    if num_tokens == 1:
        slots = _write(regions, slots, tokens, layer)
        return _attend(regions, read_layer(slots, layer), tokens), slots
    if num_tokens <= CHUNK:
        # Reading is finished before writing begins, which then needs no copy of all slots.
        now, slots = lax.optimization_barrier((read_layer(slots, layer), slots))
        output = _attend_more(pattern, regions, now, tokens)
        return output, _write(regions, slots, tokens, layer)
    number = -(-num_tokens // CHUNK)

    def split(array: Array) -> Array:
        array = jnp.pad(array, [(0, 0), (0, number * CHUNK - num_tokens)] + [(0, 0)] * (array.ndim - 2))
        return array.reshape(batch_size, number, CHUNK, *array.shape[2:]).swapaxes(0, 1)

    def step(slots: Slots, chunk: NewTokens) -> tuple[Slots, Array]:
        output, slots = _advance(pattern, regions, slots, chunk, layer)
        return slots, output

    slots, outputs = lax.scan(step, slots, NewTokens(*map(split, tokens)))
    outputs = outputs.swapaxes(0, 1)
    return outputs.reshape(batch_size, number * CHUNK, *outputs.shape[3:])[:, :num_tokens], slots


def _attend(regions: tuple[Region, ...], slots: Slots, tokens: NewTokens) -> Float[Array, "B T N Hv"]:
    """Attention to the slots, in which the one new token stands already."""
    return _softmax(tokens.query, slots.key, slots.value, _seen_slots(regions, slots, tokens.positions))


def _attend_more(
    pattern: Pattern, regions: tuple[Region, ...], slots: Slots, tokens: NewTokens
) -> Float[Array, "B T N Hv"]:
    """Attention to the slots and to the new tokens, which would take slots from each other."""
    queries, keys = tokens.positions[:, :, None], tokens.positions[:, None, :]
    seen = intersect(pattern, CAUSAL).visible(queries, keys) & tokens.exists[:, None, :]
    return _softmax(
        tokens.query,
        jnp.concatenate([slots.key, tokens.key.swapaxes(1, 2).astype(slots.key.dtype)], 2),
        jnp.concatenate([slots.value, tokens.value.swapaxes(1, 2).astype(slots.value.dtype)], 2),
        jnp.concatenate([_seen_slots(regions, slots, tokens.positions), seen], 2),
    )


def _seen_slots(regions: tuple[Region, ...], slots: Slots, positions: Int[Array, "B T"]) -> Bool[Array, "B T R"]:
    seen, start = [], 0
    for region in regions:
        stored = slots.positions[:, None, start : start + region.size]
        seen.append(region.pattern.visible(positions[:, :, None], stored) & (stored >= 0))
        start += region.size
    return jnp.concatenate(seen, 2)


def _softmax(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    seen: Bool[Array, "B T S"],
) -> Float[Array, "B T N Hv"]:
    terms = Terms(mask=seen[:, None], num_queries=query.shape[1], num_keys=key.shape[2])
    return plain_attention(query.astype(key.dtype), key.swapaxes(1, 2), value.swapaxes(1, 2), None, terms, 0.0, None)


def _write(regions: tuple[Region, ...], slots: Slots, tokens: NewTokens, layer: ArrayLike | None) -> Slots:
    """The slots with the tokens that exist in them; of several for one slot of a ring, the last."""
    num_slots = slots.positions.shape[-1]
    rows = jnp.arange(len(tokens.positions), dtype=jnp.int32)[:, None]
    lead = (rows,) if layer is None else (jnp.asarray(layer, jnp.int32).reshape(1, 1), rows)
    start = 0
    for region in regions:
        slot = region.slot(tokens.positions)
        kept = tokens.exists & (slot >= 0) & (slot < region.size)
        if region.ring and slot.shape[1] > 1:
            kept &= ~_comes_again(slot, tokens.exists)
        place = jnp.where(kept, slot + start, num_slots)
        start += region.size
        slots = Slots(
            slots.key.at[(*lead, slice(None), place)].set(tokens.key.astype(slots.key.dtype), mode="drop"),
            slots.value.at[(*lead, slice(None), place)].set(tokens.value.astype(slots.value.dtype), mode="drop"),
            slots.positions.at[(*lead, place)].set(tokens.positions, mode="drop"),
        )
    return slots


def _comes_again(slot: Int[Array, "B T"], exists: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    number = jnp.arange(slot.shape[1], dtype=jnp.int32)
    later = (number[None, :, None] < number[None, None, :]) & exists[:, None, :]
    return (later & (slot[:, :, None] == slot[:, None, :])).any(-1)
