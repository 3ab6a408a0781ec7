"""One vector for a row: against loops over rows, wherever the padding is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import POOLINGS, pool_tokens

MASK = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]], bool)


def _pooled_by_hand(hidden, mask, pooling):
    rows = []
    for row, real in zip(np.float64(hidden), mask):
        kept = [vector for vector, exists in zip(row, real) if exists]
        rows.append({"first": kept[0], "last": kept[-1], "mean": sum(kept) / len(kept)}[pooling])
    return np.stack(rows)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_reads_real_tokens_alone(pooling, rng):
    hidden = jax.random.normal(rng, (4, 4, 3))
    # Padding may hold anything at all.
    hidden = jnp.where(MASK[..., None], hidden, jnp.nan)
    pooled = pool_tokens(hidden, MASK, pooling=pooling)
    np.testing.assert_allclose(pooled, _pooled_by_hand(hidden, MASK, pooling), rtol=1e-6)
    whole = pool_tokens(hidden[:1], pooling=pooling)
    np.testing.assert_allclose(whole, pooled[:1], rtol=1e-6)


def test_a_row_without_tokens_is_finite():
    hidden = jnp.arange(6.0).reshape(1, 3, 2)
    none = jnp.zeros((1, 3), bool)
    np.testing.assert_array_equal(pool_tokens(hidden, none, pooling="first"), [[0.0, 1.0]])
    np.testing.assert_array_equal(pool_tokens(hidden, none, pooling="last"), [[4.0, 5.0]])
    np.testing.assert_array_equal(pool_tokens(hidden, none, pooling="mean"), [[0.0, 0.0]])


def test_means_are_summed_in_float32():
    hidden = jnp.ones((1, 1000, 1), jnp.bfloat16)
    pooled = pool_tokens(hidden, pooling="mean")
    assert pooled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pooled.astype(jnp.float32), [[1.0]])


def test_what_does_not_fit_is_refused():
    hidden = jnp.zeros((2, 3, 4))
    with pytest.raises(ValueError, match="pooling='max' must be one of first, last, mean"):
        pool_tokens(hidden, pooling="max")
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\); it must be \(2, 3\)"):
        pool_tokens(hidden, jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3\)"):
        pool_tokens(hidden[..., 0])
