"""The generation loop: prompts are read in one pass, then tokens come one by one until all rows are done."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.inference.rules import Rule, choose_tokens
from jaxformer.inference.sources import SourceBatch, begin_cache
from jaxformer.inference.steps import left_padded_positions, next_logits


class Controls(NamedTuple):
    """What steers a generation and is an array, so that other values compile nothing.

    Attributes:
      rng: PRNG key, None where nothing is drawn.
      temperature: float32 [].
      eos_id: int32 [], the token that ends a row; -1 = none.
      pad_id: int32 [], what a finished row emits.
    """

    rng: Any
    temperature: Float[Array, ""]
    eos_id: Int[Array, ""]
    pad_id: Int[Array, ""]


class Progress(NamedTuple):
    """A generation under way.

    Attributes:
      cache: of the prompts and of all new tokens but the last.
      tokens: int32 [B, N] new tokens, pad_id where there is none.
      filled: int32 [], columns of ``tokens`` that are filled.
      positions: int32 [B], position of each row's last token.
      done: bool [B], rows that have ended.
      seen: bool [B, V], tokens that occurred in each row, or None if nobody asks.
    """

    cache: Any
    tokens: Int[Array, "B N"]
    filled: Int[Array, ""]
    positions: Int[Array, "B"]
    done: Bool[Array, "B"]
    seen: Bool[Array, "B V"] | None


@functools.partial(jax.jit, static_argnames=("model", "rule", "size"))
def start(
    model: nn.Module,
    rule: Rule,
    size: int,
    variables: Any,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sources: SourceBatch | None,
    controls: Controls,
) -> Progress:
    """Read the prompts and choose every row's first token.

    Args:
      model: the model.
      rule: how tokens are chosen.
      size: room for new tokens.
      variables: of the model.
      prompts: int32 [B, P], padded at the left.
      lengths: int32 [B].
      sources: of the encoder, or None.
      controls: the rest.

    Returns:
      ``Progress`` with one token a row.
    """
    batch_size, width = prompts.shape
    positions, real = left_padded_positions(lengths, width)
    cache = begin_cache(model, variables, sources, batch_size, width + size)
    logits, cache = next_logits(model, variables, prompts, positions=positions, key_mask=real, cache=cache)
    seen = None
    if rule.repetition_penalty != 1:
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch_size)[:, None], prompts].max(real)
    progress = Progress(
        cache=cache,
        tokens=jnp.broadcast_to(controls.pad_id, (batch_size, size)),
        filled=jnp.zeros((), jnp.int32),
        positions=lengths - 1,
        done=jnp.zeros(batch_size, bool),
        seen=seen,
    )
    return _append(rule, controls, progress, logits)


@functools.partial(jax.jit, static_argnames=("model", "rule"), donate_argnames=("progress",))
def advance(
    model: nn.Module, rule: Rule, variables: Any, controls: Controls, progress: Progress, limit: Int[Array, ""]
) -> Progress:
    """Go on until each row has ``limit`` new tokens or all have ended.

    Args:
      model: the model, as ``for_single_tokens`` gives it.
      rule: how tokens are chosen.
      variables: of that model.
      controls: the rest.
      progress: so far; its memory is reused.
      limit: int32 [].

    Returns:
      The new ``Progress``.
    """

    def step(progress: Progress) -> Progress:
        last = jax.lax.dynamic_slice_in_dim(progress.tokens, progress.filled - 1, 1, axis=1)
        logits, cache = next_logits(model, variables, last, positions=progress.positions[:, None], cache=progress.cache)
        return _append(rule, controls, progress._replace(cache=cache), logits)

    def unfinished(progress: Progress) -> Bool[Array, ""]:
        return (progress.filled < limit) & ~progress.done.all()

    return jax.lax.while_loop(unfinished, step, progress)


def _append(rule: Rule, controls: Controls, progress: Progress, logits: Float[Array, "B V"]) -> Progress:
    """Choose the next token of every row and write it down; rows that had ended get padding."""
    chosen = choose_tokens(rule, controls.rng, progress.filled, logits, controls.temperature, progress.seen)
    column = jnp.where(progress.done, controls.pad_id, chosen)
    seen = progress.seen
    if seen is not None:
        seen = seen.at[jnp.arange(chosen.shape[0]), chosen].set(True)
    return progress._replace(
        tokens=jax.lax.dynamic_update_slice_in_dim(progress.tokens, column[:, None], progress.filled, axis=1),
        filled=progress.filled + 1,
        positions=progress.positions + 1,
        done=progress.done | (chosen == controls.eos_id),
        seen=seen,
    )
