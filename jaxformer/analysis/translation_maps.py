"""What an encoder-decoder attends to while it writes a given translation: weights with their tokens, ready to plot."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np
from jaxtyping import Int

from jaxformer.analysis.recording import NAMES, AttentionMap, check_layers, model_weights, token_texts
from jaxformer.data import Tokenizer
from jaxformer.inference.prompts import bucket, check_rows, check_token
from jaxformer.inference.sources import pad_sources
from jaxformer.inference.steps import position_limit


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
    assert sources is not None
    check_layers(model)
    given = {"source": sources.tokens, "source_mask": sources.mask, "key_mask": real}
    weights = model_weights(model, {"params": params, **(model_state or {})}, tokens, given)
    source = token_texts(source_tokenizer or tokenizer, source_ids)
    rows, columns = token_texts(tokenizer, targets), token_texts(tokenizer, read)
    named = {"encoder": (source, source), "decoder": (rows, columns), "cross": (rows, source)}
    maps = {
        name: AttentionMap(np.asarray(weights[key], np.float32)[:, 0, :, : len(over), : len(along)], over, along)
        for (name, key), (over, along) in zip(NAMES.items(), named.values(), strict=True)
        if key in weights
    }
    if not maps:
        raise ValueError(f"attention={model.config.attention!r} has no weights to show")
    return maps
