"""Which token comes next: one rule for a batch whose rows draw independently of each other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional import (
    apply_repetition_penalty,
    first_argmax,
    min_p_filter,
    sample_logits,
    top_k_filter,
    top_p_filter,
)


class Rule(NamedTuple):
    """What of the rule is fixed when it is compiled; see ``generate`` for the meaning.

    Attributes:
      greedy: the most likely token is taken, nothing is drawn.
      top_k: int or None.
      top_p: float or None.
      min_p: float or None.
      repetition_penalty: float, 1 = none.
      vocab_size: int, ids from it on are never chosen; None = all may be.
    """

    greedy: bool = True
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    vocab_size: int | None = None


def choose_tokens(
    rule: Rule,
    rng: Any,
    step: Int[Array, ""],
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    seen: Bool[Array, "B V"] | None,
) -> Int[Array, "B"]:
    """The next token of every row.

    Row i draws with ``fold_in(fold_in(rng, i), step)``: what it draws depends on its own index and logits alone.

    Args:
      rule: the rule.
      rng: key of the whole generation; not read when greedy.
      step: new tokens so far.
      logits: float32 [B, V].
      temperature: above 0 unless greedy.
      seen: bool [B, V], tokens that occurred, for the repetition penalty; None without one.

    Returns:
      int32 [B].
    """
    logits = logits[:, : rule.vocab_size]
    if seen is not None:
        seen = seen[:, : rule.vocab_size]
        logits = apply_repetition_penalty(logits, seen, rule.repetition_penalty)
    if rule.greedy:
        return first_argmax(logits)
    # At most 0 before the division, so that no temperature makes it overflow upwards.
    logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if rule.top_k is not None:
        logits = top_k_filter(logits, rule.top_k)
    if rule.top_p is not None:
        logits = top_p_filter(logits, rule.top_p)
    if rule.min_p is not None:
        logits = min_p_filter(logits, rule.min_p)

    def draw(row: Int[Array, ""], scores: Float[Array, "V"]) -> Int[Array, ""]:
        key = jax.random.fold_in(jax.random.fold_in(rng, row), step)
        return sample_logits(key, scores[None])[0]

    return jax.vmap(draw)(jnp.arange(logits.shape[0]), logits)
