"""Clustered attention: grouping by hand, its own limits, chunks of queries, masks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import clustered, clustered_attention, clusters, dense_attention, draw_hash_planes


def draw(*, batch=2, queries=6, keys=9, heads=4, kv_heads=2, head_dim=3, value_dim=5, seed=0):
    random = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, head_dim),
        (batch, keys, kv_heads, head_dim),
        (batch, keys, kv_heads, value_dim),
    ]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_queries_on_two_sides_form_two_clusters():
    """One bit: the sign. Queries 3, 1 | -2, -4 have the means 2 and -3, and share those means' weights."""
    query = jnp.asarray([3.0, -2.0, 1.0, -4.0]).reshape(1, 4, 1, 1)
    key = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1)
    value = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1)
    planes = jnp.ones((1, 1))
    exists = jnp.ones((1, 4), bool)
    cluster = jax.jit(clusters.cluster_queries, static_argnums=(3, 4))
    assert cluster(query, planes, exists, 2, 1).ravel().tolist() == [0, 1, 0, 1]
    # A query that doesn't exist is still nearest to the second.
    assert cluster(query, planes, exists.at[0, 1].set(False), 2, 1).ravel().tolist() == [0, 1, 0, 1]
    attend = jax.jit(clustered_attention, static_argnames=("num_clusters", "top_k", "scale"))
    options = {"hash_planes": planes, "num_clusters": 2, "scale": 1.0}
    high, low = 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(3))
    # The best key of each cluster keeps the cluster's weight, as it is the only one to share it.
    for top_k in (None, 1):
        output = attend(query, key, value, top_k=top_k, **options)
        np.testing.assert_allclose(output.ravel(), [high, low, high, low], rtol=1e-6)


def test_a_cluster_for_every_query_is_dense_attention(rng):
    query, key, value = draw(queries=5)
    planes = draw_hash_planes(rng, 3)
    assert planes.shape == (3, 63)
    output = jax.jit(lambda *arrays: clustered_attention(*arrays, hash_planes=planes, num_clusters=5))(
        query, key, value
    )
    np.testing.assert_allclose(output, dense_attention(query, key, value), atol=1e-5)


@pytest.mark.slow
def test_chunks_of_queries_change_nothing(rng, monkeypatch):
    query, key, value = draw(queries=7)
    planes = draw_hash_planes(rng, 3, 8)
    mask = np.random.default_rng(1).random((2, 9)) < 0.7

    def run():
        def loss(*arrays):
            output = clustered_attention(*arrays, hash_planes=planes, num_clusters=2, top_k=3, key_mask=mask)
            return jnp.sin(output).sum(), output

        return jax.jit(jax.grad(loss, 1, has_aux=True))(query, key, value)

    want = run()
    monkeypatch.setattr(clustered, "CHUNK", 3)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), run(), want)


def test_queries_that_do_not_exist_shape_no_cluster(rng):
    query, key, value = draw()
    planes = draw_hash_planes(rng, 3, 8)
    mask = np.asarray([[1, 1, 0, 1, 1, 0]])

    @jax.jit
    def run(query):
        return clustered_attention(query, key, value, hash_planes=planes, num_clusters=2, query_mask=mask)

    other = np.where(mask[:, :, None, None] != 0, query, np.nan).astype(np.float32)
    kept = np.flatnonzero(mask[0])
    np.testing.assert_array_equal(run(other)[:, kept], run(query)[:, kept])
    with pytest.raises(ValueError, match=r"query_mask has shape \(1, 5\)"):
        clustered_attention(query, key, value, hash_planes=planes, num_clusters=2, query_mask=mask[:, :5])


def test_unfit_arguments_are_refused(rng):
    query, key, value = draw()
    refused = {
        "cannot be causal: the queries of a cluster": {"causal": True},
        "num_clusters is 0": {"num_clusters": 0},
        "num_iterations is 0": {"num_iterations": 0},
        "top_k is 0": {"top_k": 0},
        r"hash_planes has shape \(4, 8\)": {"hash_planes": np.ones((4, 8), np.float32)},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            clustered_attention(query, key, value, **{"hash_planes": np.ones((3, 8)), "num_clusters": 2, **options})


@pytest.mark.slow
def test_memory_is_linear():
    def bytes_at(length):
        tokens = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

        def loss(tokens):
            options = {"hash_planes": jnp.ones((16, 8)), "num_clusters": 4, "top_k": 8}
            return clustered_attention(tokens, tokens, tokens, **options).sum()

        return jax.jit(jax.grad(loss)).lower(tokens).compile().memory_analysis().temp_size_in_bytes

    assert bytes_at(4096) < 2.2 * bytes_at(2048)
