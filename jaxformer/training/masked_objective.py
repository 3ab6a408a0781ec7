"""Masked language modelling: cross-entropy of the chosen tokens, with next-sentence prediction beside it."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional import CrossEntropy, cross_entropy, mean_loss
from jaxformer.models.block import BlockInputs, real_tokens
from jaxformer.training.auxiliary import IGNORED
from jaxformer.training.objective_parts import ObjectiveOutput, apply_model, auxiliary_figures, weighted_total


def masked_language_model_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    next_sentence_weight: float = 1.0,
    predictions_per_row: int | None = None,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Cross-entropy of the tokens chosen to be predicted, with that of the next sentence added.

    Devlin et al. 2019, "BERT", arXiv:1810.04805, section 3.1 (the sum of both means); without next sentences Liu et al.
    2019, "RoBERTa", arXiv:1907.11692. ``loss_sum`` is a sum over chosen tokens, so micro-batches add up exactly. The
    next-sentence loss is a mean over rows that enters as the model's auxiliary losses do: times its weight and the
    batch's ``weight_sum``; in micro-batches each has its own mean. In evaluation ``loss_sum`` is the plain
    cross-entropy of the chosen tokens, and all else is reported only.

    Args:
      model: maps tokens to an output with ``logits`` [B, L, V], ``aux`` and, where it predicts next sentences,
        ``next_sentence`` [B, 2].
      params: the parameters.
      model_state: the model's other variables.
      batch: ``tokens`` and ``targets`` int [B, L] (-100: not chosen), what the model reads besides, and of pairs of
        sentences ``next_sentence`` int [B] (0: it follows, 1: it is random, -100: no row).
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      label_smoothing: share of the probability spread over the vocabulary, in [0, 1).
      z_loss: weight of the squared log-normaliser.
      next_sentence_weight: weight of the next-sentence loss.
      predictions_per_row: places of a row at which logits are computed, of a model with the methods ``hidden`` and
        ``head``; None = all L. The loss is the same: a batch in which a row has more chosen tokens is computed at all
        places (recomputed in the backward pass).
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over the chosen tokens; metrics ``accuracy``, ``next_sentence_loss`` and ``next_sentence_accuracy`` over rows
      where there are such, one for each auxiliary loss, and one for each figure that the model counts.

    Raises:
      ValueError: an option is out of range, or the model predicts next sentences and the batch has none.
    """
    del step
    if not 0.0 <= next_sentence_weight < math.inf:
        raise ValueError(f"next_sentence_weight is {next_sentence_weight}, must be finite and at least 0")
    if predictions_per_row is not None and predictions_per_row < 1:
        raise ValueError(f"predictions_per_row is {predictions_per_row}, must be at least 1, or None")
    options: dict[str, Any] = {} if deterministic else {"label_smoothing": label_smoothing, "z_loss": z_loss}
    run = functools.partial(apply_model, model, params, model_state, batch, rng=rng, deterministic=deterministic)
    if predictions_per_row is None:
        output, model_state = run()
        aux, pair = output.aux, getattr(output, "next_sentence", None)
        sums = cross_entropy(output.logits, batch["targets"], **options)
    else:
        (hidden, aux, pair), model_state = run(method=_hidden_and_next_sentence)
        sums = _chosen_sums(model, params, hidden, batch["targets"], predictions_per_row, options)
    losses, metrics = auxiliary_figures(aux, sums.weight_sum)
    metrics = {"accuracy": (sums.num_correct, sums.weight_sum), **metrics}
    total = weighted_total(losses, loss_weights or {})
    if pair is not None:
        if "next_sentence" not in batch:
            raise ValueError("the model has next_sentence=True, but the data say of no row which sentence is next")
        pairs = cross_entropy(pair, batch["next_sentence"])
        total = total + next_sentence_weight * mean_loss(pairs.loss_sum, pairs.weight_sum)
        metrics["next_sentence_loss"] = (pairs.loss_sum, pairs.weight_sum)
        metrics["next_sentence_accuracy"] = (pairs.num_correct, pairs.weight_sum)
    loss_sum = sums.loss_sum
    if not deterministic:
        loss_sum = loss_sum + sums.z_loss_sum + sums.weight_sum * total
    return ObjectiveOutput(loss_sum, sums.weight_sum, metrics, model_state)


def _hidden_and_next_sentence(module: Any, *args: Any, **inputs: Any) -> tuple[Array, Any, Array | None]:
    """Final hidden states, the stack's ``BlockAux``, and the logits of the next sentence where a model has any."""
    hidden, aux = module.hidden(*args, **inputs)
    if not module.config.next_sentence:
        return hidden, aux, None
    real = real_tokens(BlockInputs(segments=inputs.get("segments"), key_mask=inputs.get("key_mask")))
    return hidden, aux, module.sentence_head(hidden, real)


def _chosen_sums(
    model: nn.Module,
    params: Any,
    hidden: Float[Array, "B L D"],
    targets: Int[Array, "B L"],
    count: int,
    options: dict[str, Any],
) -> CrossEntropy:
    """The cross-entropy of the chosen tokens, with logits at so many places of each row, or at all if they need it."""

    def sums(params: Any, hidden: Array, targets: Array) -> CrossEntropy:
        logits: Any = model.apply({"params": params}, hidden, method="head")
        return cross_entropy(logits, targets, **options)

    if count >= targets.shape[1]:
        return sums(params, hidden, targets)
    chosen = targets != IGNORED
    places = jnp.argsort(~chosen, axis=1, stable=True)[:, :count]

    def at_places(params: Any, hidden: Array, targets: Array) -> CrossEntropy:
        taken = jnp.take_along_axis(hidden, places[..., None], axis=1)
        return sums(params, taken, jnp.take_along_axis(targets, places, axis=1))

    # Recomputed: else a branch that is not taken would fill its whole logits with zeros for the backward pass.
    everywhere = jax.checkpoint(sums)
    return jax.lax.cond(chosen.sum(1).max() <= count, at_places, everywhere, params, hidden, targets)
