"""Routing attention by hand-computed clusters: who is chosen, what leaks, how centroids move, decoding, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import (
    init_routing_cache,
    routing_attention,
    routing_attention_weights,
    routing_step,
    routing_update,
)
from jaxformer.attention.routing_clusters import routing_vectors

# Routing vectors of (a, -a) are (1, -1) / sqrt(2) or its opposite, whatever is added to both.
PLUS, MINUS = np.array([3.0, 1.0], np.float32), np.array([-1.0, 1.0], np.float32)
TWO = np.array([[[1, -1], [-1, 1]]], np.float32)


def tokens_of(*vectors):
    return np.stack(vectors)[None, :, None]


def draw(length, heads=2, head_dim=5, value_dim=3, clusters=3, seed=0):
    random = np.random.default_rng(seed)
    query, key = random.standard_normal((2, 2, length, heads, head_dim)).astype(np.float32)
    value = random.standard_normal((2, length, heads, value_dim)).astype(np.float32)
    return query, key, value, random.standard_normal((heads, clusters, head_dim)).astype(np.float32)


def weights_of(query, key, **options):
    return np.asarray(jax.jit(functools.partial(routing_attention_weights, **options))(query, key))


def test_clusters_take_the_nearest_in_order_of_position():
    # Tokens 1, 2, 4 are of the first cluster, 0 and 3 of the second; all of one cluster are equally near.
    x = tokens_of(MINUS, PLUS, PLUS, MINUS, PLUS)
    wide = weights_of(x, x * 1e-9, centroids=TWO, window=3)[0, 0]
    # The second cluster's third place goes to the first of the others, which so has two clusters.
    third, half = 1 / 3, 1 / 2
    first = [0, third, third, 0, third]
    second = [third, third, 0, third, 0]
    mean = [(a + b) / 2 for a, b in zip(first, second)]
    np.testing.assert_allclose(wide, [second, mean, first, second, first], atol=1e-6)
    narrow = weights_of(x, x * 1e-9, centroids=TWO, window=2)[0, 0]
    # Token 4 was pushed out by 1 and 2: it is in no cluster.
    np.testing.assert_allclose(narrow[[1, 4]], [[0, half, half, 0, 0], [0] * 5], atol=1e-6)
    causal = weights_of(x, x * 1e-9, centroids=TWO, window=3, causal=True)[0, 0]
    np.testing.assert_allclose(causal[[0, 2, 4]], [[1, 0, 0, 0, 0], [0, half, half, 0, 0], first], atol=1e-6)
    # Token 1 sees itself in the first cluster, and tokens 0 and 1 in the second.
    np.testing.assert_allclose(causal[1], [1 / 4, 3 / 4, 0, 0, 0], atol=1e-6)


def test_features_that_are_nearly_equal_have_an_exact_direction():
    tokens = np.float32(0.1) + np.float32(2**-27) * np.array([[0, 0, 0], [0, 1, 2], [3, 0, 0]], np.float32)
    vectors, pull = jax.vjp(jax.jit(routing_vectors), jnp.asarray(tokens))
    half, third = 0.5**0.5, 6**-0.5
    np.testing.assert_allclose(vectors, [[0, 0, 0], [-half, 0, half], [2 * third, -third, -third]], atol=1e-6)
    assert np.isfinite(pull(jnp.ones((3, 3), jnp.float32))[0]).all()
    np.testing.assert_allclose(routing_vectors(vectors * 3e38), vectors, atol=1e-6)


@pytest.mark.slow
def test_padding_is_never_chosen():
    x = tokens_of(PLUS, PLUS, MINUS, PLUS)
    mask = np.array([[0, 1, 1, 1]])
    output = routing_attention(x, x * 1e-9, x, centroids=TWO[:, :1], window=2, key_mask=mask)
    np.testing.assert_allclose(output[0, :, 0], [[0, 0], PLUS, [0, 0], PLUS], atol=1e-6)
    assert not routing_attention(x, x, x, centroids=TWO, window=2, key_mask=mask * 0).any()


def test_the_choice_of_past_keys_depends_on_later_tokens():
    query, key, _, centroids = draw(24)
    later = np.where(np.arange(24)[None, :, None, None] < 12, key, -key)
    options = {"centroids": centroids, "window": 6, "causal": True}
    seen, changed = (weights_of(query, keys, **options)[:, :, :12] != 0 for keys in (key, later))
    assert (seen != changed).any()
    assert not (seen | changed)[:, :, np.triu_indices(12, 1)[0], np.triu_indices(12, 1)[1]].any()


def test_centroids_move_to_the_mean_of_their_tokens():
    x = tokens_of(PLUS, MINUS, PLUS)
    unit = np.array([1, -1], np.float32) / np.sqrt(np.float32(2))
    centroids = np.array([[[2, -1], [-1, 2], [0.5, 0.6]]], np.float32)
    # Queries are two of the first and one of the second, keys one and one; the third has none and stays.
    keys, mask = tokens_of(PLUS, MINUS, MINUS), np.array([[1, 1, 0]])
    moved, loss = routing_update(centroids, x, keys, key_mask=mask, decay=0.75)
    wanted = [0.75 * centroids[0, 0] + 0.25 * unit, 0.75 * centroids[0, 1] - 0.25 * unit, centroids[0, 2]]
    np.testing.assert_allclose(moved[0], wanted, rtol=1e-5)
    apart = ((unit - centroids[0, 0]) ** 2).sum()
    np.testing.assert_allclose(loss, apart, rtol=1e-5)
    still, nothing = routing_update(centroids, x, keys, key_mask=mask * 0)
    np.testing.assert_array_equal(still, centroids)
    assert nothing == 0


@pytest.mark.slow
def test_the_loss_draws_tokens_and_not_centroids():
    query, key, _, centroids = draw(7)
    mask = np.arange(7)[None] < 5

    def loss(centroids, query, key):
        moved, loss = routing_update(centroids, query, key, key_mask=mask)
        return loss + moved.sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    before, (d_centroids, d_query, d_key) = run(centroids, query, key)
    assert not d_centroids.any()
    assert not d_query[:, 5:].any()
    assert not d_key[:, 5:].any()
    start = routing_update(centroids, query, key, key_mask=mask)[1]
    assert routing_update(centroids, query - 0.1 * d_query, key - 0.1 * d_key, key_mask=mask)[1] < start
    poisoned = np.where(mask[..., None, None], query, np.nan)
    assert run(centroids, poisoned, key)[0] == before


def test_centroids_come_to_stand_in_their_clusters():
    """Four separate directions, each a centroid's in the end."""
    random = np.random.default_rng(1)
    directions = np.eye(5, dtype=np.float32)[:4] * 4
    x = directions[random.integers(0, 4, (2, 32, 1))] + 0.1 * random.standard_normal((2, 32, 1, 5)).astype(np.float32)
    start = (directions + random.standard_normal((4, 5)).astype(np.float32) * 0.5)[None]

    @jax.jit
    def train(centroids):
        return jax.lax.scan(lambda state, _: routing_update(state, x, x, decay=0.5), centroids, length=20)

    _, losses = train(start)
    assert losses[-1] < 0.05 < losses[0]


@pytest.mark.slow
def test_decoding_equals_the_full_pass_with_one_cluster():
    query, key, value, centroids = draw(6, clusters=1)
    attend = functools.partial(routing_attention, centroids=centroids, window=6, causal=True)
    want = jax.jit(attend)(query, key, value)
    # The second of two stacked layers.
    empty = init_routing_cache(2, 6, 2, 5, value_dim=3)
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), empty)
    step = jax.jit(functools.partial(routing_step, centroids=centroids, layer=1))
    for token in range(6):
        part = slice(token, token + 1)
        got, cache = step(cache, query[:, part], key[:, part], value[:, part])
        np.testing.assert_allclose(got[:, 0], want[:, token], atol=1e-6)
    jax.tree.map(lambda leaf, start: np.testing.assert_array_equal(leaf[0], start), cache, empty)


@pytest.mark.slow
def test_memory_grows_with_length_alone():
    """65,536 tokens in 256 clusters of 256, 4 heads of 32, forward and backward; all pairs would take 64 GiB."""
    tokens = jax.ShapeDtypeStruct((1, 65536, 4, 32), jnp.float32)
    centroids = jax.ShapeDtypeStruct((4, 256, 32), jnp.float32)

    def loss(query, key, value, centroids):
        return routing_attention(query, key, value, centroids=centroids, window=256, causal=True).sum()

    slope = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    compiled = slope.lower(tokens, tokens, tokens, centroids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2**30


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("window is 0", {"window": 0}),
        ("centroids", {"centroids": np.zeros((2, 3, 4), np.float32)}),
        ("centroids", {"centroids": np.zeros((2, 0, 5), np.float32)}),
        ("key has 3 tokens|value|key 3", {"key": np.zeros((2, 3, 2, 5), np.float32)}),
        ("query has 2 heads and key 1", {"key": np.zeros((2, 4, 1, 5), np.float32)}),
    ],
)
def test_unfit_options_are_refused_by_name(message, options):
    query, key, value, centroids = draw(4)
    given = {"key": key, "centroids": centroids, "window": 2, **options}
    with pytest.raises(ValueError, match=message):
        routing_attention(query, value=value, **given)


def test_unfit_updates_and_steps_are_refused_by_name():
    query, key, value, centroids = draw(4)
    with pytest.raises(ValueError, match="decay is 2"):
        routing_update(centroids, query, key, decay=2.0)
    with pytest.raises(ValueError, match="4 tokens do not fit"):
        routing_step(init_routing_cache(2, 3, 2, 5, value_dim=3), query, key, value, centroids=centroids)
    with pytest.raises(ValueError, match="max_length is 0"):
        init_routing_cache(2, 0, 2, 5)
