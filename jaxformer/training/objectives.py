"""Objectives: what a model is trained for, as sums over supervised tokens.

An objective is a pure function of a model, its variables and a batch. It returns sums and counts, never means, so that
micro-batches, devices and evaluation batches add up to the exact figure of one big batch. The name-to-function table
``OBJECTIVES`` is the only place where an objective is a string.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import CrossEntropy, chunked_cross_entropy, cross_entropy
from jaxformer.training.auxiliary import (
    SUPERVISED_POSITIONS,
    auxiliary_sums,
    last_targets,
    make_readout,
    token_loss,
    vanishing_weights,
)
from jaxformer.training.masked_objective import masked_language_model_objective
from jaxformer.training.objective_parts import (
    MODEL_INPUTS,
    Objective,
    ObjectiveOutput,
    apply_model,
    auxiliary_figures,
    model_inputs,
    weighted_total,
)
from jaxformer.training.task_objectives import (
    answer_tokens_objective,
    answers_objective,
    classification_objective,
    regression_objective,
    tagging_objective,
)

__all__ = [
    "MODEL_INPUTS",
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "apply_model",
    "language_model_objective",
    "model_inputs",
    "weighted_total",
]


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
    positions: str = "all",
    intermediate_weight: float = 0.0,
    intermediate_steps: int | None = None,
    future_weight: float = 0.5,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Next-token cross-entropy, with the model's own auxiliary losses added.

    The targets come with the batch, already shifted: nothing is shifted here. An auxiliary loss is a mean over tokens,
    summed over layers where it comes as an array; it enters ``loss_sum`` times its weight and the batch's
    ``weight_sum``, so a batch without supervised tokens contributes nothing at all. In evaluation ``loss_sum`` is the
    plain cross-entropy (no smoothing, z-loss or auxiliary loss), whose mean's exponential is the perplexity; auxiliary
    losses are then only reported.

    Three options are those of Al-Rfou et al. 2018, arXiv:1808.04444, section 2, in training only: ``positions``
    supervises the last position alone, as if there were no loss at every one; intermediate layers predict through the
    shared final norm and output head, by weights that vanish (``jaxformer.training.auxiliary.vanishing_weights``); and
    a model with ``num_future_tokens`` predicts the tokens after the next as well, at each layer that predicts. These
    losses are sums over their own supervised tokens, added to ``loss_sum`` and so divided by the number of next tokens:
    micro-batches add up exactly. Memory beside a plain step: one prediction's logits at a time, and, where nothing is
    recomputed, one array [B, L, embed_dim] more for each layer; nothing more with the model's ``remat="full"``. A
    reversible stack then keeps two at each layer; a Universal Transformer must have a fixed number of steps.

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
      positions: which positions training supervises: ``all`` that have a target, or the ``last`` of them in each row
        (of packed rows, in each document).
      intermediate_weight: weight of the intermediate layers' losses at the start; 0 = none.
      intermediate_steps: updates of the whole training, in whose first half these losses vanish.
      future_weight: weight of each token after the next, of a model that predicts any.
      step: updates made so far.

    Returns:
      Sums over the batch's supervised tokens; metrics ``accuracy``, one for each auxiliary loss, one for each figure
      that the model counts, and in training, where they are on, ``next_token_loss`` (the last layer's alone),
      ``intermediate_loss`` (of the next token, mean of the layers that still count, 0 if none does),
      ``intermediate_layers`` (how many count) and ``future_2_loss``, … (of each token after the next, at the last
      layer), in nats per token.

    Raises:
      ValueError: ``loss_weights`` names a loss that the model does not return; or options out of range or that do not
        fit each other or the model.
    """
    num_future = getattr(getattr(model, "config", None), "num_future_tokens", 1) - 1
    _check_options(positions, intermediate_weight, intermediate_steps, future_weight, num_future)
    if not deterministic and positions == "last":
        batch = {**batch, "targets": last_targets(batch["targets"], batch.get("segments"))}
    options: dict[str, Any] = {} if deterministic else {"label_smoothing": label_smoothing, "z_loss": z_loss}
    run = functools.partial(apply_model, model, params, model_state, batch, rng=rng, deterministic=deterministic)
    extra_loss = jnp.zeros(())
    extra_metrics: dict[str, Any] = {}
    if not deterministic and (intermediate_weight or num_future):
        readout, further = None, auxiliary_sums(model, params, batch, chunk_size=chunk_size, options=options)
        if intermediate_weight:
            if step is None:
                raise ValueError("step is None, must be the number of updates made where intermediate layers count")
            assert intermediate_steps is not None
            weights = vanishing_weights(model.config.num_layers, step, intermediate_steps)
            readout = make_readout(further, intermediate_weight * weights, future_weight)
        (hidden, aux), model_state = run(method="hidden", readout=readout)
        sums = _last_layer_sums(model, params, hidden, batch["targets"], chunk_size, options)
        extra_loss, extra_metrics = _extra_losses(sums, aux.readouts, further(hidden, 1), future_weight)
    elif chunk_size is None:
        output, model_state = run()
        aux, sums = output.aux, cross_entropy(output.logits, batch["targets"], **options)
    else:
        (hidden, aux), model_state = run(method="hidden")
        sums = _last_layer_sums(model, params, hidden, batch["targets"], chunk_size, options)
    losses, metrics = auxiliary_figures(aux, sums.weight_sum)
    metrics = {"accuracy": (sums.num_correct, sums.weight_sum), **metrics}
    loss_sum = sums.loss_sum
    if not deterministic:
        loss_sum = loss_sum + sums.z_loss_sum + sums.weight_sum * weighted_total(losses, loss_weights or {})
    if extra_metrics:
        loss_sum, metrics = loss_sum + extra_loss, metrics | extra_metrics
    return ObjectiveOutput(loss_sum, sums.weight_sum, metrics, model_state)


def _extra_losses(
    main: CrossEntropy, readouts: Mapping[str, Array], further: tuple[CrossEntropy, ...], future_weight: float
) -> tuple[Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """What intermediate layers and tokens after the next add to the loss, and their figures."""
    loss, metrics = jnp.zeros(()), {"next_token_loss": (main.loss_sum, main.weight_sum)}
    if readouts:
        totals = {name: value.sum() for name, value in readouts.items()}
        loss = loss + totals["loss"]
        metrics["intermediate_loss"] = (totals["cross_entropy"], totals["tokens"])
        metrics["intermediate_layers"] = (totals["layers"] * main.weight_sum, main.weight_sum)
    for token, sums in enumerate(further, 2):
        loss = loss + future_weight * token_loss(sums)
        metrics[f"future_{token}_loss"] = (sums.loss_sum, sums.weight_sum)
    return loss, metrics


def _check_options(
    positions: str,
    intermediate_weight: float,
    intermediate_steps: int | None,
    future_weight: float,
    num_future: int,
) -> None:
    """Refuses options of the losses that are out of range or do not fit each other."""
    if positions not in SUPERVISED_POSITIONS:
        raise ValueError(f"positions is {positions!r}, must be one of {', '.join(SUPERVISED_POSITIONS)}")
    for name, weight in (("intermediate_weight", intermediate_weight), ("future_weight", future_weight)):
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} is {weight}, must be finite and at least 0")
    if intermediate_weight and (intermediate_steps is None or intermediate_steps < 1):
        raise ValueError(
            f"intermediate_steps is {intermediate_steps}, must be the training's updates, at least 1, with "
            f"intermediate_weight={intermediate_weight}"
        )
    if positions == "last" and num_future:
        raise ValueError(
            f"positions is 'last', must be 'all' with num_future_tokens={num_future + 1}: what follows the last "
            "token's target is unknown"
        )


def _last_layer_sums(
    model: nn.Module, params: Any, hidden: Array, targets: Array, chunk_size: int | None, options: dict[str, Any]
) -> CrossEntropy:
    """The cross-entropy of the final hidden states, whose logits are never whole where a chunk size is given."""
    if chunk_size is None:
        logits: Any = model.apply({"params": params}, hidden, method="head")
        return cross_entropy(logits, targets, **options)
    kernel: Any = model.apply({"params": params}, method="head_kernel")
    return chunked_cross_entropy(
        hidden, kernel, targets, chunk_size=chunk_size, vocab_size=model.config.vocab_size, **options
    )


OBJECTIVES: dict[str, Objective] = {
    "answer_tokens": answer_tokens_objective,
    "answers": answers_objective,
    "classification": classification_objective,
    "language_model": language_model_objective,
    "masked_language_model": masked_language_model_objective,
    "regression": regression_objective,
    "tagging": tagging_objective,
}
