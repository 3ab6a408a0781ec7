"""The train state: everything that a run carries from one step to the next, as one pytree of arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxformer.training.averaging import averaged_params, start_average
from jaxformer.training.loss_scaling import LossScaling
from jaxformer.training.objectives import model_inputs


class TrainState(flax.struct.PyTreeNode):
    """What a checkpoint holds of the model's side of a run; trees of its shapes or shardings are of this class too.

    Attributes:
      step: int32 scalar: updates done so far, which is the number of the step to come.
      params: the parameters.
      opt_state: the optimizer's state.
      model_state: the model's variables that are not parameters, by collection; often empty.
      rng_data: uint32 data of the PRNG key behind every random draw in training. It never changes: a step folds its
        number into it.
      average: the average of the parameters (``averaging.Average``), where a run keeps one; None = none.
      loss_scale: the scale of the next step's loss (``loss_scaling.LossScale``), where a run has one; None = none.
    """

    step: Any
    params: Any
    opt_state: Any
    model_state: Any
    rng_data: Any
    average: Any = None
    loss_scale: Any = None

    @property
    def evaluation_params(self) -> Any:
        """The parameters that evaluation and generation use: the average where there is one."""
        return self.params if self.average is None else averaged_params(self.average.params, self.params)


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int,
    example_batch: Mapping[str, Any],
    shardings: Any = None,
    *,
    average_decay: Any = None,
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """Draws the state of step 0; its values depend on the seed alone, not on the devices.

    Args:
      model: the Linen module.
      optimizer: the optax transformation.
      seed: integer behind parameters and training randomness, in [0, 2**32).
      example_batch: arrays or their shapes, for the names and dtypes of the model's inputs.
      shardings: tree of shardings like the state; None = the default device.
      average_decay: not None = the state has an average.
      loss_scaling: not None = the state has a loss scale.

    Returns:
      The state, made in place on its devices.

    Raises:
      ValueError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, must be in [0, 2**32)")
    maker = state_maker(model, optimizer, example_batch, average_decay=average_decay, loss_scaling=loss_scaling)
    create = jax.jit(maker, out_shardings=shardings)
    return create(jnp.asarray(seed, jnp.uint32))


def abstract_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    example_batch: Mapping[str, Any],
    *,
    average_decay: Any = None,
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """Returns the state's tree of shapes and dtypes (``jax.ShapeDtypeStruct``), computing nothing."""
    maker = state_maker(model, optimizer, example_batch, average_decay=average_decay, loss_scaling=loss_scaling)
    return jax.eval_shape(maker, jnp.asarray(0, jnp.uint32))


def abstract_params(model: nn.Module, example_batch: Mapping[str, Any]) -> Any:
    """Returns the parameters' tree of shapes and dtypes, which an optimizer's decay mask is made from."""
    return jax.eval_shape(lambda: _init_variables(model, jax.random.key(0), example_batch))["params"]


def state_maker(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    example_batch: Mapping[str, Any],
    *,
    average_decay: Any = None,
    loss_scaling: LossScaling | None = None,
) -> Callable[[jax.Array], TrainState]:
    """Returns the function from a seed (uint32 scalar) to the state of step 0, not jitted."""

    def create(seed: jax.Array) -> TrainState:
        params_rng, training_rng = jax.random.split(jax.random.key(seed))
        variables = dict(_init_variables(model, params_rng, example_batch))
        params = variables.pop("params")
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            model_state=variables,
            rng_data=jax.random.key_data(training_rng),
            average=None if average_decay is None else start_average(params),
            loss_scale=None if loss_scaling is None else loss_scaling.start(),
        )

    return create


def _init_variables(model: nn.Module, rng: jax.Array, example_batch: Mapping[str, Any]) -> Mapping[str, Any]:
    # One row suffices: no parameter's shape depends on the batch size.
    inputs = model_inputs(example_batch)
    row: Any = {name: jnp.zeros((1, *value.shape[1:]), value.dtype) for name, value in inputs.items()}
    return model.init({"params": rng}, **row, deterministic=True)
