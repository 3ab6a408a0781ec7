"""A trained model with another attention of the same parameters, as Reformer evaluates with other hash rounds."""

import ast
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxformer.training.assembly import example_batch, make_model
from jaxformer.training.config import copy_config
from jaxformer.training.overrides import ConfigError


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """Reads `name` or `name:argument=value,argument=value`, each value a Python literal.

    Raises:
      ConfigError: it cannot be read.
    """
    name, _, rest = text.partition(":")
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not name:
            raise ValueError(text)
        return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"attention must be name:argument=value,argument=value, got {text!r}") from None


def with_attention(config: ConfigDict, params: Any, attention: str, seed: int) -> tuple[nn.Module, Any]:
    """A run's model with another attention, which has the same parameters.

    Args:
      config: the run's, with all values decided.
      params: the run's parameters.
      attention: `name:argument=value,…`; all of its arguments. Of a run whose layers go through several attentions
        in turn, one of them is changed in its place.
      seed: of what the attention draws (rotations, features), which is not the run's own.

    Returns:
      The module and its other variables, drawn anew.

    Raises:
      ConfigError: the attention has other parameters.
      ValueError: the model refuses it.
    """
    name, arguments = parse_attention(attention)
    config = copy_config(config)
    with config.unlocked(), config.ignore_type():
        own = config.model.get("attention")
        if isinstance(own, tuple) and name in own:
            config.model.attention_args[name] = ConfigDict(arguments)
        else:
            config.model.attention = name
            config.model.attention_args = ConfigDict(arguments)
    model = make_model(config)
    example = {name: jnp.asarray(value) for name, value in example_batch(config.data.length, model).items()}
    state = dict(jax.jit(model.init)(jax.random.key(seed), **example))
    other = state.pop("params")
    if jax.tree.map(jnp.shape, other) != jax.tree.map(jnp.shape, params):
        raise ConfigError(f"attention {name!r} has other parameters than the run's {config.model.name}")
    return model, state
