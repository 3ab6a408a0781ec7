"""Attention within chunks of tokens that are sorted by bucket, round by round, in O(length) memory.

Functions here take one head of one example; callers map them. Rounds are merged by their maximum, sum and accumulator,
which is exact, and no token's own key takes part: a token that saw nothing in any round gets its own value afterwards.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.products import batched_matmul
from jaxformer.attention.unit_length import unit_length
from jaxformer.functional import compute_dtype


@dataclass(frozen=True)
class Rule:
    """What a token sees of its neighbours in the sorted order.

    Attributes:
      chunk_size: tokens per chunk.
      before, after: how many chunks on each side of a token's own it sees.
      within_bucket: it sees only its own bucket's tokens of them.
      deduplicate: a key that several rounds show counts once.
      causal: it sees earlier positions only.
    """

    chunk_size: int
    before: int
    after: int
    within_bucket: bool
    deduplicate: bool
    causal: bool

    def shows(
        self,
        query_chunks: Int[Array, "*round t"],
        key_chunks: Int[Array, "*round s"],
        query_buckets: Int[Array, "*round t"],
        key_buckets: Int[Array, "*round s"],
    ) -> Bool[Array, "*round t s"]:
        """Which pairs a round shows, by the chunks and buckets of their tokens in that round."""
        apart = key_chunks[..., None, :] - query_chunks[..., :, None]
        shown = (apart >= -self.before) & (apart <= self.after)
        if self.within_bucket:
            shown &= key_buckets[..., None, :] == query_buckets[..., :, None]
        return shown

    def orders(self, query: Int[Array, "*chunk t"], key: Int[Array, "*chunk s"]) -> Bool[Array, "*chunk t s"]:
        """Which pairs positions allow: real tokens (-1 stands for no token), no token itself, and only the past."""
        query, key = query[..., :, None], key[..., None, :]
        return (query >= 0) & (key >= 0) & (key < query if self.causal else key != query)


def sort_rounds(
    rule: Rule, buckets: Int[Array, "R T"]
) -> tuple[Int[Array, "R T"], Int[Array, "R T"], Int[Array, "R T"]]:
    """The tokens sorted by (bucket, position), each token's place in that order, and its chunk.

    The sort is stable, so that no number bucket * length + position is needed, which could overflow.
    """
    order = jnp.argsort(buckets, axis=1, stable=True).astype(jnp.int32)
    place = jnp.argsort(order, axis=1).astype(jnp.int32)
    return order, place, place // jnp.int32(rule.chunk_size)


def attend_rounds(
    rule: Rule,
    query: Float[Array, "T H"],
    value: Float[Array, "T Hv"],
    exists: Bool[Array, "T"],
    buckets: Int[Array, "R T"],
) -> Float[Array, "T Hv"]:
    """The output of one head of one example; zeros for tokens that do not exist."""
    order, place, chunks = sort_rounds(rule, buckets)
    wide, dtype = compute_dtype(query.dtype), compute_dtype(value.dtype)
    length = query.shape[0]

    def add_round(merged: tuple, round_: tuple) -> tuple[tuple, None]:
        highest, total, summed = merged
        number, order, place = round_
        new_highest, new_total, new_summed = _one_round(
            rule, query, value, exists, buckets, chunks, number, order, place
        )
        top = jnp.maximum(highest, new_highest)
        old_factor, new_factor = jnp.exp(highest - top), jnp.exp(new_highest - top)
        total = total * old_factor + new_total * new_factor
        summed = summed * old_factor.astype(dtype)[:, None] + new_summed * new_factor.astype(dtype)[:, None]
        return (top, total, summed), None

    # The lowest finite number, not -inf: two of those would make a NaN.
    lowest = jnp.full((length,), jnp.finfo(wide).min, wide)
    start = (lowest, jnp.zeros((length,), wide), jnp.zeros(value.shape, dtype))
    rounds = (jnp.arange(buckets.shape[0], dtype=jnp.int32), order, place)
    (_, total, summed), _ = lax.scan(jax.checkpoint(add_round), start, rounds)
    alone = (total == 0)[:, None]
    output = summed / jnp.where(alone, jnp.ones((), dtype), total.astype(dtype)[:, None])
    # `value` holds zeros where no token exists.
    return jnp.where(alone, value.astype(dtype), output).astype(value.dtype)


def _one_round(
    rule: Rule,
    query: Float[Array, "T H"],
    value: Float[Array, "T Hv"],
    exists: Bool[Array, "T"],
    buckets: Int[Array, "R T"],
    chunks: Int[Array, "R T"],
    number: Int[Array, ""],
    order: Int[Array, "T"],
    place: Int[Array, "T"],
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T Hv"]]:
    """Highest logit, sum of powers and sum of values weighted by powers: what one round adds for every token."""
    wide, dtype = compute_dtype(query.dtype), compute_dtype(value.dtype)
    length = query.shape[0]

    def in_chunks(sorted_tokens: Array, fill: int) -> Array:
        missing = -length % rule.chunk_size
        padded = jnp.pad(sorted_tokens, [(0, missing)] + [(0, 0)] * (sorted_tokens.ndim - 1), constant_values=fill)
        return padded.reshape(-1, rule.chunk_size, *sorted_tokens.shape[1:])

    def numbers(per_round: Int[Array, "R T"]) -> Int[Array, "R C t"]:
        return jnp.moveaxis(in_chunks(per_round.T.at[order].get(mode="promise_in_bounds"), -1), 2, 0)

    def around(in_chunks: Array, fill: int) -> Array:
        return _windows(in_chunks, rule.before, rule.after, fill)

    queries = in_chunks(permute(query, order, place), 0)
    values = in_chunks(permute(value, order, place), 0)
    keys = unit_length(queries).astype(queries.dtype)
    positions = in_chunks(jnp.where(exists.at[order].get(mode="promise_in_bounds"), order, jnp.int32(-1)), -1)
    visible = rule.orders(positions, around(positions, -1))
    round_chunks, round_buckets = numbers(chunks), numbers(buckets)
    window_chunks = jax.vmap(lambda chunks: around(chunks, -1))(round_chunks)
    window_buckets = jax.vmap(lambda buckets: around(buckets, -1))(round_buckets)
    shown = rule.shows(round_chunks, window_chunks, round_buckets, window_buckets)
    rounds = lax.broadcasted_iota(jnp.int32, (buckets.shape[0], 1, 1, 1), 0)
    if rule.within_bucket:
        visible &= (shown & (rounds == number)).any(0)
    if rule.deduplicate and buckets.shape[0] > 1:
        visible &= ~(shown & (rounds < number)).any(0)
    logits = batched_matmul(queries, around(keys, 0).swapaxes(1, 2), wide)
    logits = jnp.where(visible, logits, jnp.full((), -jnp.inf, wide))
    highest = lax.stop_gradient(logits.max(-1, initial=jnp.finfo(wide).min))
    powers = jnp.exp(logits - highest[..., None])
    summed = batched_matmul(powers.astype(value.dtype), around(values, 0), dtype)

    def undo(in_chunks: Array) -> Array:
        return permute(in_chunks.reshape(-1, *in_chunks.shape[2:])[:length], place, order)

    return undo(highest), undo(powers.sum(-1)), undo(summed)


def _windows(chunks: Array, before: int, after: int, fill: int) -> Array:
    """[C, t, ..] as [C, (before + 1 + after) t, ..]: each chunk among its neighbours, cut at the first and the last."""
    count = chunks.shape[0]
    padded = jnp.pad(chunks, [(before, after)] + [(0, 0)] * (chunks.ndim - 1), constant_values=fill)
    return jnp.concatenate([padded[shift : shift + count] for shift in range(before + after + 1)], 1)


@jax.custom_vjp
def permute(array: Float[Array, "T ..."], order: Int[Array, "T"], place: Int[Array, "T"]) -> Float[Array, "T ..."]:
    """array[order]; `place` is the inverse of `order`, by which the backward pass gathers instead of scattering."""
    return array.at[order].get(mode="promise_in_bounds")


def _permute_forward(
    array: Float[Array, "T ..."], order: Int[Array, "T"], place: Int[Array, "T"]
) -> tuple[Float[Array, "T ..."], Int[Array, "T"]]:
    return array.at[order].get(mode="promise_in_bounds"), place


def _permute_backward(place: Int[Array, "T"], d_output: Float[Array, "T ..."]) -> tuple:
    return d_output.at[place].get(mode="promise_in_bounds"), None, None


permute.defvjp(_permute_forward, _permute_backward)
