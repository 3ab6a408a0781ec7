"""Loading a published checkpoint: model, parameters and tokenizer, with what was skipped and what is new said."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.interop.checkpoint import Checkpoint, is_buffer, open_checkpoint
from jaxformer.interop.errors import PretrainedError, listed
from jaxformer.interop.heads import STORED, ChosenHead, choose_head, class_names
from jaxformer.interop.reading import Shardings, check_shapes, find_sharding, read_parameter, widest_dtype
from jaxformer.interop.rules import Source, find_sources, matches
from jaxformer.interop.tokenizer_folder import decoder_start_notes, load_pretrained_tokenizer
from jaxformer.interop.trees import flatten, unflatten
from jaxformer.models import HeadConfig, TaskModel, Transformer, TransformerConfig

CHANGEABLE = (
    "dropout_rate",
    "attention_dropout_rate",
    "mlp_dropout_rate",
    "final_dropout_rate",
    "attention_args",
    "encoder_attention_args",
    "cross_attention_args",
    "mlp_chunk_size",
    "scan_layers",
    "remat",
    "dtype",
    "param_dtype",
)
"""Fields of ``TransformerConfig`` that are the reader's choice; the checkpoint decides all others."""


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What was loaded.

    Attributes:
      model: a ``Transformer``, or a ``TaskModel`` where a task's head was loaded.
      params: its parameters.
      tokenizer: None where the folder has no tokenizer that can be read.
      family: the key of ``FAMILIES``.
      head: what stands on the body.
      preset: the name in ``jaxformer.models.MODELS`` that makes the body of ``fields``.
      fields: of ``TransformerConfig``, all that the checkpoint and the reader decided.
      labels: names of a task's classes, where config.json has them.
      notes: a sentence for each thing that was skipped, left out or drawn.
    """

    model: Transformer | TaskModel
    params: dict[str, Any]
    tokenizer: Any
    family: str
    head: ChosenHead
    preset: str
    fields: dict[str, Any]
    labels: tuple[str, ...]
    notes: list[str]


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    head: str | HeadConfig | None = STORED,
    rng: jax.Array | None = None,
    dtype: str | None = None,
    fields: Mapping[str, Any] | None = None,
    shardings: Shardings = None,
) -> tuple[Transformer | TaskModel, dict[str, Any], Any]:
    """Loads a checkpoint of Hugging Face's format: GPT-2, Llama, BERT, RoBERTa, DistilBERT or T5.

        model, params, tokenizer = load_pretrained("bert-base-uncased")
        text = tokenizer.encode("Paris is the capital of France.")  # without special tokens
        tokens = jnp.asarray([[tokenizer.bos_id, *text, tokenizer.eos_id]])  # [CLS] … [SEP]
        logits = model.apply({"params": params}, tokens).logits

    Args:
      directory: a folder with config.json, model.safetensors (or its index and shards), and a tokenizer's files.
        Nothing is downloaded and nothing is unpickled.
      head: ``stored`` = what the files hold; ``vocabulary`` = the head over the vocabulary (a language model's, or
        BERT's of masked tokens); a ``HeadConfig`` = that task's head; None = the body alone, for the methods ``hidden``
        and, with a pooler, ``pooled``.
      rng: key to draw what the files lack of a head that is wanted; None = that is refused.
      dtype: of the parameters and the computation, by name; None = that of the files (of several the widest).
      fields: other values of fields in ``CHANGEABLE``, such as ``dropout_rate``, ``scan_layers`` or ``remat``.
      shardings: where parameters go: a sharding for all, or a function of a parameter's path
        (``decoder/layers/mlp/up/kernel``) and shape; None = the first device. A device reads its own slices only.

    Returns:
      Model, parameters and tokenizer (None without one that can be read). What was skipped, such as buffers of old
      files, is warned of.

    Raises:
      PretrainedError: a file is missing, a setting can't be represented, tensors are unknown, missing, misshapen, or
        differ where they are tied; the message lists them.
      ValueError: an argument that is wrong in itself.
    """
    found = read_pretrained(directory, head=head, rng=rng, dtype=dtype, fields=fields, shardings=shardings)
    if found.notes:
        warnings.warn(f"{directory}: {'; '.join(found.notes)}", stacklevel=2)
    return found.model, found.params, found.tokenizer


def read_pretrained(
    directory: str | os.PathLike[str],
    *,
    head: str | HeadConfig | None = STORED,
    rng: jax.Array | None = None,
    dtype: str | None = None,
    fields: Mapping[str, Any] | None = None,
    shardings: Shardings = None,
) -> Pretrained:
    """As ``load_pretrained``, with everything that is known of what was loaded; nothing is warned of."""
    fields = dict(fields or {})
    unchangeable = [name for name in fields if name not in CHANGEABLE]
    if unchangeable:
        raise ValueError(
            f"fields has {listed(unchangeable)}, which the checkpoint decides; it may have {', '.join(CHANGEABLE)}"
        )
    checkpoint = open_checkpoint(Path(directory).expanduser())
    settings = checkpoint.family.settings(checkpoint.values)
    found = checkpoint.family.read_fields(settings)
    found["tie_embeddings"] = _is_tied(checkpoint, found)
    checkpoint = checkpoint.without_copies(found["tie_embeddings"])
    chosen = choose_head(checkpoint, settings, head, found["tie_embeddings"], rng is not None)
    found |= chosen.fields
    if chosen.is_body:  # nothing reads a head: one of its own would only lack parameters
        found |= {"tie_embeddings": True}
    found |= fields
    model = make_model(TransformerConfig(**found), chosen.task)
    shapes = {path: leaf.shape for path, leaf in flatten(abstract_params(model, chosen)).items()}
    sources, new, notes = _plan(checkpoint, model.config, chosen, shapes, rng is not None)
    stored_dtype = dtype or widest_dtype(checkpoint, sources)
    found |= {"dtype": stored_dtype, "param_dtype": stored_dtype, **fields}
    model = make_model(TransformerConfig(**found), chosen.task)
    params = {
        path: read_parameter(
            checkpoint, source, shapes[path], model.config.parameter_dtype, find_sharding(shardings, path, shapes[path])
        )
        for path, source in sources.items()
    }
    if rng is not None and new:
        params |= _draw(model, chosen, rng, {path: find_sharding(shardings, path, shapes[path]) for path in new})
    tokenizer, said = load_pretrained_tokenizer(checkpoint.directory, checkpoint.family.model_type)
    said = [*said, *decoder_start_notes(tokenizer, checkpoint.values)]
    params = unflatten({path: params[path] for path in shapes})
    return Pretrained(
        model=model,
        params=params,
        tokenizer=tokenizer,
        family=checkpoint.family.model_type,
        head=chosen,
        preset=checkpoint.family.preset,
        fields=found,
        labels=class_names(checkpoint.values) if chosen.task is not None else (),
        notes=[*settings.notes, *notes, *said],
    )


def make_model(config: TransformerConfig, task: HeadConfig | None) -> Transformer | TaskModel:
    """The model of a config, under a task's head where there is one."""
    return Transformer(config) if task is None else TaskModel(config, task)


def abstract_params(model: Transformer | TaskModel, chosen: ChosenHead) -> dict[str, Any]:
    """Shapes and dtypes of the parameters that a checkpoint with that head has."""
    return jax.eval_shape(lambda: _init(model, chosen, jax.random.key(0)))


def _init(model: Transformer | TaskModel, chosen: ChosenHead, rng: jax.Array) -> Any:
    method = None
    if chosen.is_body:
        method = "pooled" if model.config.next_sentence else "hidden"
    # No parameter's shape depends on lengths.
    tokens = jnp.zeros((1, 1), jnp.int32)
    inputs: dict[str, Any] = {"source": tokens} if model.config.architecture == "encoder_decoder" else {}
    return model.init({"params": rng}, tokens, **inputs, method=method)["params"]


def _is_tied(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> bool:
    """Whether the output head is the embeddings, by config.json or, where it can't tell, by the tensors."""
    family, tied = checkpoint.family, bool(fields["tie_embeddings"])
    if not (tied and family.head_unties) or fields["scale_logits"]:
        return tied
    pairs = [pair for pair in family.duplicates.items() if all(name in checkpoint.stored for name in pair)]
    return all(checkpoint.equal(*pair) for pair in pairs)


def _plan(
    checkpoint: Checkpoint,
    config: TransformerConfig,
    chosen: ChosenHead,
    shapes: Mapping[str, tuple[int, ...]],
    drawn: bool,
) -> tuple[dict[str, Source], list[str], list[str]]:
    """Where each parameter is read from, those that are drawn, and what to say of tensors that are not read."""
    family = checkpoint.family
    body = family.body_rules(config)
    sources, unnamed = find_sources(shapes, (*body, *chosen.rules))
    body_paths = {path for path, source in sources.items() if source.rule in body}
    missing = {
        path: [name for name in source.names if name not in checkpoint.stored] for path, source in sources.items()
    }
    absent = {path: names for path, names in missing.items() if names} | {path: [path] for path in unnamed}
    present = {path: source for path, source in sources.items() if path not in absent}
    used = {name for source in sources.values() for name in source.names}
    notes = _check_rest(checkpoint, used)
    wrong = check_shapes(checkpoint, present, shapes)
    new = sorted(path for path in {**absent, **wrong} if path not in body_paths)
    refused = {path for path in {**absent, **wrong} if not drawn or path in body_paths}
    if refused & set(absent):
        lost = [name for path in refused & set(absent) for name in absent[path]]
        hint = " (rng=… draws a head that is missing)" if not drawn and set(lost) <= _names(absent, new) else ""
        raise PretrainedError(f"{checkpoint.directory} lacks {len(lost)} tensors: {listed(lost)}{hint}")
    if refused:
        raise PretrainedError(f"{checkpoint.directory}: {listed(wrong[path] for path in refused)}")
    if new:
        notes.append(f"drawn anew: {listed(new)}")
    return {path: source for path, source in present.items() if path not in new}, new, notes


def _names(absent: Mapping[str, list[str]], paths: list[str]) -> set[str]:
    return {name for path in paths for name in absent.get(path, [])}


def _check_rest(checkpoint: Checkpoint, used: set[str]) -> list[str]:
    """What to say of the tensors that are not read; refuses those that nothing is known of."""
    family = checkpoint.family
    rest = {name for name in checkpoint.stored if name not in used}
    buffers = {name for name in rest if is_buffer(family, name)}
    others = {name for name in rest if any(matches(name, head.rules) for head in family.heads)}
    unknown = rest - buffers - others
    if unknown:
        raise PretrainedError(
            f"{checkpoint.directory} holds {len(unknown)} tensors that a {family.model_type} of this config.json does "
            f"not have: {listed(checkpoint.stored[name] for name in unknown)}"
        )
    notes = [f"skipped, as they are no parameters: {listed(buffers)}"] if buffers else []
    return notes + ([f"left out, as this model has no such head: {listed(others)}"] if others else [])


def _draw(model: Transformer | TaskModel, chosen: ChosenHead, rng: jax.Array, places: dict[str, Any]) -> dict[str, Any]:
    """New values of some parameters, as a new model would have them."""

    def draw(rng: jax.Array) -> dict[str, Any]:
        params = flatten(_init(model, chosen, rng))
        return {path: params[path] for path in places}

    return jax.jit(draw, out_shardings=places)(rng)
