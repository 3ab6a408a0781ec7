import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference.rules import Rule, choose_tokens


@functools.partial(jax.jit, static_argnums=0)
def choose_compiled(rule, rng, step, logits, temperature):
    return choose_tokens(rule, rng, step, logits, temperature, None)


def choose(rule, logits, temperature=1.0, seed=0, step=0):
    step, temperature = jnp.asarray(step, jnp.int32), jnp.asarray(temperature, jnp.float32)
    return choose_compiled(rule, jax.random.key(seed), step, jnp.asarray(logits, jnp.float32), temperature)


@pytest.mark.parametrize("temperature", [1e-30, 0.01])
def test_large_logits_at_low_temperatures_stay_finite(temperature):
    logits = np.tile([1000.0, 999.0, 0.0], (50, 1))
    assert (choose(Rule(greedy=False, top_p=0.9), logits, temperature) == 0).all()


@pytest.mark.parametrize(
    ("rule", "temperature", "expected"),
    [
        (Rule(greedy=False), 1.0, [0.5, 0.25, 0.15, 0.1]),
        (Rule(greedy=False), 0.5, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (Rule(greedy=False, top_k=2), 1.0, [2 / 3, 1 / 3, 0, 0]),
        (Rule(greedy=False, top_p=0.8), 1.0, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (Rule(greedy=False, min_p=0.4), 1.0, [2 / 3, 1 / 3, 0, 0]),
        # The two most likely of three quarters, of which two thirds reach 0.6 alone.
        (Rule(greedy=False, top_k=2, top_p=0.6), 1.0, [1, 0, 0, 0]),
        # Temperature comes first: squared, 0.5 stands for 0.72 and reaches 0.7 alone.
        (Rule(greedy=False, top_p=0.7), 0.5, [1, 0, 0, 0]),
    ],
)
def test_frequencies_are_those_of_the_rule(rule, temperature, expected):
    rows = 20_000
    logits = np.tile(np.log([0.5, 0.25, 0.15, 0.1]), (rows, 1))
    counts = np.bincount(choose(rule, logits, temperature), minlength=4)
    expected = np.array(expected)
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(counts / rows - expected) <= 4.5 * deviation).all(), counts / rows
    assert (counts[expected == 0] == 0).all()


def test_draws_depend_on_seed_row_and_step_alone():
    logits = np.random.default_rng(0).normal(size=(13, 31))
    rule = Rule(greedy=False)
    tokens = np.asarray(choose(rule, logits))
    np.testing.assert_array_equal(tokens[:5], choose(rule, logits[:5]))
    flat = np.zeros((13, 31))
    draws = [choose(rule, flat, seed=seed, step=step).tolist() for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(draw) for draw in draws}) == 3
    assert len(set(draws[0])) > 1
