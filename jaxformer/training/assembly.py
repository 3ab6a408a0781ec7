"""From a run's config to its parts: data, model, objective, train step."""

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.inference import has_encoder
from jaxformer.models import MODELS, Transformer
from jaxformer.training.averaging import check_average_decay
from jaxformer.training.layer_rates import is_head
from jaxformer.training.loss_scaling import loss_scaling
from jaxformer.training.nearest import nearest
from jaxformer.training.objectives import OBJECTIVES, Objective
from jaxformer.training.optimizer_config import optimizer_arguments
from jaxformer.training.optimizers import DecayReport, make_optimizer
from jaxformer.training.overrides import ConfigError
from jaxformer.training.parameter_paths import parameter_path
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.schedules import RateSchedule, make_schedule
from jaxformer.training.sharding import state_shardings
from jaxformer.training.state import TrainState, abstract_params, abstract_state
from jaxformer.training.step import TrainStep, jit_train_step, make_train_step
from jaxformer.training.task_head import with_head


def load_data(config: ConfigDict, directory: RunDirectory | None = None) -> Any:
    """Loads the run's rows and tokenizer.

    Args:
      config: the whole config; `config.data` is splatted into the loader that its name stands for.
      directory: that of a run that has begun: its own copy of the tokenizer is read.

    Returns:
      A `jaxformer.data.Data`.
    """
    from jaxformer.data import data_loader

    loader = data_loader(config.data.name)
    arguments = {name: value for name, value in config.data.items() if name != "prefetch"}
    check_fields("data", arguments, loader)
    if directory is not None and "tokenizer" in arguments:
        arguments["tokenizer"] = directory.tokenizer(arguments["tokenizer"])
        if arguments.get("source_tokenizer") is not None:
            arguments["source_tokenizer"] = directory.source_tokenizer(arguments["source_tokenizer"])
    return loader(**arguments)


def tokenizer_name(config: ConfigDict) -> str:
    """What a run's tokenizer was made from: "bytes", a file, or the name of data that bring their own."""
    return config.data.tokenizer if "tokenizer" in config.data else config.data.name


def check_fields(section: str, fields: Mapping[str, Any], function: Callable) -> None:
    """Refuses a section of the config that is passed to a function and has a field that this does not know.

    Raises:
      ConfigError: the field, with the nearest that there is.
    """
    known = inspect.signature(function).parameters
    for name in fields:
        if name not in known:
            raise ConfigError(f"config.{section}.{name} is unknown; {nearest(name, known)}")


def make_model(config: ConfigDict) -> nn.Module:
    """The model of `config.model`, every None of which was decided, with the head of `config.head` where there is one.

    Raises:
      ConfigError: unknown model name.
      ValueError: the model refuses a field.
    """
    fields = config.model.to_dict()
    name = fields.pop("name")
    if name not in MODELS:
        raise ConfigError(f"config.model.name is {name!r}; {nearest(name, MODELS)}")
    model = MODELS[name](**fields)
    return with_head(config, model) if "head" in config else model


def check_packing(config: ConfigDict, model: nn.Module) -> None:
    """Refuses packed documents or pairs where the model would let them see each other.

    Raises:
      ConfigError: as said.
    """
    field, other = ("batching", "bucketed") if "batching" in config.data else ("packing", "contiguous")
    if config.data.get(field) != "packed":
        return
    if not isinstance(model, Transformer):
        raise ConfigError(f"config.data.{field} is 'packed', but {config.model.name} can't keep packed pairs apart")
    choices = model.config.attentions
    if has_encoder(model):
        choices = (*choices, *model.config.encoder_side.attentions, model.config.cross)
    for choice in choices:
        if not choice.packing:
            raise ConfigError(
                f"config.data.{field} is 'packed', but attention={choice.name!r} can't keep packed documents apart; "
                f"it must be {other!r}"
            )


def make_objective(config: ConfigDict) -> Objective:
    """The objective of the config, with the settings of `config.loss`."""
    if config.objective not in OBJECTIVES:
        raise ConfigError(f"config.objective is {config.objective!r}; {nearest(config.objective, OBJECTIVES)}")
    return functools.partial(OBJECTIVES[config.objective], **config.get("loss", {}))


def of_head_alone(objective: Objective) -> Objective:
    """The same objective with no gradient below the head, which then need not be computed."""

    def stopped(model: nn.Module, params: Any, *arguments: Any, **options: Any) -> Any:
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if is_head(parameter_path(path)) else jax.lax.stop_gradient(leaf), params
        )
        return objective(model, params, *arguments, **options)

    return stopped


def example_batch(length: int, model: nn.Module) -> dict[str, np.ndarray]:
    """A batch of one row with the names and dtypes of the model's inputs; no parameter depends on more."""
    names = ("tokens", "source") if has_encoder(model) else ("tokens",)
    return {name: np.broadcast_to(np.int32(0), (1, length)) for name in names}  # of any length, without memory


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a training run is made of.

    Attributes:
      model: the module.
      optimizer: its optax transformation.
      train_step: jitted; donates the state.
      objective: the objective.
      state: the train state's tree of shapes, dtypes and shardings.
      shardings: the train state's tree of shardings.
      replicated: a line for each dimension that should have been split and does not divide.
      decay: which parameters decay.
      schedule: the learning rate of a step.
    """

    model: nn.Module
    optimizer: Any
    train_step: TrainStep
    objective: Objective
    state: TrainState
    shardings: Any
    replicated: list[str]
    decay: DecayReport
    schedule: RateSchedule


def make_parts(config: ConfigDict, mesh: Mesh) -> Parts:
    """Builds model, optimizer and train step of a config with all values decided; computes nothing."""
    model, objective = make_model(config), make_objective(config)
    check_packing(config, model)
    batch = example_batch(config.data.length, model)
    updates = make_updates(config, model, objective, abstract_params(model, batch))
    state = abstract_state(model, updates.optimizer, batch, **extras(config))
    shardings, replicated = state_shardings(state, mesh)
    return Parts(
        model=model,
        optimizer=updates.optimizer,
        train_step=jit_train_step(updates.train_step, shardings),
        objective=objective,
        state=place(state, shardings),
        shardings=shardings,
        replicated=replicated,
        decay=updates.decay,
        schedule=updates.schedule,
    )


def extras(config: ConfigDict) -> dict[str, Any]:
    """What train state and train step of a config have besides: average and loss scale, as their makers take them.

    Raises:
      ConfigError: a value is out of range.
    """
    train = config.train
    average_decay = train.get("average_decay")
    try:
        check_average_decay(average_decay)
        scaling = loss_scaling(train.get("loss_scale"), train.get("loss_scale_growth_steps"))
    except ValueError as error:
        raise ConfigError(f"config.train.{error}") from error
    return {"average_decay": average_decay, "loss_scaling": scaling}


class Updates(NamedTuple):
    """What an update of the parameters is made of.

    Attributes:
      optimizer: the optax transformation.
      train_step: not jitted.
      decay: which parameters decay.
      schedule: the learning rate of a step.
    """

    optimizer: Any
    train_step: TrainStep
    decay: DecayReport
    schedule: RateSchedule


def make_updates(
    config: ConfigDict, model: nn.Module, objective: Objective, params: Any, numbers: Mapping[str, Any] | None = None
) -> Updates:
    """Builds optimizer and train step of a config with all values decided.

    Args:
      config: the whole config.
      model: the module.
      objective: the objective.
      params: tree of the parameters' shapes.
      numbers: by path, scalars in place of the config's fields of optimizer and schedule; they may be traced.
    """
    fields = {name: config[name].to_dict() for name in ("optimizer", "schedule")}
    for path, number in (numbers or {}).items():
        *sections, name = path.split(".")
        functools.reduce(operator.getitem, sections, fields)[name] = number
    schedule, optimizer, decay = _make_rule(fields["optimizer"], fields["schedule"], params)
    trained = of_head_alone(objective) if fields["optimizer"].get("head_only") else objective
    step = make_train_step(
        model, trained, optimizer, schedule, accumulation_steps=config.train.accumulation_steps, **extras(config)
    )
    return Updates(optimizer, step, decay, schedule)


def _make_rule(optimizer: Mapping[str, Any], schedule: Mapping[str, Any], params: Any) -> tuple[Any, Any, DecayReport]:
    """Schedule, optimizer, and what decays, of the two sections of a config."""
    arguments = optimizer_arguments(optimizer)
    check_fields("optimizer", arguments, make_optimizer)
    check_fields("schedule", schedule, make_schedule)
    with _of_section("schedule"):
        rate = make_schedule(learning_rate=arguments.pop("learning_rate"), **schedule)
    with _of_section("optimizer"):
        return rate, *make_optimizer(learning_rate=rate, params=params, **arguments)


@contextlib.contextmanager
def _of_section(name: str) -> Iterator[None]:
    """What is refused within is refused as a section of the config."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.{name}: {error}") from error


def check_updates(config: ConfigDict) -> None:
    """Refuses names and numbers of optimizer and schedule before there are data or a model.

    What depends on the model's parameters, patterns of their paths and the number of layers, is not looked at.

    Raises:
      ConfigError: as said.
    """
    optimizer, schedule = config.optimizer.to_dict(), config.schedule.to_dict()
    optimizer |= {"no_decay": (), "rate_factors": (), "frozen_layers": None, "layer_decay": None, "head_only": False}
    if schedule.get("decay_steps") is None:  # the run's own, as `decided_values` has it
        schedule["decay_steps"] = max(config.train.steps, config.schedule.warmup_steps + 1)
    _make_rule(optimizer, schedule, {"kernel": jax.ShapeDtypeStruct((1, 1), np.float32)})


def place(abstract: Any, shardings: Any) -> Any:
    """A tree of shapes with the shardings that its arrays are to have."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


def count_parameters(params: Any) -> int:
    """How many numbers a tree of parameters (or of their shapes) holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
