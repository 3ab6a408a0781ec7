"""ALiBi and T5 biases against published slopes and buckets, and loops over every pair."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import AlibiBias, RelativeBias, alibi_slopes, relative_position_bucket

QUERY_POSITIONS = np.array([[3, 4, 5], [0, 9, 200]])
KEY_POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 40, 9, 8, 7, 300, 1]])


def bucket_by_formula(relative, bidirectional, num_buckets, max_distance):
    """One pair at a time, in float64, as the paper's code states it."""
    offset = 0
    if bidirectional:
        num_buckets //= 2
        offset = num_buckets if relative > 0 else 0
    distance = abs(relative) if bidirectional else max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return offset + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(share * (num_buckets - exact) + 1e-9), num_buckets - 1)


def test_slopes_of_a_power_of_two_are_the_papers():
    np.testing.assert_allclose(alibi_slopes(8), [1 / 2**i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2 ** (-i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(1), [2**-8])


def test_slopes_of_other_counts_are_filled_up_from_the_next_power():
    expected = [1 / 2**i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-6)


def test_two_way_buckets_are_those_of_t5():
    table = {0: 0, -1: 1, -7: 7, -8: 8, -20: 10, -64: 14, -300: 15, 1: 17, 8: 24, 20: 26, 300: 31}
    buckets = relative_position_bucket(np.array(list(table)), bidirectional=True)
    np.testing.assert_array_equal(buckets, list(table.values()))
    assert buckets.dtype == jnp.int32


def test_one_way_buckets_are_those_of_t5():
    table = {5: 0, 300: 0, 0: 0, -1: 1, -15: 15, -16: 16, -20: 17, -32: 21, -64: 26, -300: 31}
    buckets = relative_position_bucket(np.array(list(table)), bidirectional=False)
    np.testing.assert_array_equal(buckets, list(table.values()))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 7), (6, 33), (64, 1000)])
def test_buckets_follow_the_formula_and_use_every_bucket(bidirectional, num_buckets, max_distance):
    relative = np.arange(-1500, 1501)
    buckets = relative_position_bucket(
        relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    expected = [bucket_by_formula(int(r), bidirectional, num_buckets, max_distance) for r in relative]
    np.testing.assert_array_equal(buckets, expected)
    # Bucket num_buckets / 2 would hold distance 0 of keys after the query: there is none.
    missing = {num_buckets // 2} if bidirectional else set()
    assert set(np.asarray(buckets).tolist()) == set(range(num_buckets)) - missing


def test_alibi_falls_linearly_with_distance():
    slopes = np.array([0.5, 0.125, 3.0, 1.0, 0.25], np.float32)
    bias = AlibiBias(slopes)(QUERY_POSITIONS, KEY_POSITIONS)
    expected = np.empty((2, 5, 3, 7), np.float32)
    for b, n, t, s in np.ndindex(expected.shape):
        expected[b, n, t, s] = -slopes[n] * abs(int(QUERY_POSITIONS[b, t]) - int(KEY_POSITIONS[b, s]))
    np.testing.assert_array_equal(bias, expected)
    assert bias.dtype == jnp.float32


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_reads_the_bucket_of_each_pair(rng, bidirectional):
    table = jax.random.normal(rng, (8, 5))
    bias = RelativeBias(table, bidirectional=bidirectional, max_distance=50)(QUERY_POSITIONS, KEY_POSITIONS)
    assert bias.shape == (2, 5, 3, 7)
    for b, n, t, s in np.ndindex(bias.shape):
        relative = int(KEY_POSITIONS[b, s]) - int(QUERY_POSITIONS[b, t])
        assert bias[b, n, t, s] == table[bucket_by_formula(relative, bidirectional, 8, 50), n]


def test_a_token_decoded_alone_gets_its_own_row_of_the_bias(rng):
    """The row of a new token stands at its position, not at 0; blocks are cut-outs of the whole."""
    positions = np.arange(6)[None]
    for bias in (RelativeBias(jax.random.normal(rng, (32, 3)), bidirectional=False), AlibiBias(alibi_slopes(3))):
        whole = bias(positions, positions)
        for step in (0, 3, 5):
            np.testing.assert_array_equal(bias(positions[:, step : step + 1], positions), whole[:, :, step : step + 1])
        np.testing.assert_array_equal(bias(positions[:, 2:4], positions[:, 1:4]), whole[:, :, 2:4, 1:4])


def test_the_table_gets_the_gradient_of_every_pair_in_its_bucket(rng):
    table, cotangent = jax.random.normal(rng, (8, 5)), np.random.default_rng(0).normal(size=(2, 5, 3, 7))
    cotangent = cotangent.astype(np.float32)
    gradient = jax.jit(jax.grad(lambda bias: (bias(QUERY_POSITIONS, KEY_POSITIONS) * cotangent).sum()))(
        RelativeBias(table, bidirectional=True, max_distance=50)
    )
    expected = np.zeros((8, 5))
    for b, n, t, s in np.ndindex(cotangent.shape):
        relative = int(KEY_POSITIONS[b, s]) - int(QUERY_POSITIONS[b, t])
        expected[bucket_by_formula(relative, True, 8, 50), n] += cotangent[b, n, t, s]
    assert isinstance(gradient, RelativeBias)
    np.testing.assert_allclose(gradient.table, expected, atol=1e-5)


def test_slopes_may_be_learned():
    gradient = jax.grad(lambda bias: bias(QUERY_POSITIONS, KEY_POSITIONS).sum())(AlibiBias(alibi_slopes(5)))
    distances = np.abs(QUERY_POSITIONS[:, :, None] - KEY_POSITIONS[:, None, :]).sum()
    np.testing.assert_allclose(gradient.slopes, np.full(5, -distances))


def test_biases_are_pytrees_that_stack_over_layers(rng):
    """A stack of layers maps over one bias with a leading axis, and transformations see its arrays alone."""
    tables = jax.random.normal(rng, (3, 8, 5))
    stacked = RelativeBias(tables, bidirectional=True, max_distance=50)
    result = jax.vmap(lambda bias: bias(QUERY_POSITIONS, KEY_POSITIONS))(stacked)
    alone = RelativeBias(tables[1], bidirectional=True, max_distance=50)(QUERY_POSITIONS, KEY_POSITIONS)
    np.testing.assert_array_equal(result[1], alone)
    assert [leaf.shape for leaf in jax.tree.leaves(stacked)] == [(3, 8, 5)]
    assert jax.tree.map(jnp.shape, AlibiBias(alibi_slopes(5))).slopes == (5,)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_parameters_give_float32_biases(rng, dtype):
    table = jax.random.normal(rng, (8, 5)).astype(dtype)
    assert RelativeBias(table, bidirectional=True)(QUERY_POSITIONS, KEY_POSITIONS).dtype == jnp.float32
    bias = AlibiBias(jnp.ones(5, dtype))(np.array([[0]]), np.array([[257, 259]]))
    np.testing.assert_array_equal(bias[0, 0, 0], [-257, -259])


def test_float64_parameters_give_float64_biases():
    with jax.enable_x64(True):
        assert AlibiBias(jnp.ones(5))(QUERY_POSITIONS, KEY_POSITIONS).dtype == jnp.float64
        bias = RelativeBias(jnp.ones((8, 5)), bidirectional=True)(QUERY_POSITIONS, KEY_POSITIONS)
        assert bias.dtype == jnp.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alibi_slopes(0), "num_heads is 0"),
        (lambda: relative_position_bucket(np.ones(3, np.float32), bidirectional=True), "relative_position is float32"),
        (lambda: relative_position_bucket(np.arange(3), bidirectional=True, num_buckets=31), "num_buckets is 31"),
        (lambda: relative_position_bucket(np.arange(3), bidirectional=True, num_buckets=2), "num_buckets is 2"),
        (lambda: relative_position_bucket(np.arange(3), bidirectional=False, num_buckets=1), "num_buckets is 1"),
        (lambda: relative_position_bucket(np.arange(3), bidirectional=False, max_distance=16), "max_distance is 16"),
        (lambda: AlibiBias(np.ones(5))(np.arange(3), KEY_POSITIONS), r"query_positions has shape \(3,\)"),
        (lambda: AlibiBias(np.ones(5))(QUERY_POSITIONS, KEY_POSITIONS * 1.0), "key_positions is float"),
        (lambda: RelativeBias(np.ones((7, 5)), bidirectional=True)(QUERY_POSITIONS, KEY_POSITIONS), "num_buckets is 7"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
