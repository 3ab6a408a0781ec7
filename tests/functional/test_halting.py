"""Adaptive computation time: hand-computed weights, a naive loop over positions, gradients, early exit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import adaptive_steps, halting_weights, ponder_cost


@pytest.mark.parametrize(
    ("probabilities", "weights", "cost"),
    [
        ([0.3] * 5, [0.3, 0.3, 0.3, 0.1, 0.0], 4.1),
        ([0.6, 0.5, 0.5], [0.6, 0.4, 0.0], 2.4),
        ([0.1] * 3, [0.1, 0.1, 0.8], 3.8),
        ([0.995, 0.2], [1.0, 0.0], 2.0),
        ([0.2], [1.0], 2.0),
    ],
)
def test_weights_and_cost_computed_by_hand(probabilities, weights, cost):
    out = halting_weights(jnp.array(probabilities), threshold=0.99)
    np.testing.assert_allclose(out.weights, weights, atol=1e-6)
    np.testing.assert_allclose(ponder_cost(out.num_steps, out.remainder), cost, rtol=1e-6)


def _naive(probabilities, states, threshold, mix, exists):
    """One position at a time: weights, N, R and the mix of its states [S, D]."""
    last = len(probabilities) - 1
    weights, total, output, count, rest = np.zeros(last + 1), 0.0, np.zeros(states.shape[1]), 0, 0.0
    for n in range(last + 1) if exists else ():
        count += 1
        halts = total + probabilities[n] >= threshold or n == last
        if halts:
            rest = 1.0 - total
        weights[n] = rest if halts else probabilities[n]
        output = weights[n] * states[n] + (output if mix == "weighted" else (1.0 - weights[n]) * output)
        if halts:
            break
        total += probabilities[n]
    return weights, count, rest, output


def _problem(steps=6, batch=(3, 5), dim=4):
    rng = np.random.default_rng(0)
    # Positions of all tempers: some halt at once, some never.
    probabilities = rng.uniform(0, 1, (steps, *batch)) * rng.uniform(0, 1, batch) ** 2
    probabilities[0, 0, :2] = 1.0
    mask = np.arange(batch[1])[None] < np.array([5, 3, 4])[:, None]
    return probabilities.astype(np.float32), rng.normal(size=(steps, *batch, dim)).astype(np.float32), mask


@functools.partial(jax.jit, static_argnames=("mix", "early_exit"))
def _run(probabilities, states, mask, mix, early_exit=False):
    """States are given, not made from each other; every step also sees what was copied."""

    def step(index, state, carry):
        return probabilities[index], states[index], carry + 1, state

    return adaptive_steps(
        step,
        jnp.zeros(states.shape[1:]),
        len(states),
        carry=jnp.zeros((), jnp.int32),
        mask=mask,
        threshold=0.9,
        mix=mix,
        early_exit=early_exit,
    )


@pytest.mark.parametrize("mix", ["weighted", "exponential"])
def test_equals_a_loop_over_single_positions(mix):
    probabilities, states, mask = _problem()
    out = _run(probabilities, states, mask, mix)
    closed = halting_weights(probabilities, threshold=0.9, mask=mask)
    np.testing.assert_array_equal(closed.weights, out.weights)
    for place in np.ndindex(mask.shape):
        at = (slice(None), *place)
        weights, count, rest, output = _naive(probabilities[at], states[at], 0.9, mix, mask[place])
        np.testing.assert_allclose(out.weights[at], weights, atol=1e-6)
        np.testing.assert_allclose(out.output[place], output, atol=1e-5)
        assert out.halting.num_steps[place] == count
        np.testing.assert_allclose(out.halting.remainder[place], rest, atol=1e-6)
        # What the steps see after the position has halted is its last state, copied.
        for later in range(count + 1, 6) if count else ():
            np.testing.assert_array_equal(out.outputs[later][place], states[count - 1][place])
    np.testing.assert_allclose(out.weights.sum(0), mask, atol=1e-6)
    assert 0 < out.halting.num_steps[mask].min() < out.halting.num_steps.max() == 6


@pytest.mark.parametrize("mix", ["weighted", "exponential"])
def test_early_exit_equals_the_scan_in_fewer_steps(mix):
    probabilities, states, mask = _problem()
    probabilities[3] = 1.0
    whole, early = (_run(probabilities, states, mask, mix, early_exit) for early_exit in (False, True))
    np.testing.assert_array_equal(early.output, whole.output)
    jax.tree.map(np.testing.assert_array_equal, early.halting, whole.halting)
    assert (early.executed, early.carry, whole.executed, whole.carry) == (4, 4, 6, 6)


def test_ponder_cost_leaves_padding_out():
    probabilities, _, mask = _problem()
    out = halting_weights(probabilities, mask=mask)
    cost = ponder_cost(out.num_steps, out.remainder, mask=mask)
    every = np.asarray(out.num_steps) + np.asarray(out.remainder)
    np.testing.assert_allclose(cost, every[mask].mean(), rtol=1e-6)
    assert (every[~mask] == 0).all()
    padded = jnp.pad(probabilities, ((0, 0), (0, 2), (0, 7)), constant_values=0.3)
    wider = jnp.pad(mask, ((0, 2), (0, 7)))
    more = halting_weights(padded, mask=wider)
    np.testing.assert_allclose(ponder_cost(more.num_steps, more.remainder, mask=wider), cost, rtol=1e-6)
    assert ponder_cost(out.num_steps, out.remainder, mask=jnp.zeros_like(mask)) == 0


def test_the_gradient_of_the_cost_is_the_remainders_alone():
    gradient = jax.grad(lambda p: ponder_cost(*halting_weights(p)[1:]))(jnp.array([0.3, 0.3, 0.3, 0.3, 0.7]))
    np.testing.assert_array_equal(gradient, [-1.0, -1.0, -1.0, 0.0, 0.0])


@pytest.mark.parametrize("mix", ["weighted", "exponential"])
def test_gradients_agree_with_finite_differences_in_float64(mix):
    with jax.enable_x64(True):
        steps, batch, dim = 5, 3, 4
        keys = jax.random.split(jax.random.key(0), 3)
        start = jax.random.normal(keys[0], (batch, dim), jnp.float64)
        arrays = (
            jax.random.normal(keys[1], (dim, dim), jnp.float64),
            jax.random.normal(keys[2], (dim,), jnp.float64) - 0.2 * jnp.arange(dim, dtype=jnp.float64),
        )

        def cost(arrays):
            matrix, halting = arrays

            def step(index, state, carry):
                return jax.nn.sigmoid(state @ halting - 1.0), jnp.tanh(state @ matrix), carry, None

            out = adaptive_steps(step, start, steps, mix=mix)
            return (out.output**2).sum() + ponder_cost(out.halting.num_steps, out.halting.remainder), out

        (_, out), gradient = jax.jit(jax.value_and_grad(cost, has_aux=True))(arrays)
        # Far from a threshold, where a small change makes nobody halt at another step.
        before = jnp.where(out.halting.num_steps < steps, out.halting.total - 0.99, 1.0)
        assert jnp.abs(before).min() > 1e-3
        assert 1 < out.halting.num_steps.min() < out.halting.num_steps.max()
        value = jax.jit(lambda arrays: cost(arrays)[0])
        for seed in range(3):
            direction = jax.tree.map(
                lambda leaf, seed=seed: jax.random.normal(jax.random.key(seed), leaf.shape, jnp.float64), arrays
            )
            by = [jax.tree.map(lambda a, b, e=e: a + e * b, arrays, direction) for e in (1e-6, -1e-6)]
            numeric = (value(by[0]) - value(by[1])) / 2e-6
            exact = sum((a * b).sum() for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
            np.testing.assert_allclose(exact, numeric, rtol=1e-6)


def test_low_precision_states_are_mixed_in_float32():
    probabilities, states, mask = _problem()
    out = _run(probabilities.astype(jnp.bfloat16), states.astype(jnp.float32), mask, "weighted")
    assert out.weights.dtype == jnp.float32
    np.testing.assert_allclose(out.weights.sum(0), mask, atol=1e-6)


def test_bad_arguments_are_refused():
    def step(index, state, carry):
        return state[..., 0], state, carry, None

    state = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="max_steps is 0"):
        adaptive_steps(step, state, 0)
    with pytest.raises(ValueError, match=r"threshold is 1\.5"):
        halting_weights(jnp.ones((2, 3)), threshold=1.5)
    with pytest.raises(ValueError, match="mix is 'sum'"):
        adaptive_steps(step, state, 2, mix="sum")
    with pytest.raises(ValueError, match="probabilities is int32"):
        halting_weights(jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="must have one shape"):
        ponder_cost(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3)), mask=jnp.ones((3,), bool))
