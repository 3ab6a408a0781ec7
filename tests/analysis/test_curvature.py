"""Curvature against the dense Hessian and numpy's eigenvalues; second-order steps against what algebra says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxformer.analysis import (
    gauss_newton_product,
    gauss_newton_step,
    hessian_eigenvalues,
    hessian_vector_product,
    newton_step,
    second_order_cost,
    top_eigenvalues,
)

X = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
LABELS = np.arange(9) % 4


def params_of(seed=1):
    random = np.random.default_rng(seed)
    return {
        "in": random.standard_normal((3, 5)).astype(np.float32),
        "out": {"kernel": random.standard_normal((5, 4)).astype(np.float32), "bias": np.zeros(4, np.float32)},
    }


def outputs(params):
    return jnp.tanh(X @ params["in"]) @ params["out"]["kernel"] + params["out"]["bias"][None]


def cross_entropy(logits):
    return -jax.nn.log_softmax(logits)[jnp.arange(9), LABELS].mean()


def loss(params):
    return cross_entropy(outputs(params))


@functools.cache
def dense_hessian():
    flat, restore = ravel_pytree(params_of())
    return np.asarray(jax.jit(jax.hessian(lambda vector: loss(restore(vector))))(flat), np.float64)


def test_products_are_those_of_the_dense_matrices():
    params, vector = params_of(), params_of(2)
    flat, restore = ravel_pytree(params)

    @jax.jit
    def compute(params, vector):
        jacobian = jax.jacobian(lambda vector: outputs(restore(vector)).ravel())(flat)
        inner = jax.hessian(lambda logits: cross_entropy(logits.reshape(9, 4)))(outputs(params).ravel())
        products = (
            hessian_vector_product(loss, params, vector),
            gauss_newton_product(outputs, cross_entropy, params, vector),
        )
        return jacobian, inner, products

    jacobian, inner, products = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), compute(params, vector))
    along = np.asarray(ravel_pytree(vector)[0], np.float64)
    for found, wanted in zip(products, (dense_hessian() @ along, jacobian.T @ inner @ jacobian @ along)):
        np.testing.assert_allclose(ravel_pytree(found)[0], wanted, rtol=1e-4, atol=1e-5)


def test_products_pass_through_hand_written_backward_rules():
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, given: (2 * x * given,))
    point, vector = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])
    found = hessian_vector_product(lambda x: (square(x) * x).sum(), point, vector)
    np.testing.assert_allclose(found, 6 * point * vector, rtol=1e-6)
    found = gauss_newton_product(square, lambda made: (made**2).sum(), point, vector)
    np.testing.assert_allclose(found, 2 * (2 * point) ** 2 * vector, rtol=1e-6)


def test_lanczos_finds_the_eigenvalues_of_the_dense_hessian():
    values, vectors = np.linalg.eigh(dense_hessian())
    found = jax.jit(lambda params: hessian_eigenvalues(loss, params, 3))(params_of())
    np.testing.assert_allclose(found.values, values[::-1][:3], rtol=1e-4)
    assert np.all(np.asarray(found.residuals) < 1e-3)
    leaves = [np.asarray(leaf).reshape(3, -1) for leaf in jax.tree.leaves(found.vectors)]
    np.testing.assert_allclose(np.abs((np.concatenate(leaves, 1) * vectors[:, ::-1][:, :3].T).sum(1)), 1.0, atol=1e-3)


@pytest.mark.parametrize(
    "values", [[4.0, 3.0, 3.0, 1.0, 0.0, -7.0], [2.0] * 6], ids=["one value twice", "one value alone"]
)
def test_all_steps_give_the_whole_spectrum_where_it_repeats(values):
    """Lanczos comes to an end in a subspace there, and goes on from a new direction."""
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
    matrix = jnp.asarray(turn @ np.diag(values) @ turn.T, jnp.float32)
    all_values, by_magnitude, few = spectra(matrix)
    np.testing.assert_allclose(all_values.values, sorted(values, reverse=True), atol=1e-5)
    np.testing.assert_allclose(by_magnitude.values[0], max(values, key=abs), atol=1e-5)
    assert float(few.values[0]) <= max(values) + 1e-5
    off = np.abs(np.asarray(values) - float(few.values[0])).min()
    assert off <= float(few.residuals[0]) + 1e-5


@jax.jit
def spectra(matrix):
    def product(vector):
        return matrix @ vector

    like = jnp.zeros(6)
    return (
        top_eigenvalues(product, like, 6),
        top_eigenvalues(product, like, 1, by_magnitude=True),
        top_eigenvalues(product, like, 1, num_steps=2, rng=jax.random.key(3)),
    )


def test_newton_lands_on_the_stationary_point_of_a_quadratic_and_on_a_saddle_too():
    matrix, start = np.array([[3.0, 1.0], [1.0, -2.0]], np.float32), jnp.array([7.0, -5.0])

    def quadratic(params):
        return 0.5 * params["a"] @ matrix @ params["a"] + params["a"].sum()

    found = newton_step(quadratic, {"a": start}).params["a"]
    np.testing.assert_allclose(found, -np.linalg.solve(matrix, np.ones(2)), atol=1e-5)
    damped = newton_step(quadratic, {"a": start}, damping=4.0).params["a"]
    wanted = start - np.linalg.solve(matrix + 4.0 * np.eye(2), matrix @ start + 1.0)
    np.testing.assert_allclose(damped, wanted, atol=1e-5)


def test_gauss_newton_solves_least_squares_at_once_and_goes_downhill_elsewhere():
    target = X @ np.array([1.0, -2.0, 0.5], np.float32)
    found = gauss_newton_step(lambda w: X @ w, lambda made: ((made - target) ** 2).sum(), jnp.zeros(3))
    np.testing.assert_allclose(found.params, [1.0, -2.0, 0.5], atol=1e-5)
    params = params_of()
    after = gauss_newton_step(outputs, cross_entropy, params, damping=0.1).params
    compiled = jax.jit(loss)
    assert compiled(after) < 0.7 * compiled(params)


def test_the_cost_says_why_second_order_is_for_small_problems():
    cost = second_order_cost(1_000)
    assert (cost.matrix_numbers, cost.products, cost.adam_numbers) == (10**6, 1_000, 2_000)
    assert cost.solve_operations == 10**9 // 3 + 2 * 10**6
    assert newton_step(lambda x: (x**2).sum(), jnp.ones(3)).cost == second_order_cost(3)
    assert "6.19e+07 GB" in second_order_cost(124_439_808).summary()
    with pytest.raises(ValueError, match="at most max_parameters=10: second order, 39 parameters: 1,521 numbers"):
        newton_step(loss, params_of(), max_parameters=10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hessian_vector_product(loss, params_of(), {"in": np.ones(3)}), "vector has the shapes"),
        (lambda: top_eigenvalues(lambda v: v, jnp.ones(3), 4), "k is 4"),
        (lambda: top_eigenvalues(lambda v: v, jnp.ones(3), 2, num_steps=1), "num_steps is 1"),
        (lambda: newton_step(loss, params_of(), damping=-1.0), "damping is -1.0"),
        (lambda: second_order_cost(0), "num_parameters is 0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
