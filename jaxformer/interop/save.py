"""Writing a model as a checkpoint that transformers loads: config.json, safetensors and the tokenizer's files."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.interop.checkpoint import CONFIG, canonical_names, family_of, named_architecture
from jaxformer.interop.errors import PretrainedError, listed
from jaxformer.interop.families import essence, find_family
from jaxformer.interop.family import Family, Head
from jaxformer.interop.heads import ANSWER_LABELS, TASK, head_of_task, num_labels
from jaxformer.interop.record import Record, read_record
from jaxformer.interop.rules import find_sources, split_layer
from jaxformer.interop.tokenizer_folder import save_pretrained_tokenizer
from jaxformer.interop.trees import flatten
from jaxformer.interop.writing import Tensor, parts_by_name, write_tensors
from jaxformer.models import HeadConfig, TaskModel, Transformer, TransformerConfig


def save_pretrained(
    directory: str | os.PathLike[str],
    model: Transformer | TaskModel,
    params: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    family: str | None = None,
    like: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model as a folder that transformers loads, with equal logits.

    Args:
      directory: a folder that is empty or does not exist.
      model: of a kind that a family's config.json can say; how it is computed (attention's implementation, stacked or
        unrolled layers, remat) does not matter.
      params: its parameters, on any devices.
      tokenizer: written beside it; None = none.
      family: ``gpt2``, ``llama``, ``bert``, ``roberta``, ``distilbert`` or ``t5``; None = the first that fits.
      like: folder of the checkpoint that the model was loaded from. Names and dtypes of tensors, config.json and the
        tokenizer's files are then kept, so that parameters that have not changed give the same tensors byte for byte.
      labels: names of a task's classes.
      max_file_bytes: size from which on the tensors go into several files.

    Raises:
      PretrainedError: no family's config.json can say what the model computes (the message lists what stands in the
        way), parameters are missing or have no name in it, or the folder holds files.
    """
    notes = write_pretrained(
        directory, model, params, tokenizer, family=family, like=like, labels=labels, max_file_bytes=max_file_bytes
    )
    if notes:
        warnings.warn(f"{directory}: {'; '.join(notes)}", stacklevel=2)


def write_pretrained(
    directory: str | os.PathLike[str],
    model: Transformer | TaskModel,
    params: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    family: str | None = None,
    like: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> list[str]:
    """As ``save_pretrained``; returns what else it would warn of."""
    directory = Path(directory).expanduser()
    record = None if like is None else read_record(Path(like).expanduser())
    if record is not None:
        known = family_of(record.values, record.directory).model_type
        if family not in (None, known):
            raise PretrainedError(f"family={family!r}, but like={str(like)!r} is a {known}")
        family = known
    found = find_family(model.config, family)
    host = {path: _cut(path, np.asarray(leaf), model.config) for path, leaf in flatten(params).items()}
    head = _find_head(found, model, host)
    rules = (*found.body_rules(model.config), *head.rules)
    sources, unnamed = find_sources({path: leaf.shape for path, leaf in host.items()}, rules)
    if unnamed:
        raise PretrainedError(f"a {head.architecture} has no tensors for the parameters {listed(unnamed)}")
    parts = parts_by_name(sources)
    if record is None:
        strip = found.prefix if head.is_body else ""
        tensors = [Tensor(name.removeprefix(strip), part) for name, part in parts.items()]
        notes: list[str] = []
    else:
        tensors, notes = _tensors_like(found, record, parts, model.config.tie_embeddings)
    values = _config_values(found, head, model, record, tokenizer, labels)
    _make_empty(directory)
    write_tensors(directory, tensors, host, max_file_bytes)
    notes += save_pretrained_tokenizer(
        tokenizer, directory, None if record is None else record.directory, found.model_type
    )
    # Last: a folder without it is no checkpoint.
    (directory / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return notes


def _make_empty(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    held = sorted(entry.name for entry in directory.iterdir())
    if held:
        raise PretrainedError(f"{directory} must be empty or not exist, holds {held[0]}")


def _cut(path: str, array: np.ndarray, config: TransformerConfig) -> np.ndarray:
    """The parameter without rows of tokens that do not exist."""
    if path == "token_embedding/embedding":
        return array[: config.vocab_size]
    return array[..., : config.vocab_size] if path in ("output_head/kernel", "head_bias/bias") else array


def _find_head(family: Family, model: Transformer | TaskModel, params: Mapping[str, Any]) -> Head:
    """The head that a model and its parameters are.

    Raises:
      PretrainedError: the family has no such head.
    """
    if isinstance(model, TaskModel):
        return _find_task_head(family, model.head)
    tied = model.config.tie_embeddings
    body = {rule.path for rule in family.body_rules(model.config)}
    rest = {split_layer(path)[0] for path in params} - body
    plain = [head for head in family.heads if head.task is None]
    for head in plain:
        own = {rule.path for rule in head.rules} - ({"output_head/kernel"} if tied else set())
        if rest == own or (head.is_body and not rest):
            return head
    raise PretrainedError(
        f"the parameters {listed(rest)} beside the body are those of none of "
        f"{', '.join(head.architecture for head in plain)}"
    )


def _find_task_head(family: Family, task: HeadConfig) -> Head:
    head = head_of_task(family.heads, task.task)
    if head is None:
        raise PretrainedError(f"a {family.model_type} has no head for task={task.task!r}")
    assert head.task is not None
    if task.task in ("classification", "regression"):
        known = HeadConfig(**{**head.task, "num_classes": task.num_classes, "task": task.task})
        for name in ("pooling", "pooler", "use_bias"):
            own, theirs = getattr(task, name), getattr(known, name)
            if own != theirs:
                raise PretrainedError(f"the head has {name}={own!r}, but a {head.architecture} has {theirs!r}")
    return head


def _tensors_like(
    family: Family, record: Record, parts: Mapping[str, Any], tied: bool
) -> tuple[list[Tensor], list[str]]:
    """The tensors under the names and in the dtypes of an earlier checkpoint, and a note of those not among them."""
    known = canonical_names(family, record.tensors)
    copies = {**family.copies, **(family.duplicates if tied else {})}
    tensors, left_out = [], []
    for name, stored in known.items():
        original = name if name in parts else copies.get(name, name)
        if original in parts:
            tensors.append(Tensor(stored, parts[original], record.tensors[stored]))
        else:
            left_out.append(stored)
    stripped = any(
        name.startswith(family.prefix) and not stored.startswith(family.prefix) for name, stored in known.items()
    )
    held = {copies.get(name, name) for name in known} | set(known)
    for name, part in parts.items():
        if name not in held:
            tensors.append(Tensor(name.removeprefix(family.prefix) if stripped else name, part))
    return tensors, [f"not written, as they are none of the model's: {listed(left_out)}"] if left_out else []


def _config_values(
    family: Family,
    head: Head,
    model: Transformer | TaskModel,
    record: Record | None,
    tokenizer: Any,
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """The config.json: that of the earlier checkpoint where it still says the same."""
    config = model.config
    own = family.write_settings(config)
    dtype = {"torch_dtype": config.param_dtype}
    values = {"architectures": [head.architecture], "model_type": family.model_type, **own, **dtype}
    if record is not None:
        read = TransformerConfig(
            **{**family.read_fields(family.settings(record.values)), **_tied_field(family, head, config)}
        )
        same = essence(read) == essence(config)
        values = {**record.values, **({} if same else {**own, **dtype})}
        if named_architecture(record.values) not in (head.architecture, head.extends):
            values["architectures"] = [head.architecture]
    else:
        values |= _token_ids(family, tokenizer)
    if isinstance(model, TaskModel):
        values |= _task_values(model.head, values, labels)
    return values


def _token_ids(family: Family, tokenizer: Any) -> dict[str, Any]:
    """The ids that generation and padding need; null where there is no tokenizer, as defaults are another's ids."""
    if tokenizer is None:
        return {} if family.model_type == "t5" else {"bos_token_id": None, "eos_token_id": None}
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if family.model_type == "roberta":  # whose padding id says where positions begin
        return ids
    # T5's decoder begins with padding.
    return {**ids, "pad_token_id": tokenizer.pad_id} | (
        {"decoder_start_token_id": tokenizer.pad_id} if family.model_type == "t5" else {}
    )


def _tied_field(family: Family, head: Head, config: TransformerConfig) -> dict[str, Any]:
    """Whether embeddings are tied, where the tensors tell and not config.json, or where there is no head."""
    return {"tie_embeddings": config.tie_embeddings} if family.head_unties or head.is_body else {}


def _task_values(head: HeadConfig, values: Mapping[str, Any], labels: Sequence[str] | None) -> dict[str, Any]:
    """What a config.json says of a task: its labels, and which task it is where the architecture can't tell."""
    if head.task == "answers":
        return {}
    count = head.num_outputs or 1
    told: dict[str, Any] = {}
    if head.task == "regression":
        told["problem_type"] = "regression"
    if head.task == "answer_tokens":
        labels, told[TASK] = ANSWER_LABELS, head.task
    if labels is None and num_labels(dict(values)) == count:
        return told
    names = [f"LABEL_{number}" for number in range(count)] if labels is None else [str(label) for label in labels]
    if len(names) != count:
        raise PretrainedError(f"labels has {len(names)} names, must have {count}")
    told["id2label"] = {str(number): name for number, name in enumerate(names)}
    told["label2id"] = {name: number for number, name in enumerate(names)}
    return told
