"""A run that starts from another's parameters: with its model and tokenizer, and what the two do not share said."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.averaging import start_average
from jaxformer.training.checkpoint_reading import (
    CheckpointError,
    choose_step,
    restore_items,
    signature,
    stored_tree,
)
from jaxformer.training.config import read_config, resolve
from jaxformer.training.overrides import ConfigError
from jaxformer.training.parameter_paths import parameter_path
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.state import TrainState

GIVEN_FIELDS = (
    "attention_dropout_rate",
    "dropout_rate",
    "dtype",
    "final_dropout_rate",
    "mlp_dropout_rate",
    "remat",
)
"""Fields of `config.model` that a run with a start may give; None leaves them to the start, as all others are."""

NEW_PARTS = ("classifier", "pooler")
"""Parameters that a task's head may have and its start lack."""

_DECIDED = ("model", "data.tokenizer", "data.length", "start.step")

_LENGTH = 384  # tokens of a row at most, where the start sets no limit


def has_start(config: ConfigDict) -> bool:
    """Whether a run starts from the parameters of another."""
    return "start" in config and config.start.workdir is not None


def start_values(config: ConfigDict, earlier: Mapping[str, object] | None = None) -> dict[str, object]:
    """The values of a config that its start decides, by path.

    These are the whole model, the tokenizer, which step it is and, where the config leaves it open, how long the rows
    of a task are at most.

    Args:
      config: the config as given.
      earlier: what the run decided when it began, where it goes on: then the start is not read again.

    Returns:
      The values; none where there is no start.

    Raises:
      ConfigError: the start is missing or no run, or the config gives what it decides.
      CheckpointError: the start has no such step.
    """
    if not has_start(config):
        if "name" not in config.model:
            raise ConfigError("config.start.workdir is None, must be the run directory that the model comes from")
        return {}
    if earlier is not None:
        return {path: value for path, value in earlier.items() if path in _DECIDED}
    directory = RunDirectory(Path(config.start.workdir))
    run, decided = read_config(directory.config)
    own = resolve(run.config, decided)
    surplus = [name for name in config.model if name not in GIVEN_FIELDS]
    if surplus:
        raise ConfigError(
            f"config.model.{surplus[0]} comes from the start {directory.path}, and the config must not have it; it may "
            f"have {', '.join(GIVEN_FIELDS)} (the experiments: start=run)"
        )
    if config.data.get("tokenizer") is not None:
        raise ConfigError(f"config.data.tokenizer is {config.data.tokenizer!r}, must be None: it is the start's")
    given = {name: value for name, value in config.model.items() if value is not None}
    tokenizer = directory.tokenizer(tokenizer_name(own))
    model = {**own.model.to_dict(), **given}
    length = {}
    if "head" in config and config.data.length is None:
        # Examples of a task are cut, or windowed, to what the start has positions for.
        length["data.length"] = min(model.get("max_length") or _LENGTH, _LENGTH)
    return {
        "model": model,
        **length,
        "data.tokenizer": tokenizer if tokenizer == "bytes" else str(Path(tokenizer).absolute()),
        "start.step": str(choose_step(directory.checkpoints, config.start.step)),
    }


def take_parameters(config: ConfigDict, state: TrainState, say: Callable[[str], None]) -> TrainState:
    """Puts the start's parameters, and its model's other variables, in place of those that were drawn.

    Taken is what has equal path, shape and dtype; where the start keeps an average of its parameters, that. A task's
    head may be new; what the start has besides is left there.

    Args:
      config: with all values decided.
      state: as drawn.
      say: is told what was taken, drawn anew and left.

    Returns:
      The state.

    Raises:
      CheckpointError: the start lacks a parameter that no task's head brings, or cannot be read.
    """
    folder = RunDirectory(Path(config.start.workdir)).checkpoints
    step = choose_step(folder, config.start.step)
    like = {"params": state.params, "model_state": state.model_state}
    on_disk = stored_tree(folder, step, "model")
    kinds, wanted = signature(on_disk), signature(like)
    new = [path for path, kind in wanted.items() if kinds.get(path) != kind]
    missing = [path for path in new if "head" not in config or path.split("/")[1] not in NEW_PARTS]
    if missing:
        lines = [f"{path} {wanted[path]} (there: {kinds.get(path, 'nothing')})" for path in missing[:12]]
        raise CheckpointError(f"start {config.start.workdir}, step {step}, does not fit the model: {'; '.join(lines)}")
    taken = {path: leaf for path, leaf in _by_path(like).items() if path not in new}
    everywhere = NamedSharding(state.step.sharding.mesh, PartitionSpec())

    def abstract(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        own = taken.get(parameter_path(path).removeprefix("average/"))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere if own is None else own.sharding)

    tree = jax.tree_util.tree_map_with_path(abstract, on_disk)
    restored = _by_path(restore_items(folder, step, {"model": tree})["model"])

    def value(path: Any, leaf: Any) -> Any:
        name = parameter_path(path)
        return restored.get(f"average/{name}", restored[name]).astype(leaf.dtype) if name in taken else leaf

    mixed = jax.tree_util.tree_map_with_path(value, like)
    say(f"start: {len(taken)} arrays of {config.start.workdir}, step {step}")
    left = [path for path in kinds if path.removeprefix("average/") not in (*wanted, "updates")]
    for title, paths in (("drawn anew", new), ("left there", left)):
        if paths:
            say(f"start, {title}: {', '.join(path.partition('/')[2] for path in paths)}")
    average = None if state.average is None else start_average(mixed["params"])
    return state.replace(params=mixed["params"], model_state=mixed["model_state"], average=average)


def _by_path(tree: Any) -> dict[str, Any]:
    return {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
