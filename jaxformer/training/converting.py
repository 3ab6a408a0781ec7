"""Checkpoints of Hugging Face as run directories, and run directories as checkpoints of Hugging Face."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from ml_collections import ConfigDict

from jaxformer.interop import Pretrained, PretrainedError, read_pretrained, write_pretrained, write_record
from jaxformer.models import TaskModel, Transformer
from jaxformer.training.assembly import count_parameters, make_model, tokenizer_name
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.compilation_cache import enable_compilation_cache
from jaxformer.training.config import RunConfig, load_config, write_config
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.run_directory import RunDirectory, RunDirectoryError
from jaxformer.training.run_predictor import write_task
from jaxformer.training.sharding import make_mesh, partition_spec
from jaxformer.training.state import TrainState

_LENGTH = 128
"""Tokens of a row in evaluations, unless `data.length` says otherwise."""

_TASKS = {"regression": "regression", "tagging": "ner", "answers": "qa", "answer_tokens": "qa,answers=tokens"}


def import_checkpoint(
    source: str | Path,
    workdir: str | Path,
    *,
    new_head: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Writes a run directory whose checkpoint of step 0 holds a published checkpoint's parameters.

    The run can be loaded, evaluated, generated from and started from as any other; it can't be gone on with, having
    no data that it was trained on. What is kept of the checkpoint in the folder `pretrained` makes
    `export_checkpoint` write the same tensors.

    Args:
      source: the checkpoint's folder.
      workdir: a folder that is empty or does not exist.
      new_head: draw what the files lack of a head over the vocabulary; otherwise what they hold is taken.
      seed: of what is drawn.
      dtype: of the parameters and the computation, by name; None = that of the files.
      tokenizer: "bytes" or a tokenizer.json, for a checkpoint without one that can be read.

    Returns:
      Figures: family, architecture, parameters, and `notes` on what was skipped or drawn.

    Raises:
      PretrainedError: the checkpoint can't be read.
      RunDirectoryError: the folder holds something.
    """
    enable_compilation_cache()
    source, directory = Path(source).expanduser(), RunDirectory(Path(workdir))
    if directory.exists:
        raise RunDirectoryError(f"workdir {directory.path} holds a run already; begin in a new one")
    mesh = make_mesh()
    found = read_pretrained(
        source,
        head="vocabulary" if new_head else "stored",
        rng=jax.random.key(seed) if new_head else None,
        dtype=dtype,
        shardings=lambda path, shape: _sharding(path, shape, mesh),
    )
    found = _whole(found)
    run_tokenizer = _tokenizer(found, source, tokenizer)
    run = _run_config(found, tokenizer or str(source))
    directory.create()
    with directory.lock():
        _save(directory, found.params)
        if tokenizer != "bytes":
            run_tokenizer.save(directory.tokenizer_file)
        write_record(source, directory.pretrained)
        if isinstance(found.model, TaskModel):
            write_task(directory, found.model.head.task, found.labels)
        write_config(directory.config, run, {})
        directory.record_start({"converted_from": str(source), "from_step": 0})
    return {
        "family": found.family,
        "architecture": found.head.architecture,
        "parameters": count_parameters(found.params),
        "workdir": str(directory.path),
        "notes": found.notes,
    }


def export_checkpoint(
    workdir: str | Path, destination: str | Path, *, step: str = "latest", family: str | None = None
) -> dict[str, Any]:
    """Writes a run's model as a folder that transformers loads.

    Args:
      workdir: the run directory, trained here or made by `import_checkpoint`.
      destination: a folder that is empty or does not exist.
      step: which checkpoint: "latest", "best" or a number.
      family: a key of `jaxformer.interop.FAMILIES`; None = that of its checkpoint, or the first that fits.

    Returns:
      Figures: step, parameters, and `notes` on what is not as it was.

    Raises:
      ConfigError: no run was started there.
      CheckpointError: there is no such checkpoint.
      PretrainedError: no family can say what the model computes.
    """
    from jaxformer.data import load_tokenizer

    directory = RunDirectory(Path(workdir))
    config = read_run(directory.path)
    model, params, _, number = load_model(directory.path, config, make_mesh(data=1, devices=jax.devices()[:1]), step)
    if not isinstance(model, (Transformer, TaskModel)):
        raise PretrainedError(f"the model {config.model.name} is no Transformer, as those of all families are")
    notes = write_pretrained(
        destination,
        model,
        params,
        load_tokenizer(directory.tokenizer(tokenizer_name(config))),
        family=family,
        like=directory.pretrained if directory.pretrained.is_dir() else None,
        labels=_classes(directory),
    )
    return {"step": number, "parameters": count_parameters(params), "folder": str(destination), "notes": notes}


def _classes(directory: RunDirectory) -> list[str] | None:
    """The names of the classes that a run of a task has."""
    try:
        return json.loads(directory.task.read_text())["classes"] or None
    except (OSError, ValueError, KeyError):
        return None


def _sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    return NamedSharding(mesh, partition_spec(path, shape, mesh)[0])


def _whole(found: Pretrained) -> Pretrained:
    """What was loaded as a model that has all parameters of its config: a body alone goes without its pooler."""
    if not found.head.is_body or not found.model.config.next_sentence:
        return found
    model = found.model.clone(config=dataclasses.replace(found.model.config, next_sentence=False))
    params = {name: tree for name, tree in found.params.items() if name != "pooler"}
    note = "the pooler is left out, as it stands under no head (new_head keeps it, under heads that are drawn)"
    fields = {**found.fields, "next_sentence": False}
    return dataclasses.replace(found, model=model, params=params, fields=fields, notes=[*found.notes, note])


def _tokenizer(found: Pretrained, source: Path, given: str | None) -> Any:
    from jaxformer.data import load_tokenizer

    tokenizer = found.tokenizer if given is None else load_tokenizer(given)
    if tokenizer is None:
        raise PretrainedError(
            f"{source} has no tokenizer that can be read; give one: tokenizer=bytes, or a tokenizer.json"
        )
    if tokenizer.vocab_size > found.model.config.vocab_size:
        found.notes.append(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {found.model.config.vocab_size}"
        )
    return tokenizer


def _run_config(found: Pretrained, tokenizer: str) -> RunConfig:
    """The bundled config of such models with this model in it, all values decided."""
    run = load_config(_bundled(found))
    config = run.config
    with config.unlocked():
        config.model = ConfigDict(_model_fields(found))
        if isinstance(found.model, TaskModel):
            config.objective = found.model.head.task
            config.head = ConfigDict(dataclasses.asdict(found.model.head))
            if "regression" in config.data:
                config.data.regression = config.objective == "regression"
        config.data.tokenizer = tokenizer
        config.data.length = min(found.model.config.max_length, _LENGTH)
    if make_model(config).config != found.model.config:
        raise PretrainedError(f"a {found.family} with these settings has no place in a run's config")
    return dataclasses.replace(run, config=config)


def _bundled(found: Pretrained) -> str:
    """The bundled config whose data and objective are for such a model."""
    family, model = found.family, found.model
    if isinstance(model, TaskModel):
        known = family if family in ("bert", "roberta", "distilbert") else "gpt"
        return f"finetune:model={known},task={_TASKS.get(model.head.task, 'classification')}"
    if family == "t5":
        return "text_to_text:data=dates"
    if family in ("gpt2", "llama"):
        return "language_model"
    return f"masked_lm:model={'bert' if model.config.next_sentence else 'roberta'}"


def _model_fields(found: Pretrained) -> dict[str, Any]:
    """The section `model`: everything that the checkpoint decided."""
    fields = {name: value for name, value in found.fields.items() if value is not None}
    return {"name": found.preset, **fields}


class _NoBatches:
    """Stands for the data's iterator, of which a converted run has none."""

    def get_state(self) -> dict[str, Any]:
        return {}


def _save(directory: RunDirectory, params: Any) -> None:
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=(),
        model_state={},
        rng_data=jax.random.key_data(jax.random.key(0)),
    )
    with Checkpoints(directory.checkpoints, keep_latest=1, keep_best=0) as checkpoints:
        checkpoints.save(0, state, _NoBatches(), {"loss": None})
