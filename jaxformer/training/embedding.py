"""Texts as vectors: the hidden states of a trained encoder or decoder, pooled."""

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.data import ExampleRows
from jaxformer.data.datasets import json_texts
from jaxformer.data.pairs import read_lines
from jaxformer.functional import POOLINGS, pool_tokens
from jaxformer.models.position_settings import TABLES
from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.output_files import check_target, one_line, write_target
from jaxformer.training.overrides import ConfigError
from jaxformer.training.row_batches import row_batches
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sharding import make_mesh

_LONGEST = 512


def embed_texts(
    model: nn.Module,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    length: int | None = None,
    batch_size: int = 32,
    model_state: Any = None,
) -> Float[np.ndarray, "N D"]:
    """A vector for each text: one of its final hidden states, or their mean.

    An encoder reads ``[CLS] text [SEP]``, a decoder the token that starts a document, where there is one, and the text,
    and the encoder of an encoder-decoder the text and the token that ends it. The mean is of all these tokens.

    Args:
      model: a ``Transformer``, or a ``TaskModel``, whose head is not read.
      params: its parameters.
      tokenizer: of its texts.
      texts: any number of texts.
      pooling: "first" (of an encoder's, that of ``[CLS]``), "last", or "mean" (Reimers and Gurevych 2019,
        arXiv:1908.10084, section 3); None = "mean".
      length: tokens of a text at most, those of its sides included; longer ones are cut at their end. None = as many
        as the model has positions, or 512 if it sets no limit.
      batch_size: texts computed together.
      model_state: the model's other variables, a dict; None = none.

    Returns:
      float32 [N, output_dim].

    Raises:
      ValueError: an unknown pooling or the first token of a decoder, which sees nothing but itself; a number out of
        range; or a model that has no hidden states to read.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts is {texts!r}, must be a sequence of texts: [text]")
    architecture = _architecture(model)
    pooling = pooling or "mean"
    if pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}, must be one of {', '.join(POOLINGS)}")
    if pooling == "first" and architecture == "decoder":
        raise ValueError("pooling is 'first', but a decoder's first token sees nothing else; must be 'last' or 'mean'")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, must be at least 1")
    rows = _rows(model, tokenizer, texts, length)
    longest = max(map(len, rows), default=1)
    variables = {"params": params, **(model_state or {})}
    found: list[Any] = [None] * len(rows)
    for indices, batch in row_batches(ExampleRows(rows, (longest,), tokenizer.pad_id), batch_size, _limit(model)):
        vectors = np.asarray(_pooled(model, pooling, variables, batch["tokens"], batch["key_mask"]), np.float32)
        for index, vector in zip(indices.tolist(), vectors):
            found[index] = vector
    return np.stack(found) if found else np.zeros((0, model.config.output_dim), np.float32)


def _architecture(model: Any) -> str:
    found = getattr(getattr(model, "config", None), "architecture", None)
    if found is None:
        raise ValueError(f"model is a {type(model).__name__}, must be a Transformer")
    return found


def _limit(model: Any) -> int | None:
    return model.config.max_length if model.config.positions in TABLES else None


def _rows(model: Any, tokenizer: Any, texts: Sequence[str], length: int | None) -> list[Int[np.ndarray, " _"]]:
    """The ids of each text with what stands at its sides."""
    limit = _limit(model)
    before, after = [tokenizer.bos_id], [tokenizer.eos_id]
    if model.config.architecture == "decoder":
        after = []
    elif model.config.architecture == "encoder_decoder":
        before = []
    before, after = ([id for id in side if id is not None] for side in (before, after))
    longest = (limit or _LONGEST) if length is None else length
    least = len(before) + len(after) + 1
    if longest < least or (limit is not None and longest > limit):
        most = "" if limit is None else f" and at most the model's {limit} positions"
        raise ValueError(f"length is {longest}, must be at least {least}{most}")
    room = longest - len(before) - len(after)
    pad = [tokenizer.pad_id]  # a text of nothing, where nothing stands at its sides
    return [
        np.array([*before, *ids[:room].tolist(), *after] or pad, np.int32)
        for ids in map(np.asarray, tokenizer.encode_batch(list(texts)))
    ]


@functools.partial(jax.jit, static_argnames=("model", "pooling"))
def _pooled(
    model: nn.Module, pooling: str, variables: Any, tokens: Int[Array, "B L"], mask: Bool[Array, "B L"]
) -> Float[Array, "B D"]:
    """The pooled hidden states of rows, compiled once for each width."""
    encode: Any = functools.partial(model.apply, variables, tokens, deterministic=True)
    if model.config.architecture == "encoder_decoder":
        hidden = encode(source_mask=mask, method="encode")
    else:
        hidden, _ = encode(key_mask=mask, method="hidden")
    return pool_tokens(hidden, mask, pooling=pooling).astype(jnp.float32)


def embed_file(
    workdir: str | Path,
    source: str | Path,
    target: str | Path,
    *,
    field: str = "text",
    step: str = "latest",
    **options: Any,
) -> int:
    """Embeds the texts of a file with a run's model.

    Args:
      workdir: the run directory.
      source: a text a line, or where the name ends in .jsonl an object a line with the text in a field; gzip accepted.
      target: a .npz with ``embeddings`` float32 [N, D]; or a .jsonl, or "-" for standard output, with an object a line:
        that of the input, or ``text``, and ``embedding``.
      field: of the text in JSON lines; "a.b" is field b of a.
      step: which checkpoint: "latest", "best" or a number.
      **options: of ``embed_texts``: pooling, length, batch_size.

    Returns:
      How many texts were embedded.

    Raises:
      ConfigError: no run was started there, or the output's name has another ending.
      CheckpointError: there is no such checkpoint.
      ValueError: a file cannot be read or written, or a setting is refused by ``embed_texts``.
    """
    from jaxformer.data import load_tokenizer

    if str(target) != "-" and Path(target).suffix not in (".npz", ".jsonl"):
        raise ConfigError(f"output is {str(target)!r}, must end in .npz or .jsonl, or be - for standard output")
    check_target(target, source)
    workdir = Path(workdir)
    config = read_run(workdir)
    enable_compilation_cache()
    records, texts = _read_texts(str(source), field)
    model, params, model_state, _ = load_model(workdir, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    # What an encoder-decoder's encoder reads may have a tokenizer of its own.
    separate, directory = config.data.get("source_tokenizer"), RunDirectory(workdir)
    kept = directory.tokenizer(tokenizer_name(config)) if separate is None else directory.source_tokenizer(separate)
    tokenizer = load_tokenizer(kept)
    vectors = embed_texts(model, params, tokenizer, texts, model_state=model_state, **options)
    if Path(target).suffix == ".npz":
        buffer = io.BytesIO()
        np.savez(buffer, embeddings=vectors)
        write_target(target, buffer.getvalue())
    else:
        lines = (
            one_line({**record, "embedding": [float(str(x)) for x in row]}) for record, row in zip(records, vectors)
        )
        write_target(target, "".join(line + "\n" for line in lines))
    return len(texts)


def _read_texts(source: str, field: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a file, and their texts."""
    lines = read_lines(source)
    if not source.removesuffix(".gz").endswith(".jsonl"):
        return [{"text": line} for line in lines], lines
    file = Path(source).name
    kept = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    texts = [json_texts(line, [field], f"{file}, line {number}")[0] for number, line in kept]
    return [json.loads(line) for _, line in kept], texts
