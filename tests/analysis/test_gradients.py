"""The gradient checker agrees with what it knows to be right, and points at what was broken on purpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import check_gradients
from jaxformer.analysis.gradients import WHOLE


def tree():
    random = np.random.default_rng(0)
    return {
        "layer": {"kernel": random.standard_normal((3, 5)).astype(np.float32), "bias": jnp.zeros(5)},
        "tokens": jnp.array([0, 2, 1]),
        "empty": jnp.zeros((0, 7)),
    }


def loss(params, product=jnp.matmul):
    made = product(jnp.tanh(params["layer"]["kernel"]), params["layer"]["kernel"].T)[params["tokens"]]
    return (made**2).sum() + jnp.exp(params["layer"]["bias"]).sum()


def broken_product(backward):
    """A matrix product whose backward rule is `backward(left, right, gradient)`."""
    product = jax.custom_vjp(jnp.matmul)
    product.defvjp(lambda left, right: (left @ right, (left, right)), lambda saved, given: backward(*saved, given))
    return product


def right(left, right, given):
    return given @ right.T, left.T @ given


def test_a_right_gradient_passes_with_a_row_for_each_leaf():
    report = check_gradients(loss, tree())
    assert [row.path for row in report.rows] == ["layer/bias", "layer/kernel", WHOLE]
    assert [row.num_probes for row in report.rows] == [8, 8, 3]
    assert report.max_error < 1e-8
    assert report.ok()
    assert not report.narrow_dtypes
    assert report.loss == pytest.approx(float(loss(tree())), rel=1e-6)


def test_a_right_backward_rule_passes():
    assert check_gradients(lambda params: loss(params, broken_product(right)), tree()).ok()


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda left, right, given: (given @ right.T * 1.001, left.T @ given), id="off by a thousandth"),
        pytest.param(lambda left, right, given: (given @ right.T, jnp.zeros_like(right)), id="one argument forgotten"),
        pytest.param(lambda left, right, given: (given @ right.T, (left.T @ given) * jnp.nan), id="NaN"),
    ],
)
def test_a_broken_backward_rule_fails_where_it_is_broken(backward):
    report = check_gradients(lambda params: loss(params, broken_product(backward)), tree())
    errors = {row.path: row.max_error for row in report.rows}
    assert not report.ok()
    assert errors["layer/kernel"] > 1e-4
    assert errors["layer/bias"] < 1e-6
    assert report.summary().splitlines()[-1].startswith("layer/bias")


def test_a_forward_rule_that_strays_from_its_function_fails():
    cube = jax.custom_vjp(lambda x: x**3)
    cube.defvjp(lambda x: (x**3, x), lambda x, given: (2.0 * x * given,))
    assert not check_gradients(lambda x: cube(x).sum(), np.array([0.5, 2.0])).ok(1e-2)


def test_one_wrong_coordinate_is_named():
    wrong = jax.custom_vjp(lambda x: (x**2).sum())
    wrong.defvjp(lambda x: ((x**2).sum(), x), lambda x, given: (2 * x * given * jnp.array([[1.0, 1.0], [1.1, 1.0]]),))
    report = check_gradients(wrong, np.ones((2, 2)), num_directions=0)
    assert report.rows[0].worst == "(1, 0)"
    assert report.rows[0].analytic == pytest.approx(2.2)
    assert report.rows[0].numeric == pytest.approx(2.0)
    assert report.rows[0].median_error < 1e-9


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_the_scale_of_the_loss_makes_no_difference(scale):
    assert check_gradients(lambda params: scale * loss(params), tree(), num_coordinates=2).ok()
    halved = broken_product(lambda left, right, given: (given @ right.T, 0.5 * left.T @ given))
    assert not check_gradients(lambda params: scale * loss(params, halved), tree(), num_coordinates=2).ok(1e-2)


def test_a_gradient_of_zero_is_right_for_a_constant_and_wrong_for_another():
    assert check_gradients(lambda x: 3.0 + 0.0 * x.sum(), np.ones(3)).max_error == 0.0
    assert check_gradients(lambda x: jax.lax.stop_gradient(x**2).sum(), np.ones(3)).max_error == 1.0


def test_float32_inside_is_told():
    report = check_gradients(lambda x: (x.astype(jnp.float32) ** 2).sum().astype(x.dtype), np.ones(3) / 3)
    assert report.narrow_dtypes == ("float32",)
    assert "float32" in report.summary()
    assert not report.ok()


def test_the_callers_precision_is_left_as_it_was():
    check_gradients(lambda x: x.sum(), np.ones(3, np.float32))
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize(
    ("function", "params", "options", "message"),
    [
        (lambda x: x.sum(), np.arange(3), {}, "no floating leaf"),
        (lambda x: x.real.sum(), {"a": np.ones(2, complex)}, {}, "complex leaf 'a'"),
        (lambda x: x, np.ones(2), {}, "float64 scalar"),
        (lambda x: x.sum().astype(jnp.float32), np.ones(2), {}, "float64 scalar"),
        (lambda x: x.sum(), np.ones(2), {"num_directions": 0, "num_coordinates": 0}, "both 0"),
        (lambda x: x.sum(), np.ones(2), {"num_directions": -1}, "num_directions is -1"),
        (lambda x: x.sum(), np.ones(2), {"step_size": 0.0}, "step_size is 0.0"),
    ],
)
def test_what_cannot_be_checked_is_refused(function, params, options, message):
    with pytest.raises(ValueError, match=message):
        check_gradients(function, params, **options)
