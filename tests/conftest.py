"""Strict switches for every test: shape annotations are enforced and implicit rank promotion raises."""

import itertools
import os
import pathlib

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


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 50_000  # Linux gives a process 65,530
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Compiled programs go before the memory maps that XLA takes for them run out, which would end the process."""
    yield
    if next(_tests) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def rng() -> jax.Array:
    return jax.random.key(0)
