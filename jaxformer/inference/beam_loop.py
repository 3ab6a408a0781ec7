"""The loop of beam search: every step extends all unfinished continuations of all rows by one token."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.inference.sources import SourceBatch, batch_axes, begin_cache, by_row
from jaxformer.inference.steps import left_padded_positions, next_logits
from jaxformer.models import DecoderCache, RecurrentCache


class Search(NamedTuple):
    """What is fixed when the search is compiled; see ``beam_search`` for the meaning.

    Attributes:
      num_beams: K.
      size: room for new tokens.
      vocab_size: ids from it on are never chosen; None = all may be.
      early_stopping: a row stops with K finished continuations, however good the others might get.
    """

    num_beams: int
    size: int
    vocab_size: int | None
    early_stopping: bool


class Limits(NamedTuple):
    """What steers a search and is an array, so that other values compile nothing.

    Attributes:
      eos_id: int32 [], the token that ends a continuation; -1 = none.
      pad_id: int32 [], what stands behind it.
      length_penalty: float32 [], power of the length.
      max_new_tokens: int32 [].
    """

    eos_id: Int[Array, ""]
    pad_id: Int[Array, ""]
    length_penalty: Float[Array, ""]
    max_new_tokens: Int[Array, ""]


class Pool(NamedTuple):
    """Continuations of each row, best first; a score of -inf marks an empty place."""

    tokens: Int[Array, "B K N"]
    scores: Float[Array, "B K"]


class Beams(NamedTuple):
    """A search under way.

    Attributes:
      cache: of the prompts and all tokens but the last, rows B x K.
      alive: unfinished continuations; their scores are sums of log-probabilities.
      finished: those that have ended; their scores count the length.
      filled: int32 [], tokens of the unfinished.
      positions: int32 [B], position of each row's last token.
      done: bool [B], rows whose search is over.
      logits: float32 [B K, V] of the next token.
    """

    cache: Any
    alive: Pool
    finished: Pool
    filled: Int[Array, ""]
    positions: Int[Array, "B"]
    done: Bool[Array, "B"]
    logits: Float[Array, "_ V"]


@functools.partial(jax.jit, static_argnames=("model", "search"))
def start_beams(
    model: nn.Module,
    search: Search,
    variables: Any,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sources: SourceBatch | None,
    limits: Limits,
) -> Beams:
    """Read the prompts, padded at the left, once a row; nothing is chosen yet."""
    batch_size, width = prompts.shape
    positions, real = left_padded_positions(lengths, width)
    slots = width + search.size
    cache = begin_cache(model, variables, sources, batch_size, slots)
    logits, cache = next_logits(model, variables, prompts, positions=positions, key_mask=real, cache=cache)
    empty = jnp.broadcast_to(limits.pad_id, (batch_size, search.num_beams, search.size))
    none = jnp.full((batch_size, search.num_beams), -jnp.inf)
    axes = _axes(model, variables, sources)
    return Beams(
        cache=by_row(lambda leaf, axis: jnp.repeat(leaf, search.num_beams, axis), cache, axes),
        alive=Pool(empty, none.at[:, 0].set(0.0)),
        finished=Pool(empty, none),
        filled=jnp.zeros((), jnp.int32),
        positions=lengths - 1,
        done=jnp.zeros(batch_size, bool),
        logits=jnp.repeat(logits, search.num_beams, 0),
    )


@functools.partial(jax.jit, static_argnames=("model", "search"))
def finish_beams(
    model: nn.Module, search: Search, variables: Any, sources: SourceBatch | None, limits: Limits, beams: Beams
) -> Pool:
    """Search on until all rows are done.

    Args:
      model: the model, as ``for_single_tokens`` gives it.
      search: how it is searched.
      variables: of that model.
      sources: of the encoder, for their shapes alone.
      limits: the rest.
      beams: as ``start_beams`` gives them.

    Returns:
      The K best continuations of each row.
    """
    axes = _axes(model, variables, sources)
    if isinstance(
        beams.cache, DecoderCache | RecurrentCache
    ):  # A row's beams share what the encoder made: no need to move it.
        shared = len(jax.tree.leaves((beams.cache.memory, beams.cache.memory_mask)))
        axes = axes[: len(axes) - shared] + [None] * shared

    def step(beams: Beams) -> Beams:
        beams, parents = _extend(search, limits, beams)
        last = jax.lax.dynamic_slice_in_dim(beams.alive.tokens, beams.filled - 1, 1, axis=2).reshape(-1, 1)
        positions = jnp.repeat(beams.positions, search.num_beams)[:, None]
        cache = by_row(lambda leaf, axis: jnp.take(leaf, parents, axis), beams.cache, axes)
        logits, cache = next_logits(model, variables, last, positions=positions, cache=cache)
        return beams._replace(logits=logits, cache=cache)

    def unfinished(beams: Beams) -> Bool[Array, ""]:
        return (beams.filled < limits.max_new_tokens - 1) & ~beams.done.all()

    beams = jax.lax.while_loop(unfinished, step, beams)
    # The last token needs no pass behind it; what has not ended by then competes as it stands.
    beams, _ = jax.lax.cond(
        beams.done.all(),
        lambda beams: (beams, jnp.zeros(beams.logits.shape[0], jnp.int32)),
        functools.partial(_extend, search, limits),
        beams,
    )
    length = beams.filled.astype(jnp.float32)
    late = jnp.where(beams.done[:, None], -jnp.inf, beams.alive.scores / length**limits.length_penalty)
    return _best(beams.finished, Pool(beams.alive.tokens, late), search.num_beams)


def _extend(search: Search, limits: Limits, beams: Beams) -> tuple[Beams, Int[Array, "_"]]:
    """The beams with a token more, and which row of the cache each comes from; rows that are done stay as they are."""
    beam_count, (batch_size, _, _) = search.num_beams, beams.alive.tokens.shape
    log_probs = jax.nn.log_softmax(beams.logits[:, : search.vocab_size])
    vocab_size = log_probs.shape[-1]
    sums = beams.alive.scores[:, :, None] + log_probs.reshape(batch_size, beam_count, vocab_size)
    # Twice as many as go on: at most one continuation of each beam ends.
    scores, chosen = jax.lax.top_k(sums.reshape(batch_size, -1), min(2 * beam_count, beam_count * vocab_size))
    parents, new = chosen // vocab_size, (chosen % vocab_size).astype(jnp.int32)
    tokens = jnp.take_along_axis(beams.alive.tokens, parents[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, new[:, :, None], beams.filled, axis=2)
    ends = new == limits.eos_id
    filled = beams.filled + 1
    # One that ends counts if it is among the best K, as if all had gone on.
    ended = jnp.where(ends, scores / filled.astype(jnp.float32) ** limits.length_penalty, -jnp.inf)
    finished = _best(beams.finished, Pool(tokens[:, :beam_count], ended[:, :beam_count]), beam_count)
    going, places = jax.lax.top_k(jnp.where(ends, -jnp.inf, scores), beam_count)
    alive = Pool(jnp.take_along_axis(tokens, places[:, :, None], axis=1), going)
    parents = jnp.take_along_axis(parents, places, axis=1)
    done = _over(search, limits, alive, finished, filled)

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(beams.done.reshape(-1, *(1,) * (new.ndim - 1)), old, new)

    rows = (jnp.arange(batch_size)[:, None] * beam_count + parents).reshape(-1)
    alive, finished = jax.tree.map(keep, (beams.alive, beams.finished), (alive, finished))
    return beams._replace(
        alive=alive, finished=finished, filled=filled, positions=beams.positions + 1, done=beams.done | done
    ), rows


def _over(search: Search, limits: Limits, alive: Pool, finished: Pool, filled: Array) -> Bool[Array, "B"]:
    """Which rows need not be searched on."""
    worst = finished.scores.min(-1)
    if search.early_stopping:
        return worst > -jnp.inf
    # Sums only fall; the length that makes most of them is the longest for a penalty above 0, else the next.
    length = jnp.where(limits.length_penalty > 0, limits.max_new_tokens, filled + 1).astype(jnp.float32)
    return alive.scores.max(-1) / length**limits.length_penalty <= worst


def _best(one: Pool, other: Pool, count: int) -> Pool:
    """The best of two pools; the tokens of an empty place are the first pool's."""
    scores, places = jax.lax.top_k(jnp.concatenate([one.scores, other.scores], 1), count)
    tokens = jnp.concatenate([one.tokens, other.tokens], 1)
    return Pool(jnp.take_along_axis(tokens, places[:, :, None], axis=1), scores)


def _axes(model: nn.Module, variables: Any, sources: SourceBatch | None) -> list[int | None]:
    """The batch's axis of each leaf of the cache; all rows share what does not change with it."""

    def begin(count: int) -> Any:
        given = None if sources is None else SourceBatch(*(jnp.zeros((count, *a.shape[1:]), a.dtype) for a in sources))
        return begin_cache(model, variables, given, count, 1)

    return batch_axes(begin)
