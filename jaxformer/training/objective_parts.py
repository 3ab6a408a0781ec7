"""What objectives are made of: what they return, how they run a model, and the model's own losses beside theirs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MODEL_INPUTS: tuple[str, ...] = (
    "tokens",
    "positions",
    "segments",
    "key_mask",
    "source",
    "source_mask",
    "source_positions",
    "source_segments",
    "token_types",
)
"""The entries of a batch that a model reads, under the names of its call's arguments."""


class ObjectiveOutput(NamedTuple):
    """What one batch contributes to a step.

    Attributes:
      loss_sum: float32 scalar to differentiate: summed over supervised tokens, not averaged.
      weight_sum: float32 scalar: how many supervised tokens (their weights' sum) stand behind ``loss_sum``.
      metrics: name to (sum, count), each a float32 scalar; a figure is sum / count over all batches seen.
      model_state: the model's variables that are not parameters, after the batch.
    """

    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    metrics: dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
    model_state: dict[str, Any]


def model_inputs(batch: Mapping[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """Selects what a model's call reads from a batch; targets and weights stay outside the model.

    Args:
      batch: arrays by name.
      model: which model; one that does not tell two types of tokens apart is given none.
    """
    names = MODEL_INPUTS
    if model is not None and getattr(getattr(model, "config", None), "num_token_types", 0) < 2:
        names = tuple(name for name in names if name != "token_types")
    return {name: batch[name] for name in names if name in batch}


def apply_model(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None,
    deterministic: bool,
    method: str | Callable | None = None,
    readout: Callable | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Runs a model on a batch.

    Args:
      model: a Linen module called with the entries of ``MODEL_INPUTS`` and ``deterministic``.
      params: its parameters.
      model_state: its other variable collections; frozen where ``deterministic``.
      batch: arrays by name.
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      method: of the module, in place of its call; or a function of the module and what its call takes.
      readout: of a method that takes one: what is called with every layer's output.

    Returns:
      The model's output and its state after the batch.
    """
    mutable = [] if deterministic else list(model_state)
    output, new_state = model.apply(
        {"params": params, **model_state},
        **model_inputs(batch, model),
        deterministic=deterministic,
        rngs=None if rng is None else {"dropout": rng},
        mutable=mutable,
        method=method,
        **({} if readout is None else {"readout": readout}),
    )
    return output, {**model_state, **new_state}


def auxiliary_figures(
    aux: Any, weight_sum: Float[Array, ""]
) -> tuple[dict[str, Array], dict[str, tuple[Array, Array]]]:
    """The model's own losses by name, summed over layers, and the figures of these and of what else it counts.

    Args:
      aux: the model's ``aux``, with ``losses`` (name to scalar or [layers]) and ``metrics`` (name to a sum and a count,
        each scalar or [layers]).
      weight_sum: of the batch, the count that stands behind each loss.
    """
    losses = {name: jnp.sum(loss) for name, loss in aux.losses.items()}
    metrics = {name: (loss * weight_sum, weight_sum) for name, loss in losses.items()}
    return losses, metrics | {name: (total.sum(), count.sum()) for name, (total, count) in aux.metrics.items()}


def weighted_total(losses: Mapping[str, jax.Array], loss_weights: Mapping[str, float]) -> Float[Array, ""]:
    """Adds named auxiliary losses, each times its weight (1 where none is given).

    Raises:
      ValueError: a weight's name is not among the losses.
    """
    unknown = sorted(set(loss_weights) - set(losses))
    if unknown:
        raise ValueError(f"loss_weights names {unknown}, but the model returns the losses {sorted(losses)}")
    total = jnp.zeros((), jnp.float32)
    for name, loss in losses.items():
        total = total + loss_weights.get(name, 1.0) * loss
    return total


Objective = Callable[..., ObjectiveOutput]
