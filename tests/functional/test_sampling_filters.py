"""The cuts and the penalty against sorting in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import apply_repetition_penalty, min_p_filter, top_k_filter, top_p_filter

MINUS_INFINITY = -np.inf


def order_of(row):
    """Tokens from the most likely on, the first ones of equals first."""
    return np.argsort(-np.asarray(row, np.float64), kind="stable")


def top_k_by_sorting(logits, top_k):
    result = np.full(logits.shape, MINUS_INFINITY)
    for index in np.ndindex(logits.shape[:-1]):
        kept = order_of(logits[index])[:top_k]
        result[index][kept] = logits[index][kept]
    return result


def assert_nucleus(logits, kept, top_p):
    """A row keeps its most likely tokens, as many as reach top_p and no more, up to the rounding of float32 sums."""
    for index in np.ndindex(logits.shape[:-1]):
        row = np.asarray(logits[index], np.float64)
        order, count = order_of(row), kept[index].sum()
        assert set(np.flatnonzero(kept[index])) == set(order[:count])
        reached = np.cumsum(np.exp(row[order] - row.max()) / np.exp(row - row.max()).sum())
        assert reached[count - 1] >= top_p - 2e-6
        assert count == 1 or reached[count - 2] < top_p


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(3, 2, 700)).astype(np.float32) * 3


@pytest.fixture
def tied(logits):
    """Many equal logits, as bfloat16 models give."""
    return np.round(logits)


@pytest.mark.parametrize("top_k", [1, 2, 13, 699, 700, 5000])
def test_top_k_keeps_exactly_the_highest(logits, tied, top_k):
    for values in (logits, tied):
        np.testing.assert_array_equal(top_k_filter(values, top_k), top_k_by_sorting(values, top_k))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, tied, top_p):
    for values in (logits, tied):
        result = np.asarray(top_p_filter(values, top_p))
        kept = result > MINUS_INFINITY
        np.testing.assert_array_equal(result[kept], values[kept])
        assert_nucleus(values, kept, top_p)


def test_top_p_of_one_keeps_everything(logits):
    np.testing.assert_array_equal(top_p_filter(logits, 1.0), logits)


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 1), (0.6, 2), (0.75, 2), (0.76, 3), (1.0, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_edge_of_the_nucleus_is_exact(top_p, count, order):
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])[order]
    kept = top_p_filter(np.log(probabilities).astype(np.float32), top_p) > MINUS_INFINITY
    np.testing.assert_array_equal(kept, probabilities >= np.sort(probabilities)[-count])


@pytest.mark.parametrize(("top_p", "count"), [(0.1, 1), (0.3, 3), (0.301, 4), (0.7, 7), (0.99, 10)])
def test_of_equally_likely_tokens_the_first_make_the_nucleus(top_p, count):
    kept = top_p_filter(np.zeros((2, 10), np.float32), top_p)
    np.testing.assert_array_equal(kept[:, :count], 0)
    np.testing.assert_array_equal(kept[:, count:], MINUS_INFINITY)


def test_the_nucleus_ignores_what_is_excluded_already():
    row = np.array([MINUS_INFINITY, 0, MINUS_INFINITY, 0, 0], np.float32)
    np.testing.assert_array_equal(top_p_filter(row, 0.6), [MINUS_INFINITY, 0, MINUS_INFINITY, 0, MINUS_INFINITY])


def test_huge_logits_have_a_nucleus():
    row = np.array([1000, 999, 0, -3e38, 3e38], np.float32)
    np.testing.assert_array_equal(np.isfinite(top_p_filter(row, 0.9)), [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(np.isfinite(top_p_filter(row[:4], 0.9)), [1, 1, 0, 0])


@pytest.mark.parametrize(("min_p", "count"), [(0.0, 4), (0.19, 4), (0.2, 4), (0.21, 3), (0.5, 2), (0.51, 1), (1.0, 1)])
def test_min_p_keeps_shares_of_the_highest(min_p, count):
    row = np.log([0.15, 0.5, 0.1, 0.25]).astype(np.float32)
    kept = np.isfinite(min_p_filter(row, min_p))
    assert set(np.flatnonzero(kept)) == set(order_of(row)[:count])


@pytest.mark.parametrize("cut", [lambda x: top_k_filter(x, 3), lambda x: top_p_filter(x, 0.8)])
def test_low_precision_logits_keep_their_dtype_and_values(logits, cut):
    low = jnp.asarray(logits, jnp.bfloat16)
    result = cut(low)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result.astype(jnp.float32), cut(low.astype(jnp.float32)))


@pytest.mark.parametrize(
    "cut", [lambda x: top_k_filter(x, 3), lambda x: top_p_filter(x, 0.8), lambda x: min_p_filter(x, 0.1)]
)
def test_jit_and_vmap_change_nothing(tied, cut):
    expected = cut(tied)
    np.testing.assert_array_equal(jax.jit(cut)(tied), expected)
    np.testing.assert_array_equal(jax.vmap(cut)(jnp.asarray(tied)), expected)


def test_the_nucleus_is_found_without_sorting(logits):
    """Sorting a vocabulary of 50,257 takes tens of times as long as the bisection on a CPU."""
    lowered = jax.jit(lambda logits: top_p_filter(logits, 0.9)).lower(logits).as_text()
    assert "sort" not in lowered
    assert "top_k" not in lowered


def test_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([[2.0, -2.0, 0.0, 3.0, MINUS_INFINITY]], np.float32)
    seen = np.array([[1, 1, 1, 0, 1]])
    expected = [[1.25, -3.2, 0.0, 3.0, MINUS_INFINITY]]
    for form in (seen, seen.astype(bool)):
        np.testing.assert_allclose(apply_repetition_penalty(logits, form, 1.6), expected)
    np.testing.assert_array_equal(apply_repetition_penalty(logits, seen, 1.0), logits)
    assert apply_repetition_penalty(logits.astype(np.float16), seen, 1.6).dtype == jnp.float16


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign(logits):
    seen = np.zeros(logits.shape, bool)
    seen[..., ::2] = True
    penalised = apply_repetition_penalty(logits, seen, 1.3)
    assert (penalised < logits)[seen].all()
    np.testing.assert_array_equal(penalised[~seen], logits[~seen])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k_filter(jnp.zeros(3), 0), "top_k is 0"),
        (lambda: top_p_filter(jnp.zeros(3), 0.0), "top_p is 0.0"),
        (lambda: min_p_filter(jnp.zeros(3), 2.0), "min_p is 2.0"),
        (lambda: apply_repetition_penalty(jnp.zeros(3), np.zeros(3, bool), 0.0), "repetition_penalty is 0.0"),
        (lambda: apply_repetition_penalty(jnp.zeros((2, 3)), np.zeros(3, bool), 1.2), r"seen has shape \(3,\)"),
        (lambda: apply_repetition_penalty(jnp.zeros(3), np.zeros(3, np.float32), 1.2), "seen is float32"),
        (lambda: top_p_filter(np.zeros(3, int), 0.5), "logits is int"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
