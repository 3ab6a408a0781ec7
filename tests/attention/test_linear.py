"""Linear attention: three forms of one meaning, by hand, at every edge, and in linear memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import init_linear_cache, linear_attention, linear_attention_weights, linear_step
from jaxformer.functional.feature_maps import elu_features, relu_features, softplus_features

attend = jax.jit(linear_attention, static_argnames=("causal", "form", "chunk_size", "feature_map"))
weigh = jax.jit(linear_attention_weights, static_argnames=("causal", "feature_map"))


def draw(queries=13, keys=13, heads=4, kv_heads=2, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, queries, heads, 3), (2, keys, kv_heads, 3), (2, keys, kv_heads, 5)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


FORMS = {
    "quadratic": {"form": "quadratic"},
    "chunks_of_4": {"form": "chunked", "chunk_size": 4},
    "recurrent": {"form": "recurrent"},
}


def weights_by_runs(query, key, key_mask, segments, causal):
    """Loops over pairs, in float64."""
    features = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (query.astype(float), key.astype(float))]
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    weights = np.zeros((batch, heads, queries, keys))
    for b, n, t, s in np.ndindex(weights.shape):
        place = t + keys - queries
        low, high = min(place, s), max(place, s)
        one_run = (segments[b, low : high + 1] == segments[b, low]).all()
        if key_mask[b, s] and one_run and not (causal and s > place):
            weights[b, n, t, s] = features[0][b, t, n] @ features[1][b, s, n // (heads // key.shape[2])]
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
def test_all_forms_agree_with_pairs_within_runs_of_segments(causal):
    query, key, value = draw()
    # A number that comes again is another segment.
    segments = np.array([[1] * 5 + [2] * 2 + [1] * 6, [3] * 9 + [4] * 4])
    key_mask = np.random.default_rng(1).random((2, 13)) < 0.7
    weights = weights_by_runs(query, key, key_mask, segments, causal)
    want = np.einsum("bnts,bsnv->btnv", weights, value.repeat(2, 2))
    options = {"key_mask": key_mask, "query_segments": segments, "key_segments": segments, "causal": causal}
    np.testing.assert_allclose(linear_attention_weights(query, key, **options), weights, atol=1e-6)
    for name, form in FORMS.items():
        got = jax.jit(functools.partial(linear_attention, **form, **options))(query, key, value)
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)


def test_causal_queries_are_the_last_of_the_keys():
    query, key, value = draw()
    whole = attend(query, key, value, causal=True)
    for name in ("quadratic", "chunks_of_4"):
        part = attend(query[:, -6:], key, value, causal=True, **FORMS[name])
        np.testing.assert_allclose(part, whole[:, -6:], atol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="13 queries over 6 keys"):
        linear_attention(query, key[:, :6], value[:, :6], causal=True)
    with pytest.raises(ValueError, match="segments"):
        linear_attention(
            query[:, :6],
            key,
            value,
            query_segments=np.ones((1, 6), int),
            key_segments=np.ones((1, 13), int),
        )


def test_weights_by_hand():
    # phi(0) = 1, phi(1) = 2, phi(-ln 2) = 1/2: products 1, 2, 1/2 for the query 0.
    key = np.array([0.0, 1.0, -np.log(2.0)], np.float32).reshape(1, 3, 1, 1)
    query = np.zeros((1, 3, 1, 1), np.float32)
    weights = weigh(query, key)[0, 0]
    np.testing.assert_allclose(weights, np.array([[2, 4, 1]] * 3) / 7, rtol=1e-6)
    causal = weigh(query, key, causal=True)[0, 0]
    np.testing.assert_allclose(causal, [[1, 0, 0], [1 / 3, 2 / 3, 0], [2 / 7, 4 / 7, 1 / 7]], rtol=1e-6)


def test_feature_maps_are_what_they_say():
    x = np.array([-200.0, -20.0, -1.0, 0.0, 2.0], np.float32)
    np.testing.assert_allclose(elu_features(x), [0, np.exp(-20.0), np.exp(-1.0), 1, 3], rtol=1e-6, atol=1e-38)
    np.testing.assert_array_equal(relu_features(x), [0, 0, 0, 0, 2])
    np.testing.assert_allclose(softplus_features(x), np.log1p(np.exp(x.astype(float))), rtol=1e-6, atol=1e-38)
    assert jax.grad(lambda x: elu_features(x).sum())(x)[3] == 1


def test_a_query_without_a_feature_in_common_gets_zeros_and_no_gradient_is_nan():
    query, key, value = draw(heads=2)
    query, key = abs(query), -abs(key)
    key[:, 5:] *= -1

    @jax.jit
    def run(query, key, value):
        options = {"causal": True, "feature_map": "relu", "chunk_size": 4}
        output = linear_attention(query, key, value, **options)
        return output.sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(query, key, value)
    assert not output[:, :5].any()
    assert output[:, 5:].all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", ["quadratic", "chunks_of_4"])
def test_huge_and_tiny_inputs_stay_finite(name):
    query, key, value = draw()
    for scale in (1e-30, 1e-3, 1e3, 1e18):
        output = attend(query * np.float32(scale), key * np.float32(scale), value, causal=True, **FORMS[name])
        assert np.isfinite(output).all()
        assert abs(output).max() <= abs(value).max() * 1.001


def test_a_function_is_a_feature_map():
    query, key, value = draw()

    def both_signs(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)

    weights = weigh(query, key, feature_map=both_signs)
    products = np.einsum("btnf,bsnf->bnts", both_signs(query), both_signs(key.repeat(2, 2)))
    np.testing.assert_allclose(weights, products / products.sum(-1, keepdims=True), atol=1e-6)
    cache = init_linear_cache(2, 13, 2, 3, value_dim=5, feature_map=both_signs)
    assert cache.total.shape == (2, 2, 6, 5)
    output, _ = jax.jit(functools.partial(linear_step, feature_map=both_signs))(cache, query, key, value)
    want = attend(query, key, value, causal=True, feature_map=both_signs)
    np.testing.assert_allclose(output, want, atol=1e-6)


@pytest.mark.parametrize("feature_map", ["cosine", lambda x: x.sum(-1)])
def test_what_is_no_feature_map_is_refused(feature_map):
    with pytest.raises(ValueError, match="feature_map"):
        linear_attention(*draw(), feature_map=feature_map)


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="form is 'fast'"):
        linear_attention(*draw(), form="fast")
    with pytest.raises(ValueError, match="chunk_size is 0"):
        linear_attention(*draw(), chunk_size=0)


def test_the_state_is_of_constant_size_and_steps_write_one_layer():
    query, key, value = draw()
    sizes = [[leaf.shape for leaf in jax.tree.leaves(init_linear_cache(2, length, 2, 3))] for length in (1, 10**9)]
    assert sizes[0] == sizes[1]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init_linear_cache(2, 13, 2, 3, value_dim=5))
    step = jax.jit(functools.partial(linear_step, chunk_size=4))
    outputs, cache = [], stacked
    for part in (slice(0, 6), slice(6, 7), slice(7, 13)):
        output, cache = step(cache, query[:, part], key[:, part], value[:, part], layer=1)
        outputs.append(output)
    whole = attend(query, key, value, causal=True)
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-5)
    for before, after in zip(jax.tree.leaves(stacked), jax.tree.leaves(cache)):
        np.testing.assert_array_equal(before[::2], after[::2])
    with pytest.raises(ValueError, match="layer"):
        linear_step(cache, query, key, value)


@pytest.mark.slow
def test_memory_of_the_backward_pass_is_linear_in_length():
    def temp_bytes(length, **options):
        inputs = [jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)] * 3
        gradient = jax.grad(lambda *inputs: linear_attention(*inputs, causal=True, **options).sum(), (0, 1, 2))
        return jax.jit(gradient).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(1024), temp_bytes(4096)
    assert long < 4.2 * short
    # Less than a fifth of one length x length matrix for each head.
    assert long < 2 * 4096**2 * 4 / 5
