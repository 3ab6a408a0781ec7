"""The train step and the evaluation step: pure functions of state and batch, jitted once by their caller."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxformer.functional import mean_loss
from jaxformer.training.averaging import check_average_decay, update_average
from jaxformer.training.loss_scaling import LossScaling, next_scale, overflowed, unscale
from jaxformer.training.objectives import Objective, ObjectiveOutput
from jaxformer.training.schedules import Schedule
from jaxformer.training.state import TrainState

Batch = Mapping[str, Any]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    model: nn.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    accumulation_steps: int = 1,
    average_decay: Any = None,
    loss_scaling: LossScaling | None = None,
) -> TrainStep:
    """Builds ``train_step(state, batch) -> (state, metrics)``: one update of the parameters.

    The gradient is that of the loss summed over all supervised tokens of the step, divided by their number over the
    whole step, whatever the number of micro-batches (dropout masks aside, which differ by micro-batch). A step whose
    loss or gradient is not finite changes nothing but the step's number, and reports ``skipped`` = 1: the state stays
    good, and the caller goes on or stops as it likes.

    Args:
      model: the Linen module.
      objective: a function like those in ``OBJECTIVES``; it is given the step's number, for losses that change with it.
      optimizer: optax transformation; its ``update`` receives ``step`` as an extra argument.
      schedule: the learning rate of a step, for the report: the same as the optimizer's.
      accumulation_steps: micro-batches per step; it divides the number of rows.
      average_decay: of the average of the parameters (``averaging``), which a state made with the same has; skipped
        steps don't enter it. None = none.
      loss_scaling: of the gradient (``loss_scaling``), for a state made with the same. None = none.

    Returns:
      The pure function. Metrics are float32 scalars: ``loss`` (per token), ``loss_sum``, ``weight_sum`` (tokens),
      ``gradient_norm`` (before clipping), ``learning_rate``, ``skipped``, and the objective's own as means; where the
      loss is scaled also ``loss_scale`` (used in this step) and ``overflowed`` (1 where the step was skipped because
      of a scale that is now halved).

    Raises:
      ValueError: ``accumulation_steps`` is below 1 or (in the step) does not divide the rows; ``average_decay`` is out
        of range.
    """
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps is {accumulation_steps}, must be at least 1")
    check_average_decay(average_decay)
    update = optax.with_extra_args_support(optimizer).update

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng_data), state.step)
        gradients, output = accumulate(model, objective, state, batch, rng, accumulation_steps)
        if loss_scaling is not None:
            gradients = unscale(gradients, state.loss_scale.scale)
        metrics = step_metrics(output, gradients)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
        per_token = mean_loss(jnp.ones((), jnp.float32), output.weight_sum)

        def take(state: TrainState, gradients: Any) -> TrainState:
            gradients = jax.tree.map(lambda leaf: leaf * per_token.astype(leaf.dtype), gradients)
            updates, opt_state = update(gradients, state.opt_state, state.params, step=state.step)
            params = optax.apply_updates(state.params, updates)
            average = state.average
            if average_decay is not None:
                average = update_average(average, params, average_decay)
            return state.replace(params=params, opt_state=opt_state, model_state=output.model_state, average=average)

        # A branch, not a select: selecting between old and new values doubles the cost of the update on a CPU.
        state = jax.lax.cond(finite, take, lambda state, _: state, state, gradients)
        metrics["learning_rate"] = schedule(state.step)
        metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
        if loss_scaling is not None:
            state, figures = _rescale(state, loss_scaling, metrics, finite)
            metrics |= figures
        return state.replace(step=state.step + 1), metrics

    return train_step


def _rescale(
    state: TrainState, scaling: LossScaling, metrics: dict[str, jax.Array], finite: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state with the loss scale of the next step, and the figures of this one's."""
    used, over = state.loss_scale, jnp.zeros((), bool)
    if scaling.growth_steps is not None:
        over = overflowed(used, metrics["loss"], metrics["gradient_norm"])
        state = state.replace(loss_scale=next_scale(used, scaling, over, finite))
    return state, {"loss_scale": used.scale, "overflowed": over.astype(jnp.float32)}


def make_eval_step(model: nn.Module, objective: Objective) -> Callable[[Any, Any, Batch], dict[str, jax.Array]]:
    """Builds ``eval_step(params, model_state, batch) -> sums`` without dropout and with the model's state frozen.

    Returns:
      The pure function. Its float32 scalars add over batches: ``loss_sum``, ``weight_sum``, and ``<name>_sum``,
      ``<name>_count`` for each of the objective's metrics.
    """

    def eval_step(params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        output = objective(model, params, model_state, batch, rng=None, deterministic=True)
        sums = {"loss_sum": output.loss_sum, "weight_sum": output.weight_sum}
        for name, (total, count) in output.metrics.items():
            sums |= {f"{name}_sum": total, f"{name}_count": count}
        return sums

    return eval_step


def jit_train_step(train_step: TrainStep, state_shardings: Any = None) -> TrainStep:
    """Jits a train step for a whole run: it donates the state and gives it back laid out as it came.

    Args:
      train_step: from ``make_train_step``.
      state_shardings: tree of shardings like the state; None = one device.

    Returns:
      The compiled-on-first-call function. The state passed to it can not be used again.
    """
    if state_shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, None))


def accumulate(
    model: nn.Module, objective: Objective, state: TrainState, batch: Batch, rng: jax.Array, accumulation_steps: int
) -> tuple[Any, ObjectiveOutput]:
    """Sums gradients and objective over the micro-batches of a step, by a scan that traces the model once.

    The gradients are those of the scaled loss, where the state has a loss scale.
    """
    scale = None if state.loss_scale is None else state.loss_scale.scale

    def loss_and_output(params, model_state, micro_batch, micro_rng):
        output = objective(model, params, model_state, micro_batch, rng=micro_rng, deterministic=False, step=state.step)
        return output.loss_sum if scale is None else output.loss_sum * scale, output

    gradient = jax.grad(loss_and_output, has_aux=True)
    if accumulation_steps == 1:
        return gradient(state.params, state.model_state, batch, jax.random.fold_in(rng, 0))

    def body(carry, inputs):
        total, model_state = carry
        index, micro_batch = inputs
        gradients, output = gradient(state.params, model_state, micro_batch, jax.random.fold_in(rng, index))
        total = jax.tree.map(lambda left, right: left + right.astype(left.dtype), total, gradients)
        return (total, output.model_state), output._replace(model_state={})

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(jnp.float32, leaf.dtype)), state.params)
    micro_batches = split_rows(batch, accumulation_steps)
    indices = jnp.arange(accumulation_steps)
    (gradients, model_state), outputs = jax.lax.scan(body, (zeros, state.model_state), (indices, micro_batches))
    summed = jax.tree.map(lambda leaf: leaf.sum(0), outputs)
    return gradients, summed._replace(model_state=model_state)


def split_rows(batch: Batch, num_parts: int) -> dict[str, jax.Array]:
    """Splits the rows [B, ...] of a batch into micro-batches [num_parts, B / num_parts, ...].

    Part i holds rows i, i + num_parts, ...: rows that lie together on one device are dealt out evenly, so that no row
    moves between devices and every device works on every micro-batch.

    Raises:
      ValueError: ``num_parts`` does not divide B.
    """

    def split(rows):
        if rows.shape[0] % num_parts:
            raise ValueError(f"accumulation_steps is {num_parts}, must divide the batch's {rows.shape[0]} rows")
        return jnp.swapaxes(jnp.reshape(rows, (-1, num_parts, *rows.shape[1:])), 0, 1)

    return jax.tree.map(split, dict(batch))


def step_metrics(output: ObjectiveOutput, gradients: Any) -> dict[str, jax.Array]:
    """Divides a step's sums by their counts (0 where nothing is counted); gradients come in summed over tokens."""
    metrics = {
        "loss": mean_loss(output.loss_sum, output.weight_sum),
        "loss_sum": output.loss_sum,
        "weight_sum": output.weight_sum,
        "gradient_norm": mean_loss(optax.tree.norm(gradients), output.weight_sum),
    }
    return metrics | {name: mean_loss(*sums) for name, sums in output.metrics.items()}
