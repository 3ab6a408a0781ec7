"""The section `optimizer` of a config: every field of every optimizer, so that another name alone is a change.

`optimizer.b2` and its like are of whichever optimizer is named; None leaves them to the subsection for that optimizer,
where there is one, and then to the optimizer's own default. An experiment's values for its own optimizer are in such a
subsection (`optimizer.for_adamw.b2`), so that they don't stand in the way of another.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxformer.training.config import optional


def optimizer_config(
    name: str = "adamw",
    *,
    learning_rate: float,
    no_decay: tuple[str, ...] = (r"(^|/)(bias|scale|embedding)$",),
    clip_norm: float | None = 1.0,
    **given: Any,
) -> ConfigDict:
    """Fields of `make_optimizer`, those of all optimizers and each hyperparameter as None.

    Args:
      name: a key of `OPTIMIZERS`.
      learning_rate: highest rate, per step.
      no_decay: parameter paths that do not decay.
      clip_norm: highest global norm of the gradient; None = no clipping.
      **given: hyperparameters of that optimizer, which become the subsection for it.

    Returns:
      The section.
    """
    optimizer = ConfigDict()
    # gradient_descent, sgd, momentum, rmsprop, adam, adam_l2, adamw, adafactor, lion, muon
    optimizer.name = name
    optimizer.learning_rate = learning_rate  # highest rate, per step
    optimizer.clip_norm = optional(float, clip_norm)  # highest global norm of the gradient; None = no clipping
    optimizer.clip_value = optional(float)  # highest absolute value of its elements; None = no clipping
    optimizer.clip_adaptive = optional(float)  # highest norm of a unit's, by that of its parameters; None = no clipping
    optimizer.no_decay = no_decay  # parameter paths that do not decay
    optimizer.layer_decay = optional(float)  # factor of the rate from a layer to that below; None = one rate
    optimizer.rate_factors = ()  # pairs (parameter paths, factor of the rate); 0 = frozen
    optimizer.frozen_layers = optional(
        int
    )  # lowest layers frozen, with the embeddings; 0 = these alone, None = nothing
    optimizer.head_only = False  # the body does not learn
    # Each optimizer's own where None.
    optimizer.b1 = optional(float)  # decay of the first moment
    optimizer.b2 = optional(float)  # decay of the second moment
    optimizer.epsilon = optional(float)  # added to the second moment's root
    optimizer.weight_decay = optional(float)  # per step, times the learning rate where it is decoupled
    optimizer.decay_multiplier = optional(str)  # of decoupled decay: rate, schedule (rate / highest rate)
    optimizer.momentum = optional(float)  # of momentum, rmsprop, muon
    optimizer.nesterov = optional(bool)  # of momentum, muon
    optimizer.epsilon_in_root = optional(bool)  # of rmsprop
    optimizer.initial_scale = optional(float)  # of rmsprop: the second moment before the first step
    optimizer.centered = optional(bool)  # of rmsprop
    optimizer.decay_exponent = optional(float)  # of adafactor: decay of the second moment is 1 - step^-decay_exponent
    optimizer.smallest_factored = optional(int)  # of adafactor: rows and columns
    optimizer.clip_update = optional(float)  # of adafactor: root mean square
    optimizer.relative_scale = optional(bool)  # of adafactor: updates in units of the parameters' root mean square
    optimizer.smallest_scale = optional(float)  # of adafactor: least such unit
    optimizer.newton_schulz_steps = optional(int)  # of muon
    optimizer.muon_scale = optional(str)  # of muon: rms, width
    optimizer[f"for_{name}"] = ConfigDict(given)
    return optimizer


def optimizer_arguments(section: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """The arguments of `make_optimizer` that a section means, `learning_rate` among them.

    Args:
      section: as of `optimizer_config`, or of an older config, without subsections.
    """
    fields = {field: value for field, value in section.items() if not isinstance(value, (dict, ConfigDict))}
    for field, value in section.get(f"for_{fields['name']}", {}).items():
        if fields.get(field) is None:
            fields[field] = value
    return fields


def meant_optimizer(section: ConfigDict) -> dict[str, Any]:
    """All that a section means, with the optimizer's own defaults: equal where two sections train alike."""
    from jaxformer.training.optimizers import OPTIMIZERS, hyperparameters, make_optimizer

    # Of clip_norm None is a value: no clipping.
    given = optimizer_arguments(section).items()
    arguments = {field: value for field, value in given if value is not None or field == "clip_norm"}
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(make_optimizer).parameters.values()
        if parameter.default is not parameter.empty
    }
    own = hyperparameters(section.name) if section.name in OPTIMIZERS else {}
    return {**defaults, **own, **arguments}
