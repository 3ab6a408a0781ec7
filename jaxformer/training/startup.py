"""What a run does before its first step: lock, data, config, records, restored or new state."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from jaxformer.models import Transformer
from jaxformer.models.position_settings import TABLES
from jaxformer.training.assembly import Parts, check_updates, count_parameters, example_batch, extras, tokenizer_name
from jaxformer.training.checkpoint_reading import CheckpointError, find_steps
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import RunConfig, differences, read_config, resolve, write_config
from jaxformer.training.metrics import MetricsWriter, cut_back
from jaxformer.training.overrides import ConfigError
from jaxformer.training.progress import Progress
from jaxformer.training.run_directory import RunDirectory, RunDirectoryError
from jaxformer.training.sampling import prompt_tokens
from jaxformer.training.sharding import data_shard
from jaxformer.training.starting import has_start, take_parameters
from jaxformer.training.state import TrainState, init_state
from jaxformer.training.sweep_record import SweepDirectory
from jaxformer.training.translation_metrics import check_text_metrics
from jaxformer.training.translator import translates

_NON_FINITE = ("skip", "stop")
_LEAST = {
    "train.steps": 1,
    "train.batch_size": 1,
    "train.accumulation_steps": 1,
    "eval.batch_size": 1,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_latest": 1,
    "checkpoint.keep_best": 0,
    "log.every_steps": 0,
    "data.length": 1,
}
# Of configs that have them: of runs whose examples are translated or predicted.
_LEAST_OF_DECODING = {
    "eval.decode_examples": 0,
    "eval.num_beams": 1,
    "eval.max_new_tokens": 1,
    "eval.most_answer_tokens": 1,
    "sample.num_translations": 0,
}


@contextlib.contextmanager
def sole_writer(directory: RunDirectory) -> Iterator[None]:
    """Makes and locks the run directory, in the first process; the others rely on it."""
    if jax.process_index() > 0:
        yield
        return
    directory.create()
    with directory.lock():
        yield


def earlier_run(directory: RunDirectory) -> tuple[RunConfig, dict[str, object]] | None:
    """The config that the run in a directory began with, and the values that it decided.

    None where there is nothing to go on with: no run was begun, or it saved no step.

    Raises:
      RunDirectoryError: there are checkpoints, but not the config that they belong to.
    """
    if SweepDirectory(directory.path).record.is_file():
        raise RunDirectoryError(f"workdir {directory.path} holds a sweep, not a run; its runs are in runs/")
    steps, _ = find_steps(directory.checkpoints)
    if not steps:
        return None
    if not directory.exists:
        raise RunDirectoryError(
            f"workdir {directory.path} holds checkpoints (step {steps[-1]}) but no {directory.config.name}, so that "
            "nothing tells which run they are of: restore the file, or begin in a new workdir"
        )
    return read_config(directory.config)


def check_config(config: ConfigDict, earlier: ConfigDict | None, where: Path) -> None:
    """Refuses a config before anything is loaded.

    Raises:
      ConfigError: a number is out of range, or the run began with another config; the differences are listed.
    """
    for path, least in (_LEAST | _LEAST_OF_DECODING).items():
        section, name = path.split(".")
        if section not in config or name not in config[section]:
            if path in _LEAST_OF_DECODING:
                continue
            raise ConfigError(f"config.{path} is missing from the config file")
        if config[section][name] is not None and config[section][name] < least:
            raise ConfigError(f"config.{path} is {config[section][name]}, must be at least {least}")
    if config.train.batch_size % config.train.accumulation_steps:
        raise ConfigError(
            f"config.train.batch_size is {config.train.batch_size}, must be a multiple of "
            f"config.train.accumulation_steps = {config.train.accumulation_steps}"
        )
    if config.train.non_finite not in _NON_FINITE:
        raise ConfigError(f"config.train.non_finite is {config.train.non_finite!r}, must be one of skip, stop")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"config.seed is {config.seed}, must be in [0, 2**32)")
    if earlier is None:
        check_updates(config)
    if "text_metrics" in config.eval and config.eval.text_metrics:
        check_text_metrics()
    lines = differences(earlier, config) if earlier is not None else []
    if lines:
        raise ConfigError(
            f"{where} holds a run of another config, which cannot go on with this one: {'; '.join(lines)}"
        )


def check_batches(config: ConfigDict, mesh: Mesh | AbstractMesh) -> None:
    """Refuses batches that the mesh cannot split, those of evaluation too, which come late.

    Raises:
      ConfigError: a batch size is no multiple of the devices along the batch.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    for path, size in (("train", config.train.batch_size), ("eval", config.eval.batch_size)):
        if size % parts:
            raise ConfigError(
                f"config.{path}.batch_size is {size}, must be a multiple of the {parts} devices along the batch "
                f"(mesh data={mesh.shape['data']}, fsdp={mesh.shape['fsdp']})"
            )


def check_sample(config: ConfigDict, data: Any) -> None:
    """Refuses, before training, a sample of text or translations that will not fit the model.

    Raises:
      ConfigError: prompt and new tokens are more than the model's positions.
    """
    if translates(config) and (config.eval.decode_examples or config.sample.num_translations):
        positions, longest = config.model.get("positions"), config.eval.max_new_tokens
        # Below: the decoder begins with one token.
        if positions in TABLES and longest >= config.model.max_length:
            raise ConfigError(
                f"config.eval.max_new_tokens is {longest}, must be below config.model.max_length = "
                f"{config.model.max_length}, where positions={positions} end"
            )
    if "prompt" not in config.get("sample", {}) or config.sample.max_new_tokens < 1:
        return
    prompt = len(prompt_tokens(data.tokenizer, config.sample.prompt))
    if prompt + config.sample.max_new_tokens > config.model.max_length:
        raise ConfigError(
            f"config.sample asks for {prompt} + {config.sample.max_new_tokens} tokens (prompt + max_new_tokens), "
            f"must be at most config.model.max_length = {config.model.max_length}"
        )


def introduce(progress: Progress, config: ConfigDict, mesh: Mesh, data: Any, parts: Parts) -> None:
    """Says what the run is made of."""
    devices = jax.devices()
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    progress.say(f"model: {config.model.name}, {count_parameters(parts.state.params):,} parameters")
    if isinstance(parts.model, Transformer):
        for choice in dict.fromkeys(parts.model.config.attentions):
            args = ", ".join(f"{name}={value}" for name, value in choice.args)
            streamed = "packing" in config.data and not choice.packing
            borders = "; rows are cut from one stream, as it can't keep documents apart" if streamed else ""
            progress.say(f"attention: {choice.name}({args}){borders}")
    progress.say(f"devices: {len(devices)} × {devices[0].device_kind}{f', mesh {sizes}' if sizes else ''}")
    progress.say(parts.decay.summary())
    for line in parts.replicated:
        progress.say(f"replicated: {line}")
    progress.say(f"data: {data.summary}")
    progress.say(data.baselines)
    ends = parts.schedule.last_change
    if ends is not None and ends < config.train.steps:
        where = " (schedule.decay_steps)" if ends == config.schedule.decay_steps else ""
        progress.say(f"learning rate: at its final value from step {ends}{where} on")
    if parts.state.average is not None:
        progress.say(f"evaluation: of the average of the parameters, with decay {config.train.average_decay}")


def check_full_batch(config: ConfigDict, data: Any) -> None:
    """Refuses gradient descent on a part of the data: its batch is all rows, which each epoch is a permutation of.

    Raises:
      ConfigError: the batch has another size, or there is no number of rows.
    """
    if config.optimizer.name != "gradient_descent":
        return
    if not hasattr(data.train_rows, "__len__"):
        raise ConfigError(
            "config.optimizer.name is 'gradient_descent', must be 'sgd' for training data without a number of rows"
        )
    rows = len(data.train_rows)
    if config.train.batch_size != rows:
        raise ConfigError(
            f"config.train.batch_size is {config.train.batch_size}, must be {rows}, all rows of the training data, for "
            "gradient_descent (train.accumulation_steps cuts it into parts), or config.optimizer.name must be 'sgd'"
        )


def training_batches(config: ConfigDict, data: Any, mesh: Mesh) -> Any:
    """The iterator over this process's part of every batch.

    Raises:
      ConfigError: gradient descent on a part of the data.
    """
    from jaxformer.data import train_batches

    check_full_batch(config, data)
    index, count = data_shard(mesh)
    return train_batches(
        data.train_rows,
        batch_size=config.train.batch_size,
        seed=config.seed,
        process_index=index,
        process_count=count,
        prefetch=config.data.prefetch,
    )


def restore_or_init(
    config: ConfigDict, parts: Parts, checkpoints: Checkpoints, batches: Any, data: Any, progress: Progress
) -> tuple[TrainState, int]:
    """The state to begin with and the updates it has had; the batches then stand where they stood.

    Raises:
      CheckpointError: the checkpoint does not fit the model, or the data have changed since.
    """
    if not checkpoints.steps:
        example = example_batch(config.data.length, parts.model)
        state = init_state(parts.model, parts.optimizer, config.seed, example, parts.shardings, **extras(config))
        return take_parameters(config, state, progress.say) if has_start(config) else state, 0
    step = checkpoints.steps[-1]
    saved = checkpoints.facts(step).get("data_hash")
    if saved != data.hash:
        raise CheckpointError(
            f"the training data have changed since step {step} was saved (hash {saved} then, {data.hash} now): "
            "the run cannot go on; begin another in a new workdir"
        )
    state = checkpoints.restore(step, parts.state, batches)
    progress.say(f"restored step {step} from {checkpoints.directory}")
    return state, step


@contextlib.contextmanager
def open_records(
    directory: RunDirectory, given: RunConfig, decided: dict[str, object], data: Any, start: int
) -> Iterator[MetricsWriter | None]:
    """Writes config, tokenizer and start of a run, and opens its metrics, cut back to the step that was restored.

    Only in the first process; in the others there are no metrics.
    """
    if jax.process_index() > 0:
        yield None
        return
    if tokenizer_name(resolve(given.config, decided)) != "bytes" and start == 0:
        data.tokenizer.save(directory.tokenizer_file)
    if given.config.data.get("source_tokenizer") not in (None, "bytes") and start == 0:
        data.source_tokenizer.save(directory.source_tokenizer_file)
    write_config(directory.config, given, decided)
    directory.record_start({"data_hash": data.hash, "data": data.summary, "from_step": start})
    cut_back(directory.metrics, start)
    with MetricsWriter(directory.metrics, directory.tensorboard if given.config.log.tensorboard else None) as metrics:
        yield metrics
