"""The values that a config leaves to the run (None): what its data decide, and what its length does."""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxformer.models import MODELS
from jaxformer.models.position_settings import TABLES
from jaxformer.training.overrides import ConfigError
from jaxformer.training.starting import has_start
from jaxformer.training.task_head import decided_head


def decided_values(config: ConfigDict, data: Any) -> dict[str, object]:
    """The values that a config leaves to the run (None), by path.

    Raises:
      ConfigError: a value that is given does not fit the data.
    """
    decided = decided_vocabularies(config, data) | decided_head(config, data)
    if config.data.length is None:
        decided["data.length"] = data.train_rows.length
    # Recurrent models have no such limit.
    if "max_length" in config.model:
        decided |= decided_length(config, data)
    decided |= decided_strides(config, data) | decided_axes(config, data, decided)
    if config.schedule.name == "inverse_sqrt" and "embed_dim" in config.schedule and config.schedule.embed_dim is None:
        decided["schedule.embed_dim"] = config.model.embed_dim
    if config.schedule.decay_steps is None:
        # A run shorter than its warm-up just ends within it.
        decided["schedule.decay_steps"] = max(config.train.steps, config.schedule.warmup_steps + 1)
    # How long losses take to vanish is part of the run, as its learning rates are: going on for longer changes neither.
    loss = config.get("loss", {})  # a stored config has no empty sections
    if loss.get("intermediate_weight") and loss.intermediate_steps is None:
        decided["loss.intermediate_steps"] = config.train.steps
    if "predictions_per_row" in loss and loss.predictions_per_row is None:
        decided["loss.predictions_per_row"] = usual_predictions(data)
    return decided


def decided_length(config: ConfigDict, data: Any) -> dict[str, object]:
    """The tokens that a model has positions for, where the config leaves them to the data (None).

    Rows may all be shorter than `data.length`; later ones need not. A start whose positions end nowhere goes further.

    Raises:
      ConfigError: the number that is given, or that of the start, is too small.
    """
    needed = max(data.max_length, config.data.length or 0)
    given = config.model.max_length
    if given is not None and given >= needed:
        return {}
    if given is None or (has_start(config) and not _has_table_of_positions(config)):
        return {"model.max_length": needed}
    longest = "config.data.length" if config.data.length == needed else "the tokens of the longest row"
    if has_start(config):
        raise ConfigError(f"{longest} = {needed}, must be at most the start's model.max_length = {given}")
    raise ConfigError(f"config.model.max_length is {given}, must be at least {longest} = {needed}, or None")


def _has_table_of_positions(config: ConfigDict) -> bool:
    fields = config.model.to_dict()
    model: Any = MODELS[fields.pop("name")](**fields)
    return getattr(model.config, "positions", None) in TABLES


def usual_predictions(data: Any) -> int:
    """So many tokens of a row that hardly any row has more chosen: four standard deviations above the mean.

    Raises:
      ConfigError: in these data no tokens are chosen.
    """
    masking = getattr(data.train_rows, "masking", None)
    if masking is None:
        raise ConfigError("config.loss.predictions_per_row is None, which only masked data decide; give a number")
    mean = data.train_rows.length * masking.fraction
    return min(data.train_rows.length, math.ceil(mean + 4.0 * math.sqrt(mean * (1.0 - masking.fraction))))


def decided_vocabularies(config: ConfigDict, data: Any) -> dict[str, object]:
    """The numbers of tokens that a config leaves to the data (None), of the target and of a separate source.

    Raises:
      ConfigError: a number that is given is below the tokenizer's; or source and target have different tokenizers but
        share their embeddings.
    """
    decided: dict[str, object] = {}
    tokenizers = {"vocab_size": data.tokenizer}
    source = getattr(data, "source_tokenizer", data.tokenizer)
    if "share_embeddings" in config.model and not config.model.share_embeddings:
        tokenizers["source_vocab_size"] = source
    elif source is not data.tokenizer:
        raise ConfigError(
            "config.data.source_tokenizer is not the target's, so config.model.share_embeddings must be False"
        )
    for name, tokenizer in tokenizers.items():
        given = config.model[name]
        if given is None:
            decided[f"model.{name}"] = tokenizer.vocab_size
        elif given < tokenizer.vocab_size:
            raise ConfigError(
                f"config.model.{name} is {given}, must be at least the tokenizer's {tokenizer.vocab_size}, or None"
            )
    return decided


def decided_strides(config: ConfigDict, data: Any) -> dict[str, object]:
    """The stride of a model or its attention that leaves it to the data (None): the tokens of a row of a picture."""
    sections = {"model.stride": config.model}
    if "attention_args" in config.model:
        sections["model.attention_args.stride"] = config.model.attention_args
    open_ones = [path for path, section in sections.items() if "stride" in section and section.stride is None]
    if open_ones and not hasattr(data, "row_length"):
        raise ConfigError(f"config.{open_ones[0]} is None, which only pictures decide; give a number")
    return {path: data.row_length for path in open_ones}


def decided_axes(config: ConfigDict, data: Any, decided: Mapping[str, object]) -> dict[str, object]:
    """Rows and columns of axial positions that leave them to the data (None): those of a picture."""
    model = config.model
    is_open = model.get("positions") == "axial" and "axial_shape" in model and model.axial_shape is None
    if not is_open or not hasattr(data, "row_length"):
        return {}
    length: Any = decided.get("model.max_length", model.max_length)
    return {"model.axial_shape": (math.ceil(length / data.row_length), data.row_length)}
