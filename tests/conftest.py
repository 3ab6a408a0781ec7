"""Strict switches for every test: shape annotations are enforced and implicit rank promotion raises."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of what the tests do; unoptimised code computes the same numbers and compiles three times faster.
# In the environment, so that the processes that tests start do the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from jaxtyping import install_import_hook

# Must come before the first import of the package: it wraps functions as their modules load. An int is a fine float.
install_import_hook("jaxformer", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng() -> jax.Array:
    return jax.random.key(0)
