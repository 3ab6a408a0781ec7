"""Objectives: what a model is trained for, as sums over supervised tokens.

An objective is a pure function of a model, its variables and a batch. It returns sums and counts, never means, so that
micro-batches, devices and evaluation batches add up to the exact figure of one big batch. The name-to-function table
``OBJECTIVES`` is the only place where an objective is a string.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import CrossEntropy, chunked_cross_entropy, cross_entropy

MODEL_INPUTS = (
    "tokens",
    "positions",
    "segments",
    "key_mask",
    "source",
    "source_mask",
    "source_positions",
    "source_segments",
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


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Selects what the model's call reads from a batch; targets and weights stay outside the model."""
    return {name: batch[name] for name in MODEL_INPUTS if name in batch}


def apply_model(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None,
    deterministic: bool,
    method: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Runs a model on a batch.

    Args:
      model: a Linen module called with the entries of ``MODEL_INPUTS`` and ``deterministic``.
      params: its parameters.
      model_state: its other variable collections; frozen where ``deterministic``.
      batch: arrays by name.
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      method: of the module, in place of its call.

    Returns:
      The model's output and its state after the batch.
    """
    mutable = [] if deterministic else list(model_state)
    output, new_state = model.apply(
        {"params": params, **model_state},
        **model_inputs(batch),
        deterministic=deterministic,
        rngs=None if rng is None else {"dropout": rng},
        mutable=mutable,
        method=method,
    )
    return output, {**model_state, **new_state}


def language_model_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    loss_weights: Mapping[str, float] | None = None,
) -> ObjectiveOutput:
    """Next-token cross-entropy, with the model's own auxiliary losses added.

    The targets come with the batch, already shifted: nothing is shifted here. An auxiliary loss is a mean over tokens,
    summed over layers where it comes as an array; it enters ``loss_sum`` times its weight and the batch's
    ``weight_sum``, so a batch without supervised tokens contributes nothing at all. In evaluation ``loss_sum`` is the
    plain cross-entropy (no smoothing, z-loss or auxiliary loss), whose mean's exponential is the perplexity; auxiliary
    losses are then only reported.

    Args:
      model: maps tokens to an output with ``logits`` [B, L, V], ``aux.losses`` (name to scalar or [layers]) and
        ``aux.metrics`` (name to a sum and a count, each scalar or [layers]).
      params: the parameters.
      model_state: the model's other variables.
      batch: ``tokens`` and ``targets`` int [B, L] (target -100: not supervised), and where the model uses them
        ``positions``, ``segments``, ``key_mask`` [B, L].
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      label_smoothing: share of the probability spread over the vocabulary, in [0, 1).
      z_loss: weight of the squared log-normaliser.
      chunk_size: tokens of the batch whose logits exist at once, of a model with the methods ``hidden`` and
        ``head_kernel``; None = all. For long rows or large vocabularies: the logits are computed twice, but never whole
        (Kitaev et al. 2020, arXiv:2001.04451, section 3).
      loss_weights: weight of each auxiliary loss by name; a name left out weighs 1.

    Returns:
      Sums over the batch's supervised tokens; metrics ``accuracy``, one for each auxiliary loss, and one for each
      figure that the model counts.

    Raises:
      ValueError: ``loss_weights`` names a loss that the model does not return.
    """
    options: dict[str, Any] = {} if deterministic else {"label_smoothing": label_smoothing, "z_loss": z_loss}
    run = functools.partial(apply_model, model, params, model_state, batch, rng=rng, deterministic=deterministic)
    if chunk_size is None:
        output, model_state = run()
        aux, sums = output.aux, cross_entropy(output.logits, batch["targets"], **options)
    else:
        (hidden, aux), model_state = run(method="hidden")
        sums = _chunked_sums(model, params, hidden, batch["targets"], chunk_size, options)
    losses = {name: jnp.sum(loss) for name, loss in aux.losses.items()}
    metrics = {"accuracy": (sums.num_correct, sums.weight_sum)}
    metrics |= {name: (loss * sums.weight_sum, sums.weight_sum) for name, loss in losses.items()}
    metrics |= {name: (total.sum(), count.sum()) for name, (total, count) in aux.metrics.items()}
    loss_sum = sums.loss_sum
    if not deterministic:
        loss_sum = loss_sum + sums.z_loss_sum + sums.weight_sum * weighted_total(losses, loss_weights or {})
    return ObjectiveOutput(loss_sum, sums.weight_sum, metrics, model_state)


def _chunked_sums(
    model: nn.Module, params: Any, hidden: Array, targets: Array, chunk_size: int, options: dict[str, Any]
) -> CrossEntropy:
    """The cross-entropy of hidden states, whose logits are never whole."""
    kernel: Any = model.apply({"params": params}, method="head_kernel")
    return chunked_cross_entropy(
        hidden, kernel, targets, chunk_size=chunk_size, vocab_size=model.config.vocab_size, **options
    )


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

OBJECTIVES: dict[str, Objective] = {"language_model": language_model_objective}
