"""A task's head on a model: which one a config asks for, and what of it the data decide."""

from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from jaxformer.models import HeadConfig, TaskModel, Transformer
from jaxformer.training.overrides import ConfigError


def decided_head(config: ConfigDict, data: Any) -> dict[str, object]:
    """The values of `config.head` that it leaves to the run (None), by path: its task, and how many classes it has.

    Raises:
      ConfigError: the head does not fit the objective, or either of them the data.
    """
    task = getattr(data, "task", None)
    if "head" not in config:
        if task is not None:
            raise ConfigError(f"config.head is missing from the config file; data {config.data.name!r} are for {task}")
        return {}
    # What each token is to an answer is another way to learn the same.
    if task != ("answers" if config.objective == "answer_tokens" else config.objective):
        raise ConfigError(f"config.objective is {config.objective!r}, but data {config.data.name!r} are for {task}")
    if config.objective == "answer_tokens" and "targets" not in data.train_rows.per_token:
        raise ConfigError("config.objective is 'answer_tokens', so config.data.targets must be 'tokens'")
    decided: dict[str, object] = {}
    if config.head.task is None:
        decided["head.task"] = config.objective
    elif config.head.task != config.objective:
        raise ConfigError(
            f"config.head.task is {config.head.task!r}, must be the objective {config.objective!r}, or None"
        )
    count = len(data.classes)
    if config.head.num_classes is None and count:
        decided["head.num_classes"] = count
    elif count and config.head.num_classes < count:
        raise ConfigError(f"config.head.num_classes is {config.head.num_classes}, must be the data's {count}, or None")
    return decided


def with_head(config: ConfigDict, model: nn.Module) -> nn.Module:
    """The body of a model with the head of the config.

    Raises:
      ConfigError: the model is no Transformer.
      ValueError: the head's settings are refused, or do not fit the model.
    """
    if not isinstance(model, Transformer):
        raise ConfigError(f"config.head is for Transformers, not {config.model.name}")
    return TaskModel(model.config, HeadConfig(**config.head))
