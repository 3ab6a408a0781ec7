"""The count of matrix products in a program, by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.analysis import compiled_cost, count_matmul_operations

LEFT, RIGHT = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 5), jnp.float32)
ONE = 2 * 3 * 5 * 5


def repeated(left, right):
    def body(state, _):
        return jnp.tanh(state @ right), None

    return jax.lax.scan(jax.checkpoint(body), left, length=7)[0]


@jax.custom_vjp
def product(left, right):
    return left @ right


product.defvjp(lambda left, right: (left @ right, (left, right)), lambda saved, d: (d @ saved[1].T, saved[0].T @ d))


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda left, right: left @ right, 1),
        (lambda left, right: left + right[:3], 0),
        (repeated, 7),
        # The first pass, its recomputation and two gradients.
        (lambda left, right: jax.grad(lambda *both: repeated(*both).sum(), (0, 1))(left, right), 28),
        (lambda left, right: jax.grad(lambda *both: product(*both).sum(), (0, 1))(left, right), 3),
        (lambda left, right: jax.jit(jnp.matmul)(left, right) @ right, 2),
        (lambda left, right: jax.vmap(lambda row: row @ right)(left), 1),
        (lambda left, right: jax.lax.cond(left.sum() > 0, lambda: left @ right @ right, lambda: left @ right), 2),
        (lambda left, right: jax.lax.fori_loop(0, 4, lambda _, state: state @ right, left), 4),
        (lambda left, right: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, left), 0),
    ],
    ids=["one", "none", "scan", "checkpoint", "custom_vjp", "jit", "vmap", "cond", "fori", "while"],
)
def test_products_are_counted_as_often_as_they_run(function, products):
    assert count_matmul_operations(function, LEFT, RIGHT) == products * ONE


def test_batches_and_several_inner_axes():
    left, right = (jax.ShapeDtypeStruct((2, 3, 5, 7), jnp.float32), jax.ShapeDtypeStruct((2, 5, 7, 11), jnp.float32))
    count = count_matmul_operations(lambda left, right: jnp.einsum("bijk,bjkm->bim", left, right), left, right)
    assert count == 2 * 2 * 3 * 5 * 7 * 11


def test_loops_of_unknown_length_and_other_products_are_refused():
    with pytest.raises(ValueError, match="number of steps is unknown"):
        count_matmul_operations(
            lambda left, right: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ right, left), LEFT, RIGHT
        )
    image = jax.ShapeDtypeStruct((1, 2, 9), jnp.float32)
    with pytest.raises(ValueError, match="conv_general_dilated"):
        count_matmul_operations(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"), image, image)


def test_compiled_cost_is_the_compilers():
    cost = compiled_cost(lambda left, right: left @ right, LEFT, RIGHT)
    assert cost.operations == ONE
    assert cost.moved_bytes == 4 * (15 + 25 + 15)
    assert cost.temporary_bytes >= 0
