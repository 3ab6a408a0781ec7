"""The two lowest layers never promote dtypes by accident: strict promotion around every test here."""

import sys
from pathlib import Path

import jax
import pytest

# The contract table is shared by the test files of this folder.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
