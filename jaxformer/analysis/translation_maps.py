"""What an encoder-decoder attends to while it writes a given translation: weights with their tokens, ready to plot."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.data import Tokenizer
from jaxformer.inference.prompts import bucket, check_rows, check_token
from jaxformer.inference.sources import SourceBatch, pad_sources
from jaxformer.inference.steps import position_limit

_NAMES = {"encoder": "encoder_attention", "decoder": "attention", "cross": "cross_attention"}


class AttentionMap(NamedTuple):
    """Attention weights of all layers and heads between tokens that are named.

    Attributes:
      weights: float32 [layers, N, T, S]; what row t takes of column s, before dropout.
      rows: the T tokens that look, as text.
      columns: the S tokens that are looked at.
    """

    weights: Float[np.ndarray, "layers N T S"]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def attention_maps(
    model: nn.Module,
    params: Any,
    source_ids: Sequence[int] | Int[np.ndarray, "S"],
    target_ids: Sequence[int] | Int[np.ndarray, "T"],
    *,
    start_id: int,
    tokenizer: Tokenizer,
    source_tokenizer: Tokenizer | None = None,
    model_state: Any = None,
) -> dict[str, AttentionMap]:
    """The attention of a source and its translation, each of whose tokens is predicted from those before it.

    For a heat map of one head: ``plt.imshow(maps["cross"].weights[layer, head])`` with ``rows`` and ``columns`` as
    tick labels. Bahdanau et al. 2015, arXiv:1409.0473, figure 3 is the recurrent model's "cross".

    Args:
      model: an encoder-decoder ``Transformer``, or a ``RecurrentSeq2Seq`` with attention.
      params: its parameters.
      source_ids: what the encoder reads, with its end id where the model was trained so.
      target_ids: the translation, with its end id if that is to have a row.
      start_id: what the decoder begins with.
      tokenizer: of the targets.
      source_tokenizer: of the sources; None = the same.
      model_state: the model's other variable collections, a dict. None = none.

    Returns:
      "cross": weights [layers, N, T, S], the T rows named by the tokens that were predicted and the columns by the
      source's. Of a ``Transformer`` also "encoder" [layers, N, S, S], rows and columns named by the source's tokens,
      and "decoder" [layers, N, T, T], rows named by the tokens that were predicted, columns by those read: the start
      and all targets but the last. Of a ``RecurrentSeq2Seq`` layers and N are 1. Rows sum to 1 for kinds of attention
      whose weights are a distribution. Special tokens are named ``<bos>``, ``<eos>``, ``<pad>``, and a token that is
      no text of its own ``<id>``.

    Raises:
      ValueError: a model without an encoder or without attention, or ids that are empty, out of range or too many.
    """
    vocab_size = model.config.vocab_size
    (targets,) = check_rows([target_ids], "target_ids", vocab_size)
    start_id = check_token(start_id, "start_id", vocab_size)
    limit = position_limit(model)
    if limit is not None and targets.size > limit:
        raise ValueError(f"target_ids has {targets.size} tokens; the model has max_length={limit} positions.")
    sources = pad_sources([source_ids], model, 1)
    read = np.array([start_id, *targets[:-1]])
    tokens = np.zeros((1, bucket(read.size, limit)), np.int32)
    tokens[0, : read.size] = read
    real = np.arange(tokens.shape[1])[None] < read.size
    weights = _weights(model, {"params": params, **(model_state or {})}, tokens, real, sources)
    source = token_texts(source_tokenizer or tokenizer, source_ids)
    rows, columns = token_texts(tokenizer, targets), token_texts(tokenizer, read)
    named = {"encoder": (source, source), "decoder": (rows, columns), "cross": (rows, source)}
    maps = {
        name: AttentionMap(np.asarray(weights[key], np.float32)[:, 0, :, : len(over), : len(along)], over, along)
        for (name, key), (over, along) in zip(_NAMES.items(), named.values(), strict=True)
        if key in weights
    }
    if not maps:
        raise ValueError(f"attention={model.config.attention!r} has no weights to show")
    return maps


@functools.partial(jax.jit, static_argnums=0)
def _weights(
    model: nn.Module,
    variables: Any,
    tokens: Int[Array, "1 L"],
    real: Bool[Array, "1 L"],
    sources: SourceBatch,
) -> dict[str, Array]:
    """Weights by name, each with a leading layer axis."""
    given: dict[str, Any] = {"source": sources.tokens, "source_mask": sources.mask, "key_mask": real}
    output: Any = model.apply(variables, tokens, **given, return_weights=True)
    weights = output.aux.weights
    return {name: array if array.ndim == 5 else array[None] for name, array in weights.items() if array.ndim > 3}


def token_texts(tokenizer: Tokenizer, ids: Sequence[int] | Int[np.ndarray, "L"]) -> tuple[str, ...]:
    """Each token by itself as text, for labels; one that has none by its role, or by its id in angle brackets."""
    roles = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}
    return tuple(_text(tokenizer, int(token), roles) for token in ids)


def _text(tokenizer: Tokenizer, token: int, roles: dict[int | None, str]) -> str:
    if token in roles:
        return roles[token]
    text = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
    return f"<{token}>" if text in ("", "\ufffd") else text
