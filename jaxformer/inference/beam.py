"""Beam search: the likeliest continuations, several at a time, each with its score."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from jaxformer.inference.beam_loop import Limits, Search, finish_beams, start_beams
from jaxformer.inference.generate import checked_vocabulary
from jaxformer.inference.prompts import bucket, check_count, check_token, pad_prompts
from jaxformer.inference.sources import pad_sources
from jaxformer.inference.steps import for_single_tokens, position_limit


class BeamOutput(NamedTuple):
    """The best continuations of each prompt, best first.

    Attributes:
      tokens: int32 [B, R, N], new tokens only, the ending ``eos_id`` included, ``pad_id`` behind it.
      scores: float32 [B, R], natural logarithm of the continuation's probability over its length to the power of
        ``length_penalty``; -inf where there are fewer than R continuations, whose tokens are then all ``pad_id``.
    """

    tokens: Int[np.ndarray, "B R N"]
    scores: Float[np.ndarray, "B R"]


def beam_search(
    model: nn.Module,
    params: Any,
    prompts: Iterable[Any] | ArrayLike,
    *,
    max_new_tokens: int,
    eos_id: int | None,
    sources: Iterable[Any] | ArrayLike | None = None,
    num_beams: int = 5,
    num_return: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool = True,
    pad_id: int = 0,
    vocab_size: int | None = None,
    model_state: Any = None,
) -> BeamOutput:
    """Search the continuations that score highest: sum of log-probabilities / (number of new tokens)^length_penalty.

    In every step each of the ``num_beams`` likeliest unfinished continuations is extended by every token; those that
    end with ``eos_id`` are kept aside by score, the likeliest others go on (Graves 2012, arXiv:1211.3711, algorithm 1;
    Wu et al. 2016, arXiv:1609.08144, section 7, whose penalty has another form). The number of tokens counts the
    ending ``eos_id`` and nothing of the prompt. A continuation that reaches ``max_new_tokens`` without it competes as
    it stands. With as many beams as there are continuations the search is exhaustive; with one it is greedy.

    A row stops as soon as it has ``num_beams`` finished continuations. Without ``early_stopping`` it goes on until no
    unfinished one can beat the worst of these, whatever is still to come: the score that an unfinished one would have
    if all further tokens were certain. Rows do not depend on each other.

    Args:
      model: a model that decodes with a cache (``jaxformer.models``).
      params: its parameters.
      prompts: token ids, one sequence a row, of any lengths; or int [B, L]. Of an encoder-decoder what its decoder
        begins with, such as one start token a row.
      max_new_tokens: tokens at most per row, at least 1.
      eos_id: the token that ends a continuation. None = all have ``max_new_tokens`` tokens.
      sources: what an encoder-decoder's encoder reads, one sequence a row; encoded once.
      num_beams: continuations that are extended at a time, at least 1.
      num_return: continuations given back for each prompt, at most ``num_beams``.
      length_penalty: finite power of the length; 0 = the sum counts, above 0 favours longer continuations.
      early_stopping: see above.
      pad_id: what follows in a continuation that has ended; any int32.
      vocab_size: ids from it on are never chosen. None = all may be.
      model_state: the model's other variable collections, a dict. None = none.

    Returns:
      ``BeamOutput``.

    Raises:
      ValueError: as ``generate`` does, or a number of beams or a penalty out of its range.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer.inference import beam_search
        >>> from jaxformer.models import gpt
        >>> model = gpt(vocab_size=7, num_layers=1, embed_dim=8, num_heads=2, max_length=16)
        >>> params = model.init(jax.random.key(0), jnp.array([[1, 2]]))["params"]
        >>> best = beam_search(model, params, [[1, 2]], max_new_tokens=3, eos_id=0, num_beams=2, num_return=2)
        >>> best.tokens.shape, bool(best.scores[0, 0] >= best.scores[0, 1])
        ((1, 2, 3), True)
    """
    max_new_tokens = check_count(max_new_tokens, "max_new_tokens")
    num_beams, num_return = check_count(num_beams, "num_beams"), check_count(num_return, "num_return")
    if num_return > num_beams:
        raise ValueError(f"num_return={num_return} must be at most num_beams={num_beams}.")
    if isinstance(length_penalty, bool | str) or not np.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty!r} must be a finite number.")
    batch = pad_prompts(
        prompts,
        vocab_size=model.config.vocab_size,
        max_new_tokens=max_new_tokens,
        position_limit=position_limit(model),
    )
    batch_size = len(batch.tokens)
    encoded = pad_sources(sources, model, batch_size)
    search = Search(num_beams, bucket(max_new_tokens), checked_vocabulary(model, vocab_size), bool(early_stopping))
    limits = Limits(
        eos_id=jnp.int32(-1 if eos_id is None else check_token(eos_id, "eos_id", model.config.vocab_size)),
        pad_id=jnp.int32(check_token(pad_id, "pad_id")),
        length_penalty=jnp.float32(length_penalty),
        max_new_tokens=jnp.int32(max_new_tokens),
    )
    variables = {"params": params, **(model_state or {})}
    beams = start_beams(model, search, variables, batch.tokens, batch.lengths, encoded, limits)
    arranged, variables = for_single_tokens(model, variables, batch_size * num_beams)
    best = finish_beams(arranged, search, variables, encoded, limits, beams)
    tokens, scores = (np.asarray(array)[:, :num_return] for array in best)
    return BeamOutput(np.where(np.isneginf(scores)[:, :, None], pad_id, tokens)[:, :, :max_new_tokens], scores)
