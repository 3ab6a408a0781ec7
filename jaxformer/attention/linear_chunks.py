"""Reordered products in three forms of one meaning: all pairs, chunks with a running state, and token by token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_layout import by_head, by_token
from jaxformer.attention.feature_state import (
    FeatureKernel,
    Keys,
    Part,
    State,
    absorb,
    attend_pairs,
    empty_state,
    hide_part,
    merge,
    pair_weights,
    quotient,
    read,
)
from jaxformer.attention.inputs import check_count, check_flag, check_token_numbers

FORMS = ("quadratic", "chunked", "recurrent")
# Tokens per chunk: with head sizes around 64, pairs within a chunk cost about as much as the state does.
CHUNK_SIZE = 128


def check_form(form: str | None, chunk_size: int) -> None:
    """Refuses forms that do not exist."""
    if form not in (None, *FORMS):
        raise ValueError(f"form is {form!r}; it must be one of {FORMS} or None.")
    check_count(chunk_size, "chunk_size")


def choose_form(form: str | None, num_queries: int, num_keys: int, chunk_size: int) -> str:
    """The form asked for, or the one that suits the size."""
    if form is not None:
        return form
    # A sum over keys costs as much as some dozens of queries would pair by pair.
    few = num_keys <= chunk_size or num_queries <= chunk_size // 8
    return "quadratic" if few else "chunked"


def check_sizes(num_queries: int, num_keys: int, causal: bool) -> None:
    """Refuses causal queries that are not among the keys."""
    if check_flag(causal, "causal") and num_queries > num_keys:
        raise ValueError(
            f"causal with {num_queries} queries over {num_keys} keys: the queries are taken as the last of the keys, "
            "so there can be no more of them."
        )


def check_runs(
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
    batch_size: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
) -> tuple[Int[Array, "#B S"] | None, Bool[Array, "#B T"] | None]:
    """Number of the run of equal segments that each key is in, and which queries are in the run where they stand."""
    queries, keys = check_token_numbers(query_segments, key_segments, "segments", batch_size, num_queries, num_keys)
    if queries is None or keys is None:
        return None, None
    if num_queries != num_keys and not causal:
        raise ValueError(
            f"segments with {num_queries} queries over {num_keys} other keys: one running state serves segments that "
            "are runs of one sequence, so queries and keys must be the same tokens."
        )
    changes = jnp.pad(keys[:, 1:] != keys[:, :-1], ((0, 0), (min(1, num_keys), 0)))
    return jnp.cumsum(changes, 1, dtype=jnp.int32), queries == keys[:, num_keys - num_queries :]


def attend_features(
    kernel: FeatureKernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    key_mask: Bool[Array, "#B S"] | None,
    causal: bool,
    runs: Int[Array, "#B S"] | None,
    form: str | None,
    chunk_size: int,
) -> Float[Array, "B T N Hv"]:
    """The values weighted by products of features; missing keys and values hold zeros, and causal means T <= S."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    if 0 in (query.size, value.size):
        return jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
    form = choose_form(form, num_queries, num_keys, chunk_size)
    counted = jnp.ones((1, num_keys), bool) if key_mask is None else key_mask
    if form == "quadratic":
        visible = visible_pairs(counted, num_queries, causal, runs)
        features, keys = make_features(kernel, *heads_first(query, key, value))
        output = finish(attend_pairs(features, keys, visible)).astype(value.dtype)
    elif not causal and runs is None:
        output = jax.checkpoint(functools.partial(_attend_sum, kernel))(*heads_first(query, key, value), counted)
    else:
        if num_queries < num_keys:
            query = jnp.pad(query, ((0, 0), (num_keys - num_queries, 0), (0, 0), (0, 0)))
        tokens = (*heads_first(query, key, value), counted, runs)
        if not causal:
            output = _attend_both_ways(kernel, tokens, chunk_size).astype(value.dtype)
        elif form == "chunked":
            output, _ = attend_chunks(kernel, *tokens, None, chunk_size)
        else:
            output = _attend_recurrently(kernel, *tokens)
    return by_token(output)[:, -num_queries:]


def feature_weights(
    kernel: FeatureKernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    key_mask: Bool[Array, "#B S"] | None,
    causal: bool,
    runs: Int[Array, "#B S"] | None,
) -> Float[Array, "B N T S"]:
    """The weights that `attend_features` gives each value."""
    batch_size, num_queries, num_heads, _ = query.shape
    num_keys = key.shape[1]
    counted = jnp.ones((1, num_keys), bool) if key_mask is None else key_mask
    features, keys = make_features(kernel, *heads_first(query, key, key))
    weights, _ = pair_weights(features, keys, visible_pairs(counted, num_queries, causal, runs))
    return quotient(weights, weights.sum(-1)).reshape(batch_size, num_heads, num_queries, num_keys)


def attend_chunks(
    kernel: FeatureKernel,
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K T H"],
    value: Float[Array, "B K T Hv"],
    counted: Bool[Array, "#B T"],
    runs: Int[Array, "#B T"] | None,
    state: State | None,
    chunk_size: int,
    strict: bool = False,
    emit: Callable[[Part], Any] | None = None,
) -> tuple[Any, State]:
    """Causal: pairs within each chunk, and the state of all chunks before; O(T) memory as the body is recomputed.

    `strict` hides each token from itself; `emit` says what is kept of each chunk's queries, the output by default.
    """
    length = query.shape[3]
    size = min(chunk_size, length)
    order = jnp.arange(size, dtype=jnp.int32)
    below = (order[:, None] > order[None] if strict else order[:, None] >= order[None])[None]
    emit = emit or (lambda part: finish(part).astype(value.dtype))
    first = _start(kernel, key, value) if state is None else state
    start = first, None if runs is None else runs[:, 0]

    def body(carry: tuple, chunk: tuple) -> tuple[tuple, Any]:
        (state, run), (query, key, value, counted, runs) = carry, chunk
        features, keys = make_features(kernel, query, key, value)
        before = read(features, state)
        visible = below & counted[:, None, :]
        last = kept = None
        if runs is not None:
            before = hide_part(before, runs == run[:, None])
            visible = visible & (runs[:, :, None] == runs[:, None, :])
            last = runs[:, -1]
            counted, kept = counted & (runs == last[:, None]), run == last
        part = merge(before, attend_pairs(features, keys, visible))
        return (absorb(state, keys, counted, kept), last), emit(part)

    chunks = (
        *(_split(array, -2, size) for array in (query, key, value)),
        _split(counted, -1, size),
        None if runs is None else _split(runs, -1, size, mode="edge"),
    )
    (final, _), parts = lax.scan(jax.checkpoint(body, prevent_cse=False), start, chunks)
    return jax.tree.map(lambda part: _join(part, min(3, part.ndim - 2), length), parts), final


def make_features(kernel: FeatureKernel, query: Array, key: Array, value: Array) -> tuple[Array, Keys]:
    """Features of the queries and of the keys, with the values in their dtype."""
    features, log_weight = kernel.key(key)
    return kernel.query(query), Keys(features, log_weight, value.astype(features.dtype))


def heads_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """[B, K, G, T, H], [B, K, S, H] and [B, K, S, Hv]."""
    num_kv_heads = key.shape[2]
    return by_head(query, num_kv_heads), key.swapaxes(1, 2), value.swapaxes(1, 2)


def visible_pairs(
    counted: Bool[Array, "#B S"], num_queries: int, causal: bool, runs: Int[Array, "#B S"] | None
) -> Bool[Array, "#B T S"]:
    """Which pairs may meet, the queries being the last of the keys where it matters."""
    num_keys = counted.shape[1]
    visible = jnp.broadcast_to(counted[:, None, :], (len(counted), num_queries, num_keys))
    if causal:
        order = jnp.arange(num_keys, dtype=jnp.int32)
        visible = visible & (order[num_keys - num_queries :, None] >= order[None])[None]
    if runs is not None:
        visible = visible & (runs[:, num_keys - num_queries :, None] == runs[:, None, :])
    return visible


def finish(part: Part) -> Float[Array, "B K G t Hv"]:
    """The output of a part that is the whole."""
    return quotient(part.numerator, part.denominator)


def _attend_sum(
    kernel: FeatureKernel,
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    counted: Bool[Array, "#B S"],
) -> Float[Array, "B K G T Hv"]:
    """One sum over all keys, read by every query."""
    features, keys = make_features(kernel, query, key, value)
    state = absorb(_start(kernel, key, value), keys, counted)
    return finish(read(features, state)).astype(value.dtype)


def _attend_both_ways(kernel: FeatureKernel, tokens: tuple, chunk_size: int) -> Float[Array, "B K G T Hv"]:
    """Within runs: what comes before each token, itself included, and what comes after it."""
    query, key, value, counted, runs = tokens
    back = query[..., ::-1, :], key[..., ::-1, :], value[..., ::-1, :]
    runs_back = runs[:, ::-1]

    def whole(part: Part) -> Part:
        return part

    before, _ = attend_chunks(kernel, query, key, value, counted, runs, None, chunk_size, emit=whole)
    after, _ = attend_chunks(kernel, *back, counted[:, ::-1], runs_back, None, chunk_size, strict=True, emit=whole)
    after = Part(after.numerator[..., ::-1, :], after.denominator[..., ::-1], after.highest[..., ::-1])
    return finish(merge(before, after))


def _attend_recurrently(
    kernel: FeatureKernel,
    query: Float[Array, "B K G T H"],
    key: Float[Array, "B K T H"],
    value: Float[Array, "B K T Hv"],
    counted: Bool[Array, "#B T"],
    runs: Int[Array, "#B T"] | None,
) -> Float[Array, "B K G T Hv"]:
    """Causal: each token enters the state and then reads it."""

    def body(carry: tuple, token: tuple) -> tuple[tuple, Array]:
        (state, run), (query, key, value, counted, runs) = carry, token
        features, keys = make_features(kernel, query, key, value)
        now = None if runs is None else runs[:, 0]
        state = absorb(state, keys, counted, None if now is None else now == run)
        return (state, now), finish(read(features, state)).astype(value.dtype)

    tokens = [_split(array, -2, 1) for array in (query, key, value)]
    numbers = [None if array is None else _split(array, -1, 1) for array in (counted, runs)]
    start = _start(kernel, key, value), None if runs is None else runs[:, 0]
    _, output = lax.scan(body, start, (*tokens, *numbers))
    return _join(output, 3, query.shape[3])


def _start(kernel: FeatureKernel, key: Float[Array, "B K S H"], value: Float[Array, "B K S Hv"]) -> State:
    features, _ = jax.eval_shape(kernel.key, key)
    return empty_state(len(key), key.shape[1], features.shape[-1], value.shape[-1], features.dtype)


def _split(array: Array, axis: int, size: int, mode: str = "constant") -> Array:
    """Chunks of an axis, filled up with zeros (or the last entry), as a leading axis."""
    axis = axis % array.ndim
    length = array.shape[axis]
    chunks = -(-length // size)
    if chunks * size != length:
        array = jnp.pad(array, [(0, chunks * size - length if at == axis else 0) for at in range(array.ndim)], mode)
    return jnp.moveaxis(array.reshape(*array.shape[:axis], chunks, size, *array.shape[axis + 1 :]), axis, 0)


def _join(chunks: Array, axis: int, length: int) -> Array:
    """The way back from `_split`, `axis` being that of the whole."""
    array = jnp.moveaxis(chunks, 0, axis)
    array = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return lax.slice_in_dim(array, 0, length, axis=axis)
