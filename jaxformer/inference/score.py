"""Scores of given continuations: how likely a model finds each of their tokens."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.inference.generate import checked_vocabulary
from jaxformer.inference.prompts import bucket, check_rows
from jaxformer.inference.sources import SourceBatch, pad_sources
from jaxformer.inference.steps import position_limit


class TokenScores(NamedTuple):
    """Log-probabilities of given continuations.

    Attributes:
      log_probs: float32 [B], sum over each continuation's tokens, natural logarithm.
      token_log_probs: float32 [B, N], of each token; 0 behind the last.
      lengths: int32 [B], tokens of each continuation.
    """

    log_probs: Float[np.ndarray, "B"]
    token_log_probs: Float[np.ndarray, "B N"]
    lengths: Int[np.ndarray, "B"]


def score(
    model: nn.Module,
    params: Any,
    prompts: Iterable[Any] | ArrayLike,
    continuations: Iterable[Any] | ArrayLike,
    *,
    sources: Iterable[Any] | ArrayLike | None = None,
    vocab_size: int | None = None,
    model_state: Any = None,
) -> TokenScores:
    """How likely each continuation is behind its prompt, every token given all tokens before it (teacher forcing).

    Args:
      model: a causal model or an encoder-decoder (``jaxformer.models``).
      params: its parameters.
      prompts: token ids, one sequence a row, of any lengths; or int [B, L]. Of an encoder-decoder what its decoder
        begins with, such as one start token a row.
      continuations: token ids, one sequence a row, with the token that ends it where that is to count.
      sources: what an encoder-decoder's encoder reads, one sequence a row.
      vocab_size: probabilities are among ids below it. None = among all.
      model_state: the model's other variable collections, a dict. None = none.

    Returns:
      ``TokenScores``.

    Raises:
      ValueError: an empty prompt or continuation, ids out of range, numbers of rows that differ, or more tokens than
        the model has positions.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer.inference import score
        >>> from jaxformer.models import gpt
        >>> model = gpt(vocab_size=7, num_layers=1, embed_dim=8, num_heads=2, max_length=16)
        >>> params = model.init(jax.random.key(0), jnp.array([[1, 2]]))["params"]
        >>> scores = score(model, params, [[1, 2]], [[3, 4, 5]])
        >>> scores.lengths.tolist(), bool((scores.log_probs < 0).all())
        ([3], True)
    """
    size = checked_vocabulary(model, vocab_size)
    before = check_rows(prompts, "prompts", model.config.vocab_size)
    after = check_rows(continuations, "continuations", size or model.config.vocab_size)
    if len(before) != len(after):
        raise ValueError(f"continuations has {len(after)} rows; it must have {len(before)}, one for each prompt.")
    limit = position_limit(model)
    rows = [np.concatenate(pair) for pair in zip(before, after)]
    for row, ids in enumerate(rows):
        if limit is not None and ids.size > limit:
            raise ValueError(
                f"prompts[{row}] and continuations[{row}] have {ids.size} tokens; the model has max_length={limit}."
            )
    encoded = pad_sources(sources, model, len(rows))
    lengths = np.array([ids.size for ids in after], np.int32)
    width, span = bucket(max(ids.size for ids in rows), limit), bucket(int(lengths.max()), limit)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : ids.size] = ids
    starts = np.array([ids.size for ids in before], np.int32)
    variables = {"params": params, **(model_state or {})}
    each = np.asarray(_token_log_probs(model, size, span, variables, tokens, starts, lengths, encoded))
    each = each[:, : int(lengths.max())]
    return TokenScores(each.sum(-1), each, lengths)


@functools.partial(jax.jit, static_argnames=("model", "vocab_size", "span"))
def _token_log_probs(
    model: nn.Module,
    vocab_size: int | None,
    span: int,
    variables: Any,
    tokens: Int[Array, "B L"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    sources: SourceBatch | None,
) -> Float[Array, "B {span}"]:
    """Of the tokens from ``starts`` on, at most ``span``; 0 where a row has none."""
    places = jnp.minimum(starts[:, None] + jnp.arange(span, dtype=jnp.int32)[None], tokens.shape[1] - 1)
    real: Bool[Array, "B L"] = jnp.arange(tokens.shape[1])[None] < (starts + lengths)[:, None]
    inputs: dict[str, Any] = {} if sources is None else {"source": sources.tokens, "source_mask": sources.mask}
    output: Any = model.apply(variables, tokens, key_mask=real, select=places - 1, **inputs)
    log_probs = jax.nn.log_softmax(output.logits[..., :vocab_size].astype(jnp.float32))
    wanted = jnp.take_along_axis(tokens, places, axis=1)
    chosen = jnp.take_along_axis(log_probs, wanted[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.arange(span)[None] < lengths[:, None], chosen, 0.0)
