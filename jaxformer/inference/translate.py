"""Many sources decoded by an encoder-decoder: in batches of like length, given back in their own order."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Int

from jaxformer.inference.beam import beam_search
from jaxformer.inference.generate import generate
from jaxformer.inference.prompts import check_count


class Hypothesis(NamedTuple):
    """One continuation of one source.

    Attributes:
      tokens: int32 [N], without the token that ends it.
      score: as ``beam_search`` scores it; NaN of a sampled one.
    """

    tokens: Int[np.ndarray, "N"]
    score: float


def translate(
    model: nn.Module,
    params: Any,
    sources: Sequence[Any],
    *,
    start_id: int,
    eos_id: int,
    max_new_tokens: int,
    num_beams: int = 1,
    num_return: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool = True,
    rng: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    batch_size: int = 64,
    vocab_size: int | None = None,
    model_state: Any = None,
) -> list[list[Hypothesis]]:
    """Decode every source, by beam search (one beam is greedy) or by sampling.

    Sources are sorted by length, so that little is padding; the last batch is filled up, so that few shapes are
    compiled. A source's translation does not depend on the others but for rounding, nor, sampled, but for its place.

    Args:
      model: an encoder-decoder ``Transformer`` or a ``RecurrentSeq2Seq``.
      params: its parameters.
      sources: token ids of each, with the token that ends them where the model was trained so.
      start_id: what the decoder begins with.
      eos_id: the token that ends a translation.
      max_new_tokens: tokens of a translation at most.
      num_beams: of ``beam_search``; 1 = greedy, or sampled at a temperature above 0.
      num_return: translations of each source: the best of ``num_beams``, or so many samples.
      length_penalty: of ``beam_search``.
      early_stopping: of ``beam_search``.
      rng: typed PRNG key; needed at a temperature above 0.
      temperature: 0 = no sampling.
      top_k: of ``generate``, as the next three.
      top_p: see there.
      min_p: see there.
      repetition_penalty: see there; only without beams.
      batch_size: sources decoded together.
      vocab_size: ids from it on are never chosen. None = all may be.
      model_state: the model's other variable collections, a dict. None = none.

    Returns:
      The hypotheses of each source, best first.

    Raises:
      ValueError: as ``beam_search`` and ``generate`` do; filters together with beams, or several greedy translations.
    """
    batch_size, num_return = check_count(batch_size, "batch_size"), check_count(num_return, "num_return")
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    used = [name for name, value in filters.items() if value not in (None, 1.0)]
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_id": eos_id, "pad_id": -1}
    common |= {"vocab_size": vocab_size, "model_state": model_state}
    decode: Callable[[list[Any], int], list[list[Hypothesis]]]
    if num_beams != 1 or not (temperature or used):
        if temperature or used:
            raise ValueError(f"num_beams={num_beams} searches, so {used[0] if used else 'temperature'} can't be used")
        search = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        decode = functools.partial(_search, model, params, start_id, num_return, {**search, **common})
    else:
        if not temperature and num_return > 1:
            raise ValueError(f"num_return={num_return} must be 1 without beams and at temperature=0")
        sampling = {"temperature": temperature, **filters, **common}
        decode = functools.partial(_sample, model, params, start_id, num_return, sampling, rng)
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
    results: list[list[Hypothesis]] = [[] for _ in sources]
    for number, start in enumerate(range(0, len(order), batch_size)):
        places = order[start : start + batch_size]
        filling = [places[0]] * (batch_size - len(places)) if start else []
        for place, found in zip(places, decode([sources[place] for place in places + filling], number)):
            results[place] = found
    return results


def _search(
    model: nn.Module, params: Any, start_id: int, num_return: int, options: dict[str, Any], sources: list[Any], _: int
) -> list[list[Hypothesis]]:
    starts = np.full((len(sources), 1), start_id, np.int32)
    found = beam_search(model, params, starts, sources=sources, num_return=num_return, **options)
    return [
        [Hypothesis(_until(ids, options["eos_id"]), float(score)) for ids, score in zip(*pair)]
        for pair in zip(found.tokens, found.scores)
    ]


def _sample(
    model: nn.Module,
    params: Any,
    start_id: int,
    num_return: int,
    options: dict[str, Any],
    rng: jax.Array | None,
    sources: list[Any],
    number: int,
) -> list[list[Hypothesis]]:
    repeated = [source for source in sources for _ in range(num_return)]
    starts = np.full((len(repeated), 1), start_id, np.int32)
    key = None if rng is None else jax.random.fold_in(rng, number)
    tokens = generate(model, params, starts, sources=repeated, rng=key, **options)
    made = [Hypothesis(_until(ids, options["eos_id"]), math.nan) for ids in tokens]
    return [made[place : place + num_return] for place in range(0, len(made), num_return)]


def _until(tokens: Int[np.ndarray, "N"], eos_id: int) -> Int[np.ndarray, "M"]:
    """The tokens in front of the end, or of the padding -1."""
    ends = np.flatnonzero((tokens == eos_id) | (tokens < 0))
    return tokens[: ends[0]] if ends.size else tokens
