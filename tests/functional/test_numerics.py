import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import compute_dtype, first_argmax


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_formulas_are_computed_in_float32_at_least(dtype):
    assert compute_dtype(dtype) == jnp.float32


def test_formulas_of_float64_are_computed_in_float64():
    assert compute_dtype(np.float64) == jnp.float64


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_first_argmax_is_argmax_with_ties_and_infinities(dtype):
    values = np.random.default_rng(0).integers(-3, 4, (5, 7, 11)).astype(np.float64)
    if dtype != jnp.int32:
        values[0, 0], values[0, 1, 3], values[0, 2, 4:6] = -np.inf, np.inf, np.nan
    values = jnp.asarray(values, dtype)
    result = jax.jit(first_argmax)(values)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, jnp.argmax(values, axis=-1))
