"""The second derivatives of a loss through products with vectors: Hessian, Gauss–Newton and their largest eigenvalues.

A product costs about as much as two gradients and stores no matrix; ``jaxformer.analysis.second_order`` shows what
the matrices themselves would cost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float


class Eigenvalues(NamedTuple):
    """Eigenvalues at one end of a symmetric operator's spectrum.

    Attributes:
      values: [k], from the end inwards.
      residuals: [k], bounds of |A u - value u| for the unit vectors u: how far each may be from a true eigenvalue.
      vectors: tree like the parameters, each leaf with a leading axis of k: unit eigenvectors.
    """

    values: Float[Array, "k"]
    residuals: Float[Array, "k"]
    vectors: Any


def hessian_vector_product(loss: Callable[[Any], Array], params: Any, vector: Any) -> Any:
    """The Hessian of ``loss`` at ``params`` times ``vector``: the derivative of the gradient along the vector.

    Forward over reverse mode (Pearlmutter 1994, "Fast Exact Multiplication by the Hessian",
    doi:10.1162/neco.1994.6.1.147).

    Args:
      loss: of a tree of floating arrays, to a scalar.
      params: the tree.
      vector: tree of the same shapes.

    Returns:
      Tree like ``params``.

    Raises:
      ValueError: ``vector`` is not like ``params``.
    """
    _check_like(params, vector)
    return jax.jvp(jax.grad(loss), (params,), (_cast_like(vector, params),))[1]


def gauss_newton_product(outputs: Callable[[Any], Any], loss: Callable[[Any], Array], params: Any, vector: Any) -> Any:
    """The generalised Gauss–Newton matrix times ``vector``: J^T H J v.

    J is the Jacobian of ``outputs`` (parameters to logits, say) and H the Hessian of ``loss`` in the outputs. It
    leaves out the curvature of ``outputs`` itself, so that it has no negative eigenvalue where ``loss`` is convex
    (Schraudolph 2002, "Fast Curvature Matrix-Vector Products", doi:10.1162/08997660260028683). Reverse mode alone
    passes through ``outputs``: J v is the derivative of u -> J^T u, so that hand-written backward rules serve.

    Args:
      outputs: of a tree of floating arrays, to a tree of floating arrays.
      loss: of the outputs, to a scalar.
      params: the tree.
      vector: tree of the same shapes.

    Returns:
      Tree like ``params``.

    Raises:
      ValueError: ``vector`` is not like ``params``.
    """
    _check_like(params, vector)
    made, pull = jax.vjp(outputs, params)
    _, push = jax.vjp(lambda change: pull(change)[0], jax.tree.map(jnp.zeros_like, made))
    (along,) = push(_cast_like(vector, params))
    return pull(hessian_vector_product(loss, made, along))[0]


def top_eigenvalues(
    product: Callable[[Any], Any],
    like: Any,
    k: int = 1,
    *,
    num_steps: int | None = None,
    by_magnitude: bool = False,
    rng: Array | None = None,
) -> Eigenvalues:
    """The k largest eigenvalues of a symmetric operator on trees, by Lanczos with full reorthogonalisation.

    From a random vector, num_steps products span a subspace; the eigenvalues of the operator within it are near the
    true ones at the ends of the spectrum first (Lanczos 1950; Golub and Van Loan, "Matrix Computations", section
    10.1). Each new vector is made orthogonal to all before it, twice, so that no eigenvalue shows up again as a ghost.
    With num_steps = number of parameters all are exact. It stores num_steps vectors. An eigenvalue that occurs
    several times is found that often only with num_steps near the number of parameters.

    Args:
      product: linear and symmetric, of trees like ``like``; it may be traced, as one step of a scan.
      like: tree of floating arrays, which say shapes and dtypes; in float32 at least is computed.
      k: how many, at least 1.
      num_steps: products, from k up; None = 2 k + 30, or the number of parameters where that is smaller.
      by_magnitude: largest absolute value first, in place of largest value first.
      rng: of the first vector; None = ``jax.random.key(0)``.

    Returns:
      The eigenvalues, with their residuals and vectors.

    Raises:
      ValueError: k or num_steps out of range.
    """
    flat, restore = ravel_pytree(like)
    dtype = jnp.promote_types(flat.dtype, jnp.float32)
    steps = min(flat.size, 2 * k + 30) if num_steps is None else num_steps
    if not 1 <= k <= flat.size:
        raise ValueError(f"k is {k}, must be from 1 to the number of parameters, {flat.size}")
    if not k <= steps <= flat.size:
        raise ValueError(f"num_steps is {steps}, must be from k={k} to the number of parameters, {flat.size}")

    def multiply(vector: Float[Array, "P"]) -> Float[Array, "P"]:
        return ravel_pytree(product(restore(vector.astype(flat.dtype))))[0].astype(dtype)

    rng = jax.random.key(0) if rng is None else rng
    basis, diagonal, beside = _lanczos(multiply, flat.size, steps, dtype, rng)
    inner = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values, vectors = jnp.linalg.eigh(inner)
    order = jnp.argsort(-(jnp.abs(values) if by_magnitude else values))[:k]
    residuals = jnp.abs(beside[-1] * vectors[-1, order])
    found = jax.vmap(restore)((vectors[:, order].T @ basis).astype(flat.dtype))
    return Eigenvalues(values[order], residuals, found)


def hessian_eigenvalues(
    loss: Callable[[Any], Array],
    params: Any,
    k: int = 1,
    *,
    num_steps: int | None = None,
    by_magnitude: bool = False,
    rng: Array | None = None,
) -> Eigenvalues:
    """The k largest eigenvalues of the Hessian of ``loss`` at ``params`` (the first is known as sharpness).

    Gradient descent on a quadratic loss diverges along eigenvectors whose eigenvalue is above 2 / rate.

    Args:
      loss: of a tree of floating arrays, to a scalar.
      params: the tree.
      k, num_steps, by_magnitude, rng: as in ``top_eigenvalues``.

    Returns:
      The eigenvalues.

    Raises:
      ValueError: k or num_steps out of range.
    """
    return top_eigenvalues(
        lambda vector: hessian_vector_product(loss, params, vector),
        params,
        k,
        num_steps=num_steps,
        by_magnitude=by_magnitude,
        rng=rng,
    )


def _lanczos(
    multiply: Callable[[Float[Array, "P"]], Float[Array, "P"]], size: int, steps: int, dtype: Any, rng: Array
) -> tuple[Float[Array, "steps P"], Float[Array, "steps"], Float[Array, "steps"]]:
    """Orthonormal vectors, and the operator between them: its diagonal, and beside it (the last leads out of them)."""

    def orthogonal(vector: Float[Array, "P"], basis: Float[Array, "steps P"]) -> Float[Array, "P"]:
        for _ in range(2):  # once leaves rounding errors as large as what it removed
            vector = vector - basis.T @ (basis @ vector)
        return vector

    def unit(vector: Float[Array, "P"]) -> Float[Array, "P"]:
        norm = jnp.linalg.norm(vector)
        return vector / jnp.where(norm > 0, norm, 1)

    def step(carry: tuple[Array, Array, Array], index: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        basis, vector, largest = carry
        basis = basis.at[index].set(vector)
        image = multiply(vector)
        diagonal = vector @ image
        rest = orthogonal(image, basis)
        norm = jnp.linalg.norm(rest)
        largest = jnp.maximum(largest, jnp.linalg.norm(image))
        # The subspace maps into itself: go on from a new direction, to which nothing leads.
        closed = norm <= 10 * jnp.finfo(dtype).eps * largest
        fresh = orthogonal(jax.random.normal(jax.random.fold_in(rng, index), (size,), dtype), basis)
        vector = unit(jnp.where(closed, fresh, rest))
        return (basis, vector, largest), (diagonal, jnp.where(closed, 0, norm))

    first = unit(jax.random.normal(jax.random.fold_in(rng, steps), (size,), dtype))
    start = (jnp.zeros((steps, size), dtype), first, jnp.zeros((), dtype))
    (basis, _, _), (diagonal, beside) = jax.lax.scan(step, start, jnp.arange(steps))
    return basis, diagonal, beside


def _check_like(params: Any, vector: Any) -> None:
    wanted, given = (jax.tree.map(jnp.shape, tree) for tree in (params, vector))
    if wanted != given:
        raise ValueError(f"vector has the shapes {given}, must have those of params, {wanted}")


def _cast_like(vector: Any, params: Any) -> Any:
    return jax.tree.map(lambda leaf, like: jnp.asarray(leaf).astype(jnp.result_type(like)), vector, params)
