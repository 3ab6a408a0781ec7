"""Newton and Gauss–Newton steps with whole matrices, for small problems, and what they would cost for large ones.

Every call compiles its step anew: these are demonstrations, not optimizers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jaxformer.analysis.curvature import gauss_newton_product


@dataclass(frozen=True)
class SecondOrderCost:
    """What one step with a dense curvature matrix costs, beside one of Adam.

    Attributes:
      num_parameters: P.
      matrix_numbers: numbers stored for the matrix, P².
      products: products of the matrix with a vector that make it, P; each costs about two gradients.
      solve_operations: of the factorisation and the substitutions, P³ / 3 + 2 P².
      adam_numbers: numbers that Adam stores, 2 P.
      adam_operations: of Adam's update, about 12 P.
    """

    num_parameters: int
    matrix_numbers: int
    products: int
    solve_operations: int
    adam_numbers: int
    adam_operations: int

    def summary(self) -> str:
        """Two lines: the step's numbers stored, products and operations, and Adam's."""
        return (
            f"second order, {self.num_parameters:,} parameters: {self.matrix_numbers:,} numbers stored "
            f"({4 * self.matrix_numbers / 1e9:.3g} GB in float32), {self.products:,} Hessian-vector products, "
            f"{self.solve_operations:.2e} operations to solve\n"
            f"Adam: {self.adam_numbers:,} numbers stored ({4 * self.adam_numbers / 1e9:.3g} GB), no product, "
            f"{self.adam_operations:.2e} operations"
        )


class SecondOrderStep(NamedTuple):
    """A step and its cost.

    Attributes:
      params: after the step.
      cost: of the step.
    """

    params: Any
    cost: SecondOrderCost


def second_order_cost(num_parameters: int) -> SecondOrderCost:
    """What one Newton step costs for a model of this size; for GPT-2's 124 million: 62 petabytes.

    Args:
      num_parameters: P, at least 1.

    Raises:
      ValueError: it is below 1.
    """
    if num_parameters < 1:
        raise ValueError(f"num_parameters is {num_parameters}, must be at least 1")
    count = int(num_parameters)
    return SecondOrderCost(
        num_parameters=count,
        matrix_numbers=count**2,
        products=count,
        solve_operations=count**3 // 3 + 2 * count**2,
        adam_numbers=2 * count,
        adam_operations=12 * count,
    )


def newton_step(
    loss: Callable[[Any], Array], params: Any, *, damping: float = 0.0, max_parameters: int = 2000
) -> SecondOrderStep:
    """One step of Newton's method: params - (H + damping I)^-1 gradient.

    On a quadratic loss with an invertible Hessian it lands on the stationary point, whichever kind that is: on a
    saddle's too, unless ``damping`` exceeds the most negative eigenvalue's size (then it goes downhill).

    Args:
      loss: of a tree of floating arrays, to a scalar.
      params: the tree.
      damping: added to the diagonal, at least 0, in units of the loss per square unit of the parameters.
      max_parameters: refuse more than these, before anything is computed.

    Returns:
      The parameters after the step, and its cost.

    Raises:
      ValueError: too many parameters (the message has the cost), or negative damping.
    """
    flat, restore = _small(params, damping, max_parameters)

    def of_vector(vector: Float[Array, "P"]) -> Array:
        return loss(restore(vector))

    def step(vector: Float[Array, "P"]) -> Float[Array, "P"]:
        return _solve(jax.hessian(of_vector)(vector), jax.grad(of_vector)(vector), vector, damping)

    return SecondOrderStep(restore(jax.jit(step)(flat)), second_order_cost(flat.size))


def gauss_newton_step(
    outputs: Callable[[Any], Any],
    loss: Callable[[Any], Array],
    params: Any,
    *,
    damping: float = 0.0,
    max_parameters: int = 2000,
) -> SecondOrderStep:
    """One step with the generalised Gauss–Newton matrix: params - (J^T H J + damping I)^-1 gradient.

    With a convex loss it always goes downhill, at first. With outputs linear in the parameters it is Newton's step;
    with a squared error and damping it is Levenberg's and Marquardt's.

    Args:
      outputs: of a tree of floating arrays, to a tree of floating arrays.
      loss: of the outputs, to a scalar.
      params: the tree.
      damping: added to the diagonal, at least 0; needed where there are more parameters than outputs.
      max_parameters: refuse more than these, before anything is computed.

    Returns:
      The parameters after the step, and its cost.

    Raises:
      ValueError: too many parameters (the message has the cost), or negative damping.
    """
    flat, restore = _small(params, damping, max_parameters)

    def of_vector(vector: Float[Array, "P"]) -> Any:
        return outputs(restore(vector))

    def step(vector: Float[Array, "P"]) -> Float[Array, "P"]:
        unit_vectors = jnp.eye(flat.size, dtype=flat.dtype)
        matrix = jax.vmap(lambda unit: gauss_newton_product(of_vector, loss, vector, unit))(unit_vectors)
        return _solve(matrix, jax.grad(lambda vector: loss(of_vector(vector)))(vector), vector, damping)

    return SecondOrderStep(restore(jax.jit(step)(flat)), second_order_cost(flat.size))


def _small(params: Any, damping: float, max_parameters: int) -> tuple[Float[Array, "P"], Callable[[Array], Any]]:
    if damping < 0.0:
        raise ValueError(f"damping is {damping}, must be at least 0")
    count = sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(params))
    if count > max_parameters:
        cost = second_order_cost(count).summary()
        raise ValueError(f"params has {count} numbers, must have at most max_parameters={max_parameters}: {cost}")
    return ravel_pytree(params)


def _solve(
    matrix: Float[Array, "P P"], gradient: Float[Array, "P"], vector: Float[Array, "P"], damping: float
) -> Float[Array, "P"]:
    return vector - jnp.linalg.solve(matrix + damping * jnp.eye(vector.size, dtype=vector.dtype), gradient)
