"""The two lowest layers never promote dtypes by accident: strict promotion around every test here."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
