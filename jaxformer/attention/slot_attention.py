"""Attention from new tokens to the slots of a pattern's regions and to each other, and writing them into slots."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.pattern_algebra import CAUSAL, Pattern, intersect
from jaxformer.attention.plain import visible_powers
from jaxformer.attention.products import einsum
from jaxformer.attention.sparse_slots import Region
from jaxformer.attention.stacked import read_layer
from jaxformer.functional import compute_dtype

# Tokens of a prompt that are attended from at once.
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


class NewTokens(NamedTuple):
    """New tokens; what does not exist holds zeros."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K Hv"]
    positions: Int[Array, "B T"]
    exists: Bool[Array, "B T"]


class Source(NamedTuple):
    """Keys and values of one place, in the slots' dtype, and who sees which (None = all see all)."""

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S Hv"]
    seen: Bool[Array, "B T S"] | None


def advance(
    pattern: Pattern,
    regions: tuple[Region, ...],
    slots: Slots,
    tokens: NewTokens,
    layer: ArrayLike | None,
    added: tuple[Source, ...] = (),
) -> tuple[Float[Array, "B T N Hv"], Slots]:
    """The output for the tokens and the slots after them, by chunks of a long prompt; all see what is `added`."""
    batch_size, num_tokens = tokens.positions.shape
    if num_tokens == 0:
        return jnp.zeros((*tokens.query.shape[:3], tokens.value.shape[3]), slots.value.dtype), slots
    if num_tokens == 1:
        slots = _write(regions, slots, tokens, layer)
        return _attend(regions, read_layer(slots, layer), tokens, added), slots
    if num_tokens <= CHUNK:
        # Reading is finished before writing begins, which then needs no copy of all slots.
        now, slots = lax.optimization_barrier((read_layer(slots, layer), slots))
        output = _attend_more(pattern, regions, now, tokens, added)
        return output, _write(regions, slots, tokens, layer)
    number = -(-num_tokens // CHUNK)

    def split(array: Array) -> Array:
        array = jnp.pad(array, [(0, 0), (0, number * CHUNK - num_tokens)] + [(0, 0)] * (array.ndim - 2))
        return array.reshape(batch_size, number, CHUNK, *array.shape[2:]).swapaxes(0, 1)

    def step(slots: Slots, chunk: NewTokens) -> tuple[Slots, Array]:
        output, slots = advance(pattern, regions, slots, chunk, layer, added)
        return slots, output

    slots, outputs = lax.scan(step, slots, NewTokens(*map(split, tokens)))
    outputs = outputs.swapaxes(0, 1)
    return outputs.reshape(batch_size, number * CHUNK, *outputs.shape[3:])[:, :num_tokens], slots


def _attend(
    regions: tuple[Region, ...], slots: Slots, tokens: NewTokens, added: tuple[Source, ...]
) -> Float[Array, "B T N Hv"]:
    """Attention to the slots, in which the one new token stands already."""
    seen = _seen_slots(regions, slots, tokens.positions)
    return _softmax(tokens.query, (*added, Source(slots.key, slots.value, seen)))


def _attend_more(
    pattern: Pattern, regions: tuple[Region, ...], slots: Slots, tokens: NewTokens, added: tuple[Source, ...]
) -> Float[Array, "B T N Hv"]:
    """Attention to the slots and to the new tokens, which would take slots from each other."""
    queries, keys = tokens.positions[:, :, None], tokens.positions[:, None, :]
    seen = intersect(pattern, CAUSAL).visible(queries, keys) & tokens.exists[:, None, :]
    key, value = (array.swapaxes(1, 2).astype(slots.key.dtype) for array in (tokens.key, tokens.value))
    stored = Source(slots.key, slots.value, _seen_slots(regions, slots, tokens.positions))
    return _softmax(tokens.query, (*added, stored, Source(key, value, seen)))


def _seen_slots(regions: tuple[Region, ...], slots: Slots, positions: Int[Array, "B T"]) -> Bool[Array, "B T R"]:
    seen, start = [], 0
    for region in regions:
        stored = slots.positions[:, None, start : start + region.size]
        seen.append(region.pattern.visible(positions[:, :, None], stored) & (stored >= 0))
        start += region.size
    return jnp.concatenate(seen, 2)


def _softmax(query: Float[Array, "B T N H"], sources: tuple[Source, ...]) -> Float[Array, "B T N Hv"]:
    """Attention to keys of several places, whose logits are put side by side: a copy of all slots would cost more."""
    batch_size, num_queries, num_heads, head_dim = query.shape
    stored = sources[-1]
    dtype, num_kv_heads = compute_dtype(stored.key.dtype), stored.key.shape[1]
    grouped = query.astype(stored.key.dtype).reshape(
        batch_size, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim
    )
    logits = [einsum("btkgh,bksh->bkgts", grouped, source.key, dtype) for source in sources]
    seen = [
        jnp.ones((batch_size, num_queries, key.shape[2]), bool) if shown is None else shown for key, _, shown in sources
    ]
    powers, total = visible_powers(jnp.concatenate(logits, -1), jnp.concatenate(seen, -1)[:, None, None])
    outputs, start = [], 0
    for _, value, _ in sources:
        own = powers[..., start : start + value.shape[2]].astype(value.dtype)
        outputs.append(einsum("bkgts,bksv->bkgtv", own, value, dtype))
        start += value.shape[2]
    output = sum(outputs[1:], outputs[0]) / total
    output = output.reshape(batch_size, num_heads, num_queries, stored.value.shape[3])
    return output.swapaxes(1, 2).astype(stored.value.dtype)


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
