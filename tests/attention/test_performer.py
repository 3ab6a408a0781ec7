"""Performer attention: what random features estimate, how well, and that the future never moves the past."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import (
    dense_attention_weights,
    draw_features,
    init_performer_cache,
    performer_attention,
    performer_attention_weights,
    performer_step,
)


def draw(scale=1.0, length=13, heads=4, kv_heads=2, head_dim=6, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, length, heads, head_dim), (2, length, kv_heads, head_dim), (2, length, kv_heads, 5)
    query, key, value = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return query * np.float32(scale), key * np.float32(scale), value


def projection(num_features=24, head_dim=6, seed=3, **options):
    return draw_features(jax.random.key(seed), num_features, head_dim, **options)


def naive_products(query, key, directions, features):
    """The paper's estimate of exp(query key / sqrt(H)) [B, N, T, S] with every factor written out, in float64."""
    key = key.repeat(query.shape[2] // key.shape[2], 2)
    query, key = (array.astype(float) / array.shape[-1] ** 0.25 for array in (query, key))
    directions = np.asarray(directions, float)

    def phi(x):
        projected, half = x @ directions.T, (x**2).sum(-1, keepdims=True) / 2
        if features == "positive":
            return np.exp(projected - half)
        if features == "relu":
            return np.maximum(projected, 0)
        return np.exp(half) * np.concatenate([np.cos(projected), np.sin(projected)], -1)

    return np.einsum("btnf,bsnf->bnts", phi(query), phi(key)) / len(directions)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["positive", "trigonometric", "relu"])
def test_weights_are_products_of_the_papers_features(features):
    query, key, value = draw(0.7)
    directions = projection()
    products = naive_products(query, key, directions, features)
    weights = performer_attention_weights(query, key, projection=directions, features=features)
    np.testing.assert_allclose(weights, products / products.sum(-1, keepdims=True), atol=2e-6)
    below = np.tril(products)
    want = np.einsum("bnts,bsnv->btnv", below / below.sum(-1, keepdims=True), value.repeat(2, 2))
    chunked = functools.partial(
        performer_attention, projection=directions, causal=True, features=features, form="chunked", chunk_size=4
    )
    np.testing.assert_allclose(jax.jit(chunked)(query, key, value), want, atol=1e-5)


@pytest.mark.parametrize(
    "orthogonal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["independent", "orthogonal"]
)
def test_the_estimate_of_the_softmax_kernel_is_unbiased(orthogonal):
    query, key, _ = draw(0.6, length=3, heads=1, kv_heads=1)
    drawn = jax.jit(jax.vmap(lambda rng: draw_features(rng, 8, 6, orthogonal=orthogonal)))
    directions = drawn(jax.random.split(jax.random.key(0), 2000))
    truth = np.exp(np.einsum("btnh,bsnh->bnts", query, key).astype(float) / np.sqrt(6))
    for features in ("positive", "trigonometric"):
        estimates = np.stack([naive_products(query, key, one, features) for one in np.asarray(directions)])
        standard_error = estimates.std(0) / np.sqrt(len(estimates))
        assert (abs(estimates.mean(0) - truth) < 4.5 * standard_error).all()
        assert (standard_error < 0.05 * truth).all()


@pytest.mark.slow
def test_orthogonal_directions_keep_the_lengths_of_normal_vectors():
    directions = np.asarray(projection(4096 + 3, 6), float)
    assert directions.shape == (4099, 6)
    products = np.einsum("bih,bjh->bij", *[directions[:4098].reshape(-1, 6, 6)] * 2)
    off_diagonal = products[:, ~np.eye(6, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, 0, atol=1e-4)
    squares = (directions**2).sum(-1)
    # Chi squared with 6 degrees of freedom: mean 6, variance 12; and lengths within a block are independent.
    assert abs(squares.mean() - 6) < 4 * np.sqrt(12 / len(squares))
    assert abs(squares.var() - 12) < 2.5
    in_blocks = squares[:4098].reshape(-1, 6)
    assert abs(np.corrcoef(in_blocks[:, 0], in_blocks[:, 1])[0, 1]) < 0.15
    # Uniform directions: each coordinate has mean 0 and variance 1.
    assert abs(directions.mean(0)).max() < 0.07
    np.testing.assert_allclose(directions.var(0), 1, atol=0.1)
    assert projection(7, 5, num_kv_heads=3).shape == (3, 7, 5)


@pytest.mark.slow
def test_error_falls_as_the_root_of_the_features_and_orthogonal_is_no_worse():
    """At small norms; means over draws of the squared error of the weights."""
    query, key, _ = draw(0.3, length=16, heads=1, kv_heads=1, head_dim=8)
    truth = np.asarray(dense_attention_weights(query, key))

    def error(num_features, orthogonal):
        @jax.jit
        @jax.vmap
        def weights(rng):
            directions = draw_features(rng, num_features, 8, orthogonal=orthogonal)
            return performer_attention_weights(query, key, projection=directions)

        estimates = weights(jax.random.split(jax.random.key(1), 60))
        return np.sqrt(((np.asarray(estimates) - truth) ** 2).mean())

    independent, orthogonal = ([error(m, kind) for m in (16, 256)] for kind in (False, True))
    for errors in (independent, orthogonal):
        np.testing.assert_allclose(np.diff(np.log(errors)) / np.log(16), -0.5, atol=0.1)
    assert all(one < other for one, other in zip(orthogonal, independent))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["positive", "trigonometric", "relu"])
def test_later_tokens_however_large_leave_earlier_outputs_alone(features):
    query, key, value = draw(0.5)
    run = jax.jit(
        functools.partial(
            performer_attention, projection=projection(), causal=True, features=features, form="chunked", chunk_size=4
        )
    )
    before = run(query, key, value)
    for scale in (0.0, 1e-3, 30.0, 1e15):
        far = [array.copy() for array in (query, key, value)]
        for array in far:
            array[:, 6:] *= np.float32(scale)
        np.testing.assert_array_equal(run(*far)[:, :6], before[:, :6])
    short = run(query[:, :5], key[:, :5], value[:, :5])
    np.testing.assert_allclose(short, before[:, :5], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_keys_of_any_norm_neither_overflow_nor_vanish(dtype):
    """Keys of small and large norm in turn: exp(-|key|²/2) alone would be 0 or leave the range."""
    query, key, value = draw(length=16)
    key = key * np.where(np.arange(16) % 5 == 3, 12.0, 1.0)[None, :, None, None].astype(np.float32)
    key[:, :4] *= np.float32(8.0)
    inputs = [jnp.asarray(array, dtype) for array in (query, key, value)]

    @jax.jit
    def run(*inputs):
        output = performer_attention(*inputs, projection=projection(), causal=True, form="chunked", chunk_size=4)
        return output.astype(jnp.float32).sum(), output

    (_, output), gradients = jax.value_and_grad(run, (0, 1, 2), has_aux=True)(*inputs)
    assert output.dtype == dtype
    assert (abs(output) > 0).all()
    assert np.isfinite(np.asarray(output, np.float32)).all()
    assert all(np.isfinite(np.asarray(gradient, np.float32)).all() for gradient in gradients)
    query, key, value = (np.asarray(array, np.float64) for array in inputs)
    below = np.tril(naive_products(query, key, projection(), "positive"))
    want = np.einsum("bnts,bsnv->btnv", below / below.sum(-1, keepdims=True), value.repeat(2, 2))
    np.testing.assert_allclose(np.asarray(output, np.float64), want, atol=1e-4 if dtype == jnp.float32 else 0.03)


@pytest.mark.slow
def test_a_sum_of_trigonometric_weights_that_is_not_positive_gives_zeros():
    query, key, value = draw(3.0, length=40)
    directions = projection(2)
    weights = naive_products(query, key, directions, "trigonometric")
    lost = (weights.sum(-1) < 0).swapaxes(1, 2)
    assert 0 < lost.sum() < lost.size
    run = jax.jit(functools.partial(performer_attention, features="trigonometric"))
    output = run(query, key, value, projection=directions)
    assert not output[lost].any()
    assert output[~lost].any(-1).all()


@pytest.mark.slow
def test_each_key_head_may_have_directions_of_its_own():
    query, key, value = draw()
    directions = projection(num_kv_heads=2)
    run = jax.jit(functools.partial(performer_attention, causal=True, form="chunked", chunk_size=4))
    output = run(query, key, value, projection=directions)
    for head in range(2):
        group = slice(2 * head, 2 * head + 2)
        own = query[:, :, group], key[:, :, head : head + 1], value[:, :, head : head + 1]
        alone = run(*own, projection=directions[head][None])
        np.testing.assert_allclose(output[:, :, group], alone, atol=1e-5)
    cache = init_performer_cache(2, 13, 2, 6, value_dim=5, num_features=24)
    stepped, _ = jax.jit(performer_step)(cache, query, key, value, projection=directions)
    np.testing.assert_allclose(stepped, output, atol=1e-5)
    with pytest.raises(ValueError, match=r"cache\.total"):
        performer_step(cache, query, key, value, projection=projection(25))
    with pytest.raises(ValueError, match="projection"):
        performer_attention(query, key, value, projection=projection(num_kv_heads=4))
    with pytest.raises(ValueError, match="features is 'exp'"):
        performer_attention(query, key, value, projection=directions, features="exp")


@pytest.mark.slow
def test_memory_of_the_backward_pass_is_linear_in_length():
    directions = projection(128, 64)

    def temp_bytes(length, causal):
        inputs = [jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)] * 3
        gradient = jax.grad(
            lambda *inputs: performer_attention(*inputs, projection=directions, causal=causal).sum(), (0, 1, 2)
        )
        return jax.jit(gradient).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    short, long, both_ways = temp_bytes(1024, True), temp_bytes(4096, True), temp_bytes(4096, False)
    assert long < 4.2 * short
    # Less than a third of one length x length matrix for each head.
    assert max(long, both_ways) < 2 * 4096**2 * 4 / 3
