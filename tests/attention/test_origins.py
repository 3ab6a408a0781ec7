"""Where attention comes from: identities of the papers, hand-computed numbers, and memory by blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import (
    additive_attention,
    additive_attention_weights,
    bilinear_attention_weights,
    concat_attention_weights,
    dense_attention_weights,
    init_cache,
    kernel_attention,
    kernel_attention_weights,
    kernel_step,
    logit_statistics,
    shared_query_key_attention,
    shared_query_key_attention_weights,
)
from jaxformer.attention.unit_length import unit_length

weigh_shared = jax.jit(shared_query_key_attention_weights, static_argnames="causal")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grid(*numbers):
    """Points on a line as queries, keys or values [1, T, 1, 1]."""
    return np.array(numbers, np.float32).reshape(1, -1, 1, 1)


# Kernel attention.


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        # Distances 0, 1/2, 2 of the query 0 at width 1.
        ("gaussian", [1, np.exp(-0.125), np.exp(-2)]),
        ("boxcar", [1, 1, 0]),
        ("epanechnikov", [1, 0.75, 0]),
        ("triangular", [1, 0.5, 0]),
        ("constant", [1, 1, 1]),
        (lambda u: jnp.maximum(1 - u, 0.0) ** 2, [1, 0.25, 0]),
    ],
)
def test_kernels_by_hand(kernel, wanted):
    weigh = jax.jit(lambda key, width: kernel_attention_weights(grid(0.0), key, kernel=kernel, width=width))
    weights = weigh(grid(0.0, 0.5, 2.0), 1.0)
    np.testing.assert_allclose(weights[0, 0, 0], np.array(wanted) / np.sum(wanted), rtol=1e-6)
    # Twice the width at twice the distances.
    wide = weigh(grid(0.0, 1.0, 4.0), 2.0)
    np.testing.assert_allclose(wide, weights, rtol=1e-6)


@pytest.mark.slow
def test_a_query_out_of_reach_gets_zeros_but_a_gaussian_finds_the_nearest():
    query, key, value = grid(100.0, 0.4), grid(0.0, 1.0), grid(3.0, 5.0)
    for kernel in ("boxcar", "epanechnikov", "triangular"):

        def run(query, width, kernel=kernel):
            return kernel_attention(query, key, value, kernel=kernel, width=width)[0, :, 0, 0]

        output = run(query, np.float32(0.5))
        np.testing.assert_allclose(output, [0, 3], rtol=1e-6)
        slopes = jax.grad(lambda query, width: run(query, width).sum(), (0, 1))(query, np.float32(0.5))
        assert all(np.isfinite(slope).all() for slope in slopes)
    np.testing.assert_allclose(kernel_attention(query, key, value, width=0.01)[0, :, 0, 0], [5, 3], rtol=1e-6)


def test_a_gaussian_over_keys_of_equal_length_is_dense_attention():
    query, key = normal(2, 5, 4, 3), normal(2, 7, 2, 3, seed=1)
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    weights, dense = jax.jit(
        lambda *tensors: (
            kernel_attention_weights(*tensors, width=0.7),
            dense_attention_weights(*tensors, scale=1 / 0.49),
        )
    )(query, key)
    np.testing.assert_allclose(weights, dense, atol=1e-6)


@pytest.mark.slow
def test_regression_finds_the_curve_and_leaving_out_learns_the_width():
    """y = 2 sin x + x + noise; means over draws of the squared error to the curve without noise."""
    random = np.random.default_rng(0)
    draws, count = 100, 40
    x = np.sort(random.uniform(0, 5, (draws, count, 1, 1)), 1).astype(np.float32)
    curve = lambda x: 2 * np.sin(x) + x  # noqa: E731
    y = (curve(x) + random.standard_normal(x.shape)).astype(np.float32)
    at = np.broadcast_to(np.arange(0, 5, 0.1, dtype=np.float32).reshape(1, -1, 1, 1), (draws, 50, 1, 1))

    @functools.partial(jax.jit, static_argnames="kernel")
    def error(width, kernel):
        return jnp.median(
            jnp.square(kernel_attention(at, x, y, kernel=kernel, width=width) - curve(at)).mean((1, 2, 3))
        )

    by_width = {width: float(error(np.float32(width), "gaussian")) for width in (0.1, 0.2, 0.35, 0.5, 1.0)}
    assert min(by_width, key=by_width.get) in (0.2, 0.35, 0.5)
    assert by_width[0.35] < by_width[1.0]
    by_kernel = {kernel: float(error(np.float32(1.0), kernel)) for kernel in ("boxcar", "triangular", "constant")}
    assert by_kernel["triangular"] < by_kernel["boxcar"] < by_width[1.0] < by_kernel["constant"]

    @functools.partial(jax.jit, static_argnames="leave_one_out")
    def learn(leave_one_out):
        def loss(log_width):
            told = kernel_attention(x, x, y, width=jnp.exp(log_width), leave_one_out=leave_one_out)
            return jnp.square(told - y).mean()

        def update(_, log_width):
            return log_width - 0.3 * jnp.clip(jax.grad(loss)(log_width), -0.5, 0.5)

        return jnp.exp(jax.lax.fori_loop(0, 60, update, jnp.zeros((), jnp.float32)))

    assert 0.15 < learn(leave_one_out=True) < 0.6
    assert learn(leave_one_out=False) < 0.1


def test_leave_one_out_hides_each_key_from_itself():
    key = normal(2, 6, 1, 3)
    weights = jax.jit(lambda key: kernel_attention_weights(key, key, leave_one_out=True, causal=True))(key)
    assert not np.diagonal(weights, axis1=2, axis2=3).any()
    np.testing.assert_allclose(weights.sum(-1)[:, 0, 1:], 1, rtol=1e-6)
    assert not weights[:, :, 0].any()
    with pytest.raises(ValueError, match="leave_one_out with 4 queries over 6 keys"):
        kernel_attention(key[:, :4], key, key, leave_one_out=True)


def test_unfit_kernels_and_widths_are_refused():
    key = normal(1, 3, 2, 4)
    for options in (
        {"kernel": "cosine"},
        {"width": 0.0},
        {"width": 1e-11},
        {"width": True},
        {"width": np.array([1.0, -1.0])},
        {"width": np.ones(3)},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            kernel_attention(key, key, key, **options)
    cache = init_cache(1, 3, 2, 4)
    output, _ = kernel_step(cache, key, key, key, kernel="boxcar", width=2)
    np.testing.assert_allclose(
        output, kernel_attention(key, key, key, kernel="boxcar", width=2, causal=True), atol=1e-6
    )


def test_narrow_kernels_and_large_features_have_finite_gradients():
    query, key, value = normal(1, 3, 1, 2), normal(1, 4, 1, 2, seed=1), normal(1, 4, 1, 2, seed=2)

    @jax.jit
    def slopes(query, key, width):
        def loss(*arguments):
            output = kernel_attention(*arguments[:2], value, width=arguments[2])
            return (output**2).sum(), output

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, width)

    nearest = value[0, np.square(query[0, :, None, 0] - key[0, None, :, 0]).sum(-1).argmin(1), 0]
    for size, width in ((1.0, 1e-10), (1.0, 1e-30), (1e20, 1.0), (1e38, 1.0)):
        gradients, output = slopes(query * np.float32(size), key * np.float32(size), width)
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        if size == 1:
            np.testing.assert_array_equal(output[0, :, 0], nearest)
    plain, _ = slopes(query, key, 1.0)
    scaled, _ = slopes(query * np.float32(1e30), key * np.float32(1e30), 1e30)
    for one, other in zip(plain, scaled):
        np.testing.assert_allclose(one, other * 1e30, rtol=1e-3, atol=1e-6)


# Additive, concatenation and bilinear attention.


def test_additive_weights_by_hand():
    # One hidden unit: the logits are 2 tanh(query + 3 key).
    weights = additive_attention_weights(
        grid(0.5),
        grid(0.0, 1.0),
        query_kernel=np.ones((1, 1), np.float32),
        key_kernel=np.full((1, 1), 3, np.float32),
        score_vector=np.full(1, 2, np.float32),
    )
    powers = np.exp(2 * np.tanh([0.5, 3.5]))
    np.testing.assert_allclose(weights[0, 0, 0], powers / powers.sum(), rtol=1e-6)


def test_without_a_nonlinearity_the_query_cancels():
    query, key = normal(2, 5, 2, 3), normal(2, 7, 1, 4, seed=1)
    kernel, vector = normal(7, 6, seed=2), normal(6, seed=3)
    given = {"kernel": kernel, "score_vector": vector}
    weigh = jax.jit(functools.partial(concat_attention_weights, **given), static_argnames="activation")
    weights = weigh(query, key, activation="identity")
    np.testing.assert_allclose(weights, np.broadcast_to(weights[:, :1, :1], weights.shape), atol=1e-6)
    bent = weigh(query, key)
    assert abs(bent - bent[:, :, :1]).max() > 0.05
    with pytest.raises(ValueError, match="activation is 'relu'"):
        concat_attention_weights(query, key, kernel=kernel, score_vector=vector, activation="relu")


def test_queries_and_keys_may_have_different_features():
    query, key, value = normal(2, 5, 4, 3), normal(2, 7, 2, 6, seed=1), normal(2, 7, 2, 8, seed=2)
    kernel = normal(4, 3, 6, seed=3)
    weights = jax.jit(functools.partial(bilinear_attention_weights, kernel=kernel))(query, key)
    logits = np.einsum("btnh,nhk,bsnk->bnts", query, kernel, key.repeat(2, 2))
    np.testing.assert_allclose(weights, jax.nn.softmax(logits, axis=-1), atol=1e-6)
    kernels = {"query_kernel": normal(4, 3, 5), "key_kernel": normal(2, 6, 5, seed=4), "score_vector": normal(4, 5)}
    output = jax.jit(functools.partial(additive_attention, **kernels, causal=True))(query, key, value)
    parts = np.einsum("btnh,nhm->bntm", query, kernels["query_kernel"])[:, :, :, None]
    parts = parts + np.einsum("bskh,khm->bksm", key, kernels["key_kernel"]).repeat(2, 1)[:, :, None]
    logits = np.einsum("bntsm,nm->bnts", np.tanh(parts), kernels["score_vector"])
    logits = np.where(np.tril(np.ones((5, 7), bool), 2), logits, -np.inf)
    want = np.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), value.repeat(2, 2))
    np.testing.assert_allclose(output, want, atol=1e-5)
    with pytest.raises(ValueError, match=r"key_kernel has shape \(3, 5\); it must be \[6, 5\] or \[2, 6, 5\]"):
        additive_attention(query, key, value, **{**kernels, "key_kernel": normal(3, 5)})


def test_memory_of_the_hidden_units_is_never_length_by_length():
    kernels = {"query_kernel": normal(8, 32), "key_kernel": normal(8, 32), "score_vector": normal(32)}

    def temp_bytes(length):
        inputs = [jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)] * 3
        gradient = jax.grad(lambda *inputs: additive_attention(*inputs, **kernels, causal=True).sum(), (0, 1, 2))
        return jax.jit(gradient).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(512), temp_bytes(2048)
    assert long < 4.2 * short
    # All hidden units would be 32 matrices of length x length; this is less than a third of one.
    assert long < 2048**2 * 4 / 3


# Shared queries and keys.


def test_a_token_sees_itself_only_in_need():
    query_key = normal(2, 4, 2, 3)
    causal = weigh_shared(query_key, causal=True)
    np.testing.assert_array_equal(causal[:, :, 0], np.broadcast_to([1, 0, 0, 0], (2, 2, 4)))
    assert not np.diagonal(causal, axis1=2, axis2=3)[..., 1:].any()
    # Segments of one token, and a token whose only neighbour is padding.
    segments = np.array([[1, 2, 2, 3], [1, 1, 2, 2]])
    key_mask = np.array([[1, 1, 1, 1], [1, 0, 1, 1]])
    weights = weigh_shared(query_key, query_segments=segments, key_mask=key_mask)
    alone = np.array([[1, 0, 0, 1], [1, 0, 0, 0]], bool)
    diagonal = np.diagonal(weights, axis1=2, axis2=3).swapaxes(1, 2)
    np.testing.assert_array_equal(diagonal, np.broadcast_to(alone[:, :, None], diagonal.shape))
    assert not weights[1, :, 1].any()
    value = normal(2, 4, 2, 5, seed=1)
    output = jax.jit(shared_query_key_attention)(query_key, value, query_segments=segments, key_mask=key_mask)
    np.testing.assert_allclose(output, np.einsum("bnts,bsnv->btnv", weights, value), atol=1e-6)


@pytest.mark.slow
def test_keys_have_unit_length_and_a_zero_vector_a_finite_gradient():
    query_key, value = normal(1, 5, 1, 3), normal(1, 5, 1, 2, seed=1)
    logits = query_key[0, :, 0] @ (query_key / np.linalg.norm(query_key, axis=-1, keepdims=True))[0, :, 0].T
    np.fill_diagonal(logits, -np.inf)
    weights = shared_query_key_attention_weights(query_key)[0, 0]
    np.testing.assert_allclose(weights, jax.nn.softmax(logits, axis=-1), atol=1e-6)
    query_key[0, 2] = 0
    slope = jax.grad(lambda query_key: shared_query_key_attention(query_key, value, causal=True)[..., 0].sum())(
        query_key
    )
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("exponent", [-37, -19, -13, 0, 19, 37])
def test_unit_vectors_and_their_gradients_are_right_at_any_scale(exponent):
    vector, outer = np.array([3.0, -4.0, 0.0]), np.array([1.0, 0.5, -2.0])
    scaled = jnp.asarray(vector * 10.0**exponent, jnp.float32)

    @jax.jit
    def run(vector, outer):
        unit, pull = jax.vjp(unit_length, vector)
        return unit, *pull(outer)

    # Times the length, as 1e-38 is no normal number.
    large = np.float32(10.0 ** max(exponent, 0))
    unit, pulled = run(scaled, jnp.asarray(outer * large, jnp.float32))
    np.testing.assert_allclose(unit, vector / 5, rtol=1e-6)
    slope = (outer - vector / 5 * (vector / 5 @ outer)) / 5
    np.testing.assert_allclose(pulled * scaled[0] / large, 3 * slope, rtol=1e-5)
    unit, pulled = run(jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32))
    np.testing.assert_array_equal(unit, np.zeros(3))
    assert np.isfinite(pulled).all()


def test_memory_of_shared_queries_and_keys_is_linear():
    def temp_bytes(length):
        inputs = [jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)] * 2
        gradient = jax.grad(lambda *inputs: shared_query_key_attention(*inputs, causal=True).sum(), (0, 1))
        return jax.jit(gradient).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(2048) < 2048**2 * 4


# The scale.


def test_products_grow_with_the_head_size_and_drown_the_gradient(rng):
    run = jax.jit(logit_statistics, static_argnames=("head_dim", "scale"))
    sizes = (4, 64, 512)
    bare = {head_dim: run(rng, head_dim=head_dim, scale=1.0) for head_dim in sizes}
    scaled = {head_dim: run(rng, head_dim=head_dim) for head_dim in sizes}
    for head_dim in sizes:
        np.testing.assert_allclose(bare[head_dim].variance / head_dim, 1, atol=0.2)
        np.testing.assert_allclose(scaled[head_dim].variance, 1, atol=0.2)
    assert bare[4].highest_weight < 0.4
    assert bare[512].highest_weight > 0.8
    assert all(figures.highest_weight < 0.1 for figures in scaled.values())
    assert bare[4].gradient > 2 * bare[64].gradient > 4 * bare[512].gradient
    assert all(1.9 < figures.gradient < 2 for figures in scaled.values())
    with pytest.raises(ValueError, match="head_dim is 0"):
        logit_statistics(rng, 0)


def test_the_gradient_of_the_scale_s_figures_is_that_of_the_softmax(rng):
    query_rng, key_rng = jax.random.split(rng)
    query, key = jax.random.normal(query_rng, (3, 8)), jax.random.normal(key_rng, (5, 8))
    jacobians = jax.vmap(jax.jacobian(jax.nn.softmax))(query @ key.T)
    expected = np.abs(jacobians).sum((1, 2)).mean()
    found = logit_statistics(rng, 8, scale=1.0, num_queries=3, num_keys=5).gradient
    np.testing.assert_allclose(found, expected, rtol=1e-5)
