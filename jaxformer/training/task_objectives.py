"""Objectives of fine-tuning: classes or numbers of rows, classes of tokens, and answers to questions.

All are sums over examples or tokens that have a label, so that micro-batches add up exactly. In training the model's
own auxiliary losses are added as in ``language_model_objective``; in evaluation they are only reported.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import CrossEntropy, cross_entropy
from jaxformer.training.auxiliary import IGNORED
from jaxformer.training.objective_parts import ObjectiveOutput, apply_model, auxiliary_figures, weighted_total

ANSWER_START, ANSWER_END = 0, 1
"""Places on the last axis of the logits of answers; of ``answer_tokens`` the third is neither."""


def classification_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    label_smoothing: float = 0.0,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Cross-entropy of each row's class.

    Args:
      model: with the head "classification": logits [B, C].
      params: the parameters.
      model_state: the model's other variables.
      batch: what the model reads, and ``labels`` int [B] (-100: none).
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      label_smoothing: share of the probability spread over the classes in training, in [0, 1).
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over rows that have a label; metric ``accuracy``.
    """
    del step
    output, state = apply_model(model, params, model_state, batch, rng=rng, deterministic=deterministic)
    sums = cross_entropy(output.logits, batch["labels"], label_smoothing=0.0 if deterministic else label_smoothing)
    return _finish(sums, {"accuracy": sums.num_correct}, output.aux, state, deterministic, loss_weights)


def regression_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Squared error of each row's number.

    Args:
      model: with the head "regression": numbers [B].
      params: the parameters.
      model_state: the model's other variables.
      batch: what the model reads, ``labels`` real [B] and ``label_mask`` bool [B], True where there is a number.
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over rows that have a number; metric ``absolute_error``.
    """
    del step
    output, state = apply_model(model, params, model_state, batch, rng=rng, deterministic=deterministic)
    given = batch["label_mask"]
    # Chosen before the difference, so that nothing that stands in a row without a number has a gradient.
    error = jnp.where(given, output.logits, 0.0) - jnp.where(given, batch["labels"].astype(output.logits.dtype), 0.0)
    zero = jnp.zeros((), jnp.float32)
    sums = CrossEntropy(jnp.square(error).sum(), given.sum().astype(jnp.float32), zero, zero)
    return _finish(sums, {"absolute_error": jnp.abs(error).sum()}, output.aux, state, deterministic, loss_weights)


def tagging_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    label_smoothing: float = 0.0,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Cross-entropy of the class of each word, at its first token.

    Args:
      model: with the head "tagging": logits [B, L, C].
      params: the parameters.
      model_state: the model's other variables.
      batch: what the model reads, and ``targets`` int [B, L] (-100: no word begins here).
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      label_smoothing: share of the probability spread over the classes in training, in [0, 1).
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over words; metric ``accuracy``.
    """
    del step
    output, state = apply_model(model, params, model_state, batch, rng=rng, deterministic=deterministic)
    sums = cross_entropy(output.logits, batch["targets"], label_smoothing=0.0 if deterministic else label_smoothing)
    return _finish(sums, {"accuracy": sums.num_correct}, output.aux, state, deterministic, loss_weights)


def answers_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Mean of the cross-entropies of where the answer starts and where it ends, among the places that it may have.

    Devlin et al. 2019, arXiv:1810.04805, section 4.2, where all places of a row compete. A row without its answer has
    both at its first token (section 4.3).

    Args:
      model: with the head "answers": logits [B, L, 2], of start and end.
      params: the parameters.
      model_state: the model's other variables.
      batch: what the model reads, ``starts`` and ``ends`` int [B] (places in the row; -100: no row) and ``answer_mask``
        bool [B, L], True where an answer may start or end.
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over rows; metrics ``start_accuracy``, ``end_accuracy`` and ``accuracy`` (both are right), each place being
      the likeliest of all by itself.
    """
    del step
    output, state = apply_model(model, params, model_state, batch, rng=rng, deterministic=deterministic)
    logits = jnp.where(batch["answer_mask"][..., None], output.logits, -jnp.inf)
    starts = cross_entropy(logits[..., ANSWER_START], batch["starts"])
    ends = cross_entropy(logits[..., ANSWER_END], batch["ends"])
    sums = starts._replace(loss_sum=0.5 * (starts.loss_sum + ends.loss_sum))
    return _finish(sums, _answer_figures(logits, batch), output.aux, state, deterministic, loss_weights)


def answer_tokens_objective(
    model: nn.Module,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    rng: jax.Array | None = None,
    deterministic: bool = False,
    loss_weights: Mapping[str, float] | None = None,
    step: jax.Array | int | None = None,
) -> ObjectiveOutput:
    """Cross-entropy of what each token of the context is to the answer: its start, its end, or neither.

    Args:
      model: with the head "answer_tokens": logits [B, L, 3].
      params: the parameters.
      model_state: the model's other variables.
      batch: what the model reads, and ``targets`` int [B, L] (``jaxformer.data.squad.token_targets``; -100 outside the
        context).
      rng: typed PRNG key of the dropout masks; None in evaluation.
      deterministic: True in evaluation.
      loss_weights: weight of each of the model's auxiliary losses by name; a name left out weighs 1.
      step: not read.

    Returns:
      Sums over tokens; metrics ``accuracy``, and ``start_accuracy`` and ``end_accuracy`` over the tokens that are one.
    """
    del step
    output, state = apply_model(model, params, model_state, batch, rng=rng, deterministic=deterministic)
    targets = batch["targets"]
    sums = cross_entropy(output.logits, targets)
    figures: dict[str, Any] = {"accuracy": sums.num_correct}
    likeliest = jnp.argmax(output.logits, axis=-1)
    for name, kind in (("start_accuracy", ANSWER_START), ("end_accuracy", ANSWER_END)):
        wanted = targets == kind
        figures[name] = ((wanted & (likeliest == kind)).sum().astype(jnp.float32), wanted.sum().astype(jnp.float32))
    return _finish(sums, figures, output.aux, state, deterministic, loss_weights)


def _answer_figures(scores: Float[Array, "B L _"], batch: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
    """How often the place of the highest score is the answer's start, its end, and both."""
    real = batch["starts"] != IGNORED
    places = jnp.argmax(scores, axis=1)
    start = real & (places[:, ANSWER_START] == batch["starts"])
    end = real & (places[:, ANSWER_END] == batch["ends"])
    count = real.sum().astype(jnp.float32)
    found = {"accuracy": start & end, "start_accuracy": start, "end_accuracy": end}
    return {name: (right.sum().astype(jnp.float32), count) for name, right in found.items()}


def _finish(
    sums: CrossEntropy,
    figures: Mapping[str, Array | tuple[Array, Array]],
    aux: Any,
    model_state: dict[str, Any],
    deterministic: bool,
    loss_weights: Mapping[str, float] | None,
) -> ObjectiveOutput:
    """The sums with the model's own losses in training; figures without a count are over what is supervised."""
    losses, metrics = auxiliary_figures(aux, sums.weight_sum)
    counted = {name: value if isinstance(value, tuple) else (value, sums.weight_sum) for name, value in figures.items()}
    loss_sum = sums.loss_sum
    if not deterministic:
        loss_sum = loss_sum + sums.weight_sum * weighted_total(losses, loss_weights or {})
    return ObjectiveOutput(loss_sum, sums.weight_sum, {**counted, **metrics}, model_state)
