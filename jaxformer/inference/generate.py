"""Text generation with a cached model: all at once, or streamed."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from jaxformer.functional import check_sampling
from jaxformer.inference.loop import Controls, Progress, advance, start
from jaxformer.inference.prompts import PromptBatch, bucket, check_count, check_token, pad_prompts
from jaxformer.inference.rules import Rule
from jaxformer.inference.sources import SourceBatch, pad_sources
from jaxformer.inference.steps import for_single_tokens, position_limit

# Tokens a row between two looks of the host at what the device made.
_STREAMED_TOGETHER = 8
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def generate(
    model: nn.Module,
    params: Any,
    prompts: Iterable[Any] | ArrayLike,
    *,
    max_new_tokens: int,
    sources: Iterable[Any] | ArrayLike | None = None,
    rng: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | None = None,
    pad_id: int = 0,
    vocab_size: int | None = None,
    model_state: Any = None,
) -> Int[np.ndarray, "B N"]:
    """Continue every prompt by up to ``max_new_tokens`` tokens.

    Filters apply in the order penalty, temperature, top_k, top_p, min_p. A row's tokens depend on its own prompt, its
    row number and ``rng`` alone: its batch mates change at most the rounding of its logits. Prompt lengths and
    ``max_new_tokens`` are rounded up to powers of two inside (16 at least), so that few sizes are compiled; other
    temperatures, seeds, eos_id and pad_id compile nothing, other batch sizes and filters do.

    Args:
      model: a model that decodes with a cache (``jaxformer.models``).
      params: its parameters.
      prompts: token ids, one sequence a row, of any lengths; or int [B, L]. Of an encoder-decoder what its decoder
        begins with, such as one start token a row.
      max_new_tokens: tokens wanted per row, at least 1.
      sources: what an encoder-decoder's encoder reads, one sequence a row; encoded once.
      rng: typed PRNG key (``jax.random.key``); needed at a temperature above 0.
      temperature: of the softmax; 0 takes the most likely token each time.
      top_k: choose among that many most likely tokens, at least 1. None = no cut.
      top_p: choose among the fewest tokens whose probabilities reach it, in (0, 1]. None = no cut.
      min_p: leave out tokens less likely than that share of the most likely one, in [0, 1]. None = no cut.
      repetition_penalty: above 1 makes tokens of the prompt and the output so far less likely. 1 = none.
      eos_id: the token that ends a row. None = every row gets ``max_new_tokens`` tokens.
      pad_id: what follows in a row that has ended; any int32, so -1 is possible.
      vocab_size: ids from it on are never chosen, for a model with more ids than its tokenizer. None = all may be.
      model_state: the model's other variable collections, a dict. None = none.

    Returns:
      int32 [B, max_new_tokens], new tokens only, the ending ``eos_id`` included.

    Raises:
      ValueError: an empty prompt, ids out of range, more tokens than the model has positions, a number out of its
        range, no rng at a temperature above 0, or a model that can't decode.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer.inference import generate
        >>> from jaxformer.models import gpt
        >>> model = gpt(vocab_size=7, num_layers=1, embed_dim=8, num_heads=2, max_length=16)
        >>> params = model.init(jax.random.key(0), jnp.array([[1, 2]]))["params"]
        >>> generate(model, params, [[1, 2, 3], [4]], max_new_tokens=5).shape
        (2, 5)
    """
    request = _request(
        model,
        {"params": params, **(model_state or {})},
        prompts,
        max_new_tokens=max_new_tokens,
        sources=sources,
        rng=rng,
        temperature=temperature,
        rule=Rule(temperature == 0, top_k, top_p, min_p, repetition_penalty, checked_vocabulary(model, vocab_size)),
        eos_id=eos_id,
        pad_id=pad_id,
    )
    progress = _start(request)
    if max_new_tokens > 1:
        progress = _advance(request, _arrange(request), progress, max_new_tokens)
    return np.asarray(progress.tokens)[:, :max_new_tokens]


def stream(
    model: nn.Module,
    params: Any,
    prompts: Iterable[Any] | ArrayLike,
    *,
    max_new_tokens: int,
    sources: Iterable[Any] | ArrayLike | None = None,
    rng: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | None = None,
    pad_id: int = 0,
    vocab_size: int | None = None,
    model_state: Any = None,
) -> Iterator[Int[np.ndarray, "B"]]:
    """Like ``generate``, but gives the tokens out as they come, the first at once and the others a few at a time.

    Args:
      model: as for ``generate``, with the same tokens as result, like all that follow.
      params: likewise.
      prompts: likewise.
      max_new_tokens: likewise.
      sources: likewise.
      rng: likewise.
      temperature: likewise.
      top_k: likewise.
      top_p: likewise.
      min_p: likewise.
      repetition_penalty: likewise.
      eos_id: likewise.
      pad_id: likewise.
      vocab_size: likewise.
      model_state: likewise.

    Returns:
      An iterator of int32 [B], the next token of every row; it ends when all rows have.

    Raises:
      ValueError: as ``generate`` does, before the first token is asked for.
    """
    request = _request(
        model,
        {"params": params, **(model_state or {})},
        prompts,
        max_new_tokens=max_new_tokens,
        sources=sources,
        rng=rng,
        temperature=temperature,
        rule=Rule(temperature == 0, top_k, top_p, min_p, repetition_penalty, checked_vocabulary(model, vocab_size)),
        eos_id=eos_id,
        pad_id=pad_id,
    )
    return _columns(request)


class _Request(NamedTuple):
    """A checked call.

    Attributes:
      model: the model.
      variables: its parameters and other collections.
      prompts: the prompts.
      sources: of the encoder, or None.
      max_new_tokens: tokens wanted per row.
      rule: how tokens are chosen.
      controls: what else steers it.
    """

    model: nn.Module
    variables: Any
    prompts: PromptBatch
    sources: SourceBatch | None
    max_new_tokens: int
    rule: Rule
    controls: Controls


def _request(
    model: nn.Module,
    variables: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    sources: Any,
    rng: jax.Array | None,
    temperature: float,
    rule: Rule,
    eos_id: int | None,
    pad_id: int,
) -> _Request:
    max_new_tokens = check_count(max_new_tokens, "max_new_tokens")
    check_sampling(
        temperature=temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        min_p=rule.min_p,
        repetition_penalty=rule.repetition_penalty,
    )
    if not rule.greedy:
        _check_rng(rng, temperature)
    vocab_size = model.config.vocab_size
    batch = pad_prompts(
        prompts, vocab_size=vocab_size, max_new_tokens=max_new_tokens, position_limit=position_limit(model)
    )
    controls = Controls(
        rng=None if rule.greedy else rng,
        temperature=jnp.asarray(max(float(temperature), _SMALLEST_TEMPERATURE), jnp.float32),
        eos_id=jnp.asarray(-1 if eos_id is None else check_token(eos_id, "eos_id", vocab_size), jnp.int32),
        pad_id=jnp.asarray(check_token(pad_id, "pad_id"), jnp.int32),
    )
    encoded = pad_sources(sources, model, len(batch.tokens))
    return _Request(model, variables, batch, encoded, max_new_tokens, rule, controls)


def checked_vocabulary(model: nn.Module, vocab_size: int | None) -> int | None:
    """The checked number of ids to choose from; None for all, however that was said, so that nothing compiles anew."""
    if vocab_size is None:
        return None
    size, limit = check_count(vocab_size, "vocab_size"), model.config.vocab_size
    if size > limit:
        raise ValueError(f"vocab_size={size} must be at most the model's {limit}.")
    return None if size == limit else size


def _check_rng(rng: Any, temperature: float) -> None:
    if rng is None:
        raise ValueError(f"rng is None; temperature={temperature} needs a PRNG key (jax.random.key).")
    if not isinstance(rng, jax.Array) or not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.ndim:
        raise ValueError("rng must be one typed key, as jax.random.key(seed) makes it.")


def _start(request: _Request) -> Progress:
    """The first token of every row."""
    tokens, lengths = request.prompts
    size = bucket(request.max_new_tokens)
    sources, controls = request.sources, request.controls
    return start(request.model, request.rule, size, request.variables, tokens, lengths, sources, controls)


def _arrange(request: _Request) -> tuple[nn.Module, Any]:
    """The model and its variables as the loop over tokens wants them."""
    return for_single_tokens(request.model, request.variables, len(request.prompts.tokens))


def _advance(request: _Request, arranged: tuple[nn.Module, Any], progress: Progress, limit: int) -> Progress:
    model, variables = arranged
    return advance(model, request.rule, variables, request.controls, progress, np.int32(limit))


def _columns(request: _Request) -> Iterator[Int[np.ndarray, "B"]]:
    """Tokens column by column, fetched a few at a time."""
    progress, arranged, given = _start(request), None, 0
    while True:
        count, done = int(progress.filled), bool(progress.done.all())
        yield from np.asarray(progress.tokens).T[given:count]
        given = count
        if done or given >= request.max_new_tokens:
            return
        arranged = arranged or _arrange(request)
        limit = min(given + _STREAMED_TOGETHER, request.max_new_tokens)
        progress = _advance(request, arranged, progress, limit)
