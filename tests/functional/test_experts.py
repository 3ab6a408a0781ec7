"""Routing to experts: a loop over tokens as oracle, hand-computed losses, and two dispatches that are one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import (
    DISPATCHES,
    balance_loss,
    expert_capacities,
    grouped_matmul,
    route_tokens,
    router_jitter,
    router_z_loss,
)

BATCH, LENGTH, WIDTH, EXPERTS = 3, 11, 5, 4


@pytest.fixture(scope="module")
def arrays():
    """Tokens, router logits that favour the first expert, kernels, and a mask with padding at both ends."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (BATCH, LENGTH, WIDTH))
    logits = jax.random.normal(keys[1], (BATCH, LENGTH, EXPERTS)) + jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 4)
    kernels = jax.random.normal(keys[2], (EXPERTS, WIDTH, WIDTH))
    mask = np.ones((BATCH, LENGTH), bool)
    mask[1, :3], mask[2, 6:] = False, False
    return x, logits, kernels, mask


def naive(x, logits, kernels, mask, choices, factor):
    """The rule of `expert_dispatch`, a token and a choice at a time."""
    x, logits, kernels = np.float64(x), np.float64(logits), np.float64(kernels)
    out, dropped = np.zeros_like(x), 0
    for row in range(len(x)):
        places = np.ceil(factor * choices * mask[row].sum() / EXPERTS - 1e-9) if factor else np.inf
        taken = [0] * EXPERTS
        for choice in range(choices):
            for token in np.flatnonzero(mask[row]):
                likelihood = np.exp(logits[row, token])
                best = np.argsort(-likelihood)[:choices]
                gate = likelihood[best[choice]] / (likelihood if choices == 1 else likelihood[best]).sum()
                expert = best[choice]
                if taken[expert] < max(places, 1):
                    taken[expert] += 1
                    out[row, token] += gate * np.tanh(x[row, token] @ kernels[expert])
                else:
                    dropped += 1
    return out, dropped


def experts_of(kernels):
    def experts(inputs, owners, tokens):
        return jnp.tanh(
            jnp.einsum("gmd,gdh->gmh", inputs, kernels) if owners is None else grouped_matmul(inputs, kernels, owners)
        )

    return experts


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def run(x, logits, kernels, mask, dispatch, choices, factor):
    """((output, dropped), gradients by x, logits and kernels)."""

    def loss(x, logits, kernels):
        routes = route_tokens(logits, experts_per_token=choices, key_mask=mask)
        out, dropped = DISPATCHES[dispatch](x, routes, experts_of(kernels), capacity_factor=factor)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), (out, dropped)

    gradients, outputs = jax.grad(loss, (0, 1, 2), has_aux=True)(x, logits, kernels)
    return outputs, gradients


@functools.partial(jax.jit, static_argnames="choices")
def balance(logits, mask=None, choices=1):
    return balance_loss(route_tokens(logits, experts_per_token=choices, key_mask=mask))


z_loss = jax.jit(router_z_loss)


@pytest.mark.parametrize("factor", [None, 0.7])
@pytest.mark.parametrize("choices", [1, 2])
def test_both_dispatches_equal_a_loop_over_tokens(choices, factor, arrays):
    expected, dropped = naive(*arrays, choices, factor)
    assert (dropped > 0) == (factor is not None)
    (sorted_out, sorted_dropped), sorted_gradients = run(*arrays, "sort", choices, factor)
    (dense_out, dense_dropped), dense_gradients = run(*arrays, "einsum", choices, factor)
    assert sorted_dropped == dense_dropped == dropped
    np.testing.assert_allclose(sorted_out, expected, atol=1e-5)
    np.testing.assert_allclose(dense_out, expected, atol=1e-5)
    for one, other in zip(sorted_gradients, dense_gradients):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # Padding gets nothing, gives nothing.
    padding = ~arrays[3]
    assert (sorted_out[padding] == 0).all()
    assert (sorted_gradients[0][padding] == 0).all()
    assert (sorted_gradients[1][padding] == 0).all()


@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
@pytest.mark.parametrize("factor", [None, 0.7])
def test_not_even_nan_in_padding_reaches_anything(dispatch, factor, arrays):
    x, logits, kernels, mask = arrays
    exists = mask[..., None]
    poisoned = jnp.where(exists, x, jnp.nan), jnp.where(exists, logits, jnp.nan)
    clean = run(x, logits, kernels, mask, dispatch, 2, factor)
    jax.tree.map(np.testing.assert_array_equal, run(*poisoned, kernels, mask, dispatch, 2, factor), clean)
    assert np.isfinite(balance(poisoned[1], mask))
    assert z_loss(poisoned[1], mask) == z_loss(logits, mask)


@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
def test_padding_before_real_tokens_pushes_none_of_them_out(dispatch):
    """Two experts with two places each; four pads, then four tokens of which two prefer each expert."""
    kernels = jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])
    logits = jnp.array([[[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 1.0]]])
    x = jax.random.normal(jax.random.key(1), (1, 4, 3))
    pads, mask = jnp.full((1, 4, 2), jnp.array([5.0, 0.0])), np.arange(8)[None] >= 4
    padded = jnp.concatenate([pads, logits], 1), jnp.concatenate([jnp.full((1, 4, 3), 9.0), x], 1)

    @jax.jit
    def outcome(x, logits, mask):
        routes = route_tokens(logits, key_mask=mask)
        out, dropped = DISPATCHES[dispatch](x, routes, experts_of(kernels), capacity_factor=1.0)
        return out, dropped, balance_loss(routes), router_z_loss(logits, routes.mask)

    out, dropped, *losses = outcome(padded[1], padded[0], mask)
    alone, alone_dropped, *alone_losses = outcome(x, logits, np.ones((1, 4), bool))
    assert dropped == alone_dropped == 0
    np.testing.assert_allclose(out[:, 4:], alone, atol=1e-6)
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-6)
    # With three tokens for one expert, one is dropped: its output is zero, a residual leaves it as it is.
    crowded = padded[0].at[0, 7].set(jnp.array([1.0, 0.0]))
    out, dropped, *_ = outcome(padded[1], crowded, mask)
    assert dropped == 1
    np.testing.assert_array_equal(out[0, 7], 0.0)
    assert (out[0, 4:7] != 0).all()


def logits_of(*rows):
    """Logits whose softmax is the given probabilities."""
    return jnp.log(jnp.asarray(rows, jnp.float32))


def test_balance_loss_of_skewed_routers_by_hand():
    # All tokens alike, expert 0 chosen always: f = (1, 0, 0), P = (.5, .3, .2); 3 * .5.
    skewed = logits_of([[0.5, 0.3, 0.2]] * 4)
    np.testing.assert_allclose(balance(skewed), 1.5, rtol=1e-6)
    # Two choices: f = (1/2, 1/2, 0); 3 * (.25 + .15).
    np.testing.assert_allclose(balance(skewed, choices=2), 1.2, rtol=1e-6)
    # Tokens that differ: f = (2/4, 1/4, 1/4), P = (.4, .325, .275); 3 * (.2 + .08125 + .06875).
    mixed = logits_of([[0.6, 0.3, 0.1], [0.7, 0.1, 0.2], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]])
    np.testing.assert_allclose(balance(mixed), 1.05, rtol=1e-6)
    # Two choices: (0, 1), (0, 2), (1, 0), (2, 1): f = (3, 3, 2)/8; 3 * (.15 + .121875 + .06875).
    np.testing.assert_allclose(balance(mixed, choices=2), 1.021875, rtol=1e-6)
    # One expert takes everything for certain: E. Rows count by their real tokens: (4 * 1.5 + 1 * 3) / 5.
    certain = jnp.array([[[50.0, 0.0, 0.0]] * 4])
    np.testing.assert_allclose(balance(certain), 3.0, rtol=1e-6)
    both, mask = jnp.concatenate([skewed, certain]), np.array([[1, 1, 1, 1], [0, 1, 0, 0]])
    np.testing.assert_allclose(balance(both, mask), 1.8, rtol=1e-6)
    assert balance(skewed, np.zeros((1, 4), bool)) == 0.0


def test_balance_loss_is_one_for_even_routing_and_its_gradient_flows_through_probabilities_alone():
    even = 1e-3 * jnp.eye(4)[None]
    for choices in (1, 2):
        np.testing.assert_allclose(balance(even, choices=choices), 1.0, atol=1e-3)
    skewed = logits_of([[0.5, 0.3, 0.2]] * 4)
    gradient = jax.jit(jax.grad(balance))(skewed)
    # d(E f_0 P_0) = 3 p_0 (delta - p) / 4 of each token.
    np.testing.assert_allclose(gradient[0], [[0.1875, -0.1125, -0.075]] * 4, atol=1e-6)


def test_router_z_loss_by_hand():
    logits = jnp.array([[[0.0, 0.0], [jnp.log(3.0), 0.0], [7.0, 7.0]]])
    expected = (np.log(2.0) ** 2 + np.log(4.0) ** 2) / 2
    np.testing.assert_allclose(z_loss(logits, np.array([[1, 1, 0]])), expected, rtol=1e-6)
    assert z_loss(logits, np.zeros((1, 3), bool)) == 0.0


def test_capacities_round_up_and_stay_between_one_and_all():
    np.testing.assert_array_equal(expert_capacities(5, 2, 1, 1.0), [0, 1, 1, 2, 2, 3])
    assert expert_capacities(10, 1, 1, 1.1)[10] == 10
    assert expert_capacities(100, 10, 1, 1.1)[100] == 11
    assert expert_capacities(6, 4, 2, 1.25)[6] == 4
    assert expert_capacities(8, 64, 1, 1.0)[8] == 1


def test_jitter_multiplies_evenly_around_one():
    noise = np.asarray(router_jitter(jnp.ones((7, 11, 13)), jax.random.key(2), 0.2))
    assert noise.min() >= 0.8
    assert noise.max() <= 1.2
    np.testing.assert_allclose(noise.mean(), 1.0, atol=0.02)
    assert noise.std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
def test_bfloat16_sums_in_float32(dispatch, arrays):
    x, logits, kernels, mask = (jnp.asarray(array) for array in arrays)
    (expected, _), _ = run(x, logits, kernels, mask, dispatch, 2, None)
    low = (array.astype(jnp.bfloat16) for array in (x, logits))
    (out, _), gradients = run(*low, kernels.astype(jnp.bfloat16), mask, dispatch, 2, None)
    assert out.dtype == gradients[2].dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.06)


def test_blocks_meet_their_own_kernels_with_gradients():
    x = jax.random.normal(jax.random.key(1), (4, 3, 5))
    kernels, owners = jax.random.normal(jax.random.key(2), (3, 5, 7)), jnp.array([0, 2, 2, 0])

    def plain(x, kernels):
        return jnp.einsum("gmd,gdh->gmh", x, kernels[owners])

    def loss(function):
        return lambda x, kernels: jnp.sin(function(x, kernels)).sum()

    def grouped(x, kernels):
        return grouped_matmul(x, kernels, owners)

    np.testing.assert_allclose(jax.jit(grouped)(x, kernels), plain(x, kernels), atol=1e-5)
    gradients = jax.jit(jax.grad(loss(grouped), (0, 1)))(x, kernels)
    for one, other in zip(gradients, jax.jit(jax.grad(loss(plain), (0, 1)))(x, kernels)):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert (gradients[1][1] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": jnp.zeros((2, 3))}, r"logits has shape \(2, 3\); it must be \[batch, tokens, experts\]"),
        ({"logits": jnp.zeros((2, 3, 4), jnp.int32)}, "logits is int32"),
        ({"experts_per_token": 5}, "experts_per_token is 5; it must be at most num_experts, 4"),
        ({"experts_per_token": 0}, "experts_per_token is 0; it must be an integer of at least 1"),
        ({"key_mask": np.ones((3, 2), bool)}, r"key_mask has shape \(3, 2\); it must be \[batch, tokens\]"),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        route_tokens(**{"logits": jnp.zeros((2, 3, 4)), **arguments})


def test_blocks_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match=r"kernels is float32 \(3, 4, 7\); it must be \[owners, D, H\]"):
        grouped_matmul(jnp.zeros((2, 3, 5)), jnp.zeros((3, 4, 7)), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"owners has shape \(3,\); it must be \[blocks\], \(2,\)"):
        grouped_matmul(jnp.zeros((2, 3, 5)), jnp.zeros((3, 5, 7)), np.array([0, 1, 2]))
