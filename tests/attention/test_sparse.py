"""The engine of sparse attention, global tokens of both sorts, and what it computes and holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import dot_products, weighted_values
from test_blockwise import products

from jaxformer.attention import (
    PATTERNS,
    dense_attention,
    local_attention,
    local_attention_weights,
    longformer_attention,
    pair_batches,
    sparse_attention,
    sparse_attention_weights,
)
from jaxformer.attention.block_cuts import Batches, Blocks, Lanes
from jaxformer.attention.components import Component
from jaxformer.attention.part_blocks import Dropout, Source, make_blocks
from jaxformer.attention.patterns import (
    bigbird,
    blocks,
    dilated,
    everything,
    fixed,
    global_tokens,
    local,
    random_blocks,
    strided,
)
from jaxformer.attention.sparse_engine import Part, attend_parts
from jaxformer.attention.token_order import TokenOrder

LENGTH = 37
SEGMENTS = np.stack([np.arange(LENGTH) // 13, np.arange(LENGTH) // 20]).astype(np.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def tensors(length=LENGTH, heads=4, kv_heads=2):
    return normal(0, 2, length, heads, 5), normal(1, 2, length, kv_heads, 5), normal(2, 2, length, kv_heads, 3)


def naive(query, key, value, see):
    """Softmax attention over the pairs of `see`, which broadcasts to [B, N, T, S]."""
    logits = jnp.where(see, jnp.float32(query.shape[-1] ** -0.5) * dot_products(query, key), jnp.float32(-1e30))
    powers = jnp.where(see, jnp.exp(logits - logits.max(-1, keepdims=True)), jnp.float32(0))
    total = powers.sum(-1, keepdims=True)
    return weighted_values(powers / jnp.where(total == 0, jnp.float32(1), total), value)


@jax.jit
def dense(query, key, value, mask):
    return dense_attention(query, key, value, mask=mask[None, None], implementation="xla")


def compare(function, oracle, *inputs):
    """Values and gradients of two functions."""
    d_output = normal(9, *jax.eval_shape(function, *inputs).shape)

    def both(function):
        def run(*inputs):
            output, pull = jax.vjp(function, *inputs)
            return output, pull(d_output)

        return jax.jit(run)(*inputs)

    got = both(function)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        want = both(oracle)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)


@pytest.mark.parametrize(
    "pattern",
    [
        fixed(6, 2),
        bigbird(4, 2, seed=3),
        dilated((2, 1), 5),
        blocks(8) & local(3),
        global_tokens((40,)),
    ],
    ids=repr,
)
def test_patterns_are_dense_attention_with_their_mask(pattern):
    query, key, value = tensors()
    for causal in (False, True):
        got = jax.jit(lambda *xs, causal=causal: sparse_attention(*xs, pattern=pattern, causal=causal))(
            query, key, value
        )
        want = dense(query, key, value, pattern.mask(LENGTH) & (np.tri(LENGTH, dtype=bool) | (not causal)))
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_engine_merges_components_over_any_orders_of_queries_and_keys():
    """Two components, the second of a few queries and keys in no order, with empty slots at both ends."""
    random = np.random.default_rng(5)
    table = random.random((LENGTH, LENGTH)) < 0.4
    few_queries, few_keys = random.permutation(LENGTH)[:5], random.permutation(LENGTH)[:9]
    inside = np.zeros_like(table)
    inside[np.ix_(few_queries, few_keys)] = True

    def look_up(table):
        return lambda queries, keys: jnp.asarray(table)[queries, keys]

    def component(layout, query_order, key_order, query_block, key_block, table):
        starts = np.indices((len(query_order) // query_block, len(key_order) // key_block)).reshape(2, -1).T
        pairs = (starts * [query_block, key_block]).astype(np.int32)
        full = np.zeros(len(pairs), bool)
        orders = (np.asarray(order, np.int32) for order in (query_order, key_order))
        return Component(layout, *orders, pairs, full, query_block, key_block, look_up(table))

    shuffled = np.concatenate([[-1, -1], random.permutation(LENGTH), [-1]])
    parts = [
        Part(component("permuted", shuffled, shuffled, 8, 4, table & ~inside), 0),
        Part(component("gathered", [-1, *few_queries], [-1, *few_keys, -1, -1], 3, 6, table & inside), 0),
    ]

    def attend(query, key, value):
        return attend_parts(parts, query * jnp.float32(5**-0.5), None, (Source(key, value),), 0.0, None)

    compare(attend, lambda *xs: naive(*xs, see=table), *tensors())


@pytest.mark.parametrize(
    "pattern",
    [
        strided(7),
        pytest.param(random_blocks(2, seed=1, block_size=4) | global_tokens((3,)), marks=pytest.mark.slow),
    ],
    ids=["strides", "batches"],
)
def test_every_way_to_cut_blocks_has_the_gradients_of_dense_attention(pattern, monkeypatch):
    """Strides that do not divide the length beside a window; batches of pairs beside a single row; padding."""
    monkeypatch.setattr(pair_batches, "BATCH_AREA", 3 * 4 * 4)
    monkeypatch.setattr(pair_batches, "FEWEST_BATCHES", 1)
    key_mask = np.random.default_rng(3).random((2, LENGTH)) < 0.8
    ways = {type(blocks) for blocks in ways_of(pattern)}
    assert ways == ({Blocks, Lanes} if pattern == strided(7) else {Blocks, Batches})

    def attend(query, key, value):
        return sparse_attention(query, key, value, pattern=pattern, key_mask=key_mask)

    compare(attend, lambda *xs: naive(*xs, see=pattern.mask(LENGTH) & key_mask[:, None, None, :]), *tensors())


def ways_of(pattern):
    source = Source(*tensors()[1:], mask=jnp.ones((2, LENGTH), bool))
    for component in pattern.components(LENGTH):
        orders = (TokenOrder(order, LENGTH) for order in (component.query_order, component.key_order))
        yield from make_blocks(component, *orders, source, None, Dropout(0.0, None), (False, False))


def test_batches_hold_every_pair_once_and_no_token_twice():
    random = np.random.default_rng(0)
    starts = random.integers(0, 1000, 400) * 3
    pairs = np.unique(np.stack([random.integers(0, 50, 400) * 16, starts], 1), axis=0).astype(np.int32)
    batches, rest = pair_batches.batch_pairs(pairs, 16, 256)
    assert len(batches) > 2 * len(rest) / 4
    assert batches.shape[1] == 8
    found = [tuple(pair) for batch in batches for pair in batch.reshape(2, -1).T] + [tuple(pair) for pair in rest]
    assert sorted(found) == [tuple(pair) for pair in pairs]
    for batch in batches:
        queries, keys = batch.reshape(2, -1)
        assert len(set(queries)) == 4
        assert (np.diff(np.sort(keys)) >= 256).all()


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chosen_and_added_tokens_are_seen_once_by_all(causal):
    """With padding and documents: chosen tokens obey them, added tokens do not."""
    key_mask = np.random.default_rng(2).random((2, LENGTH)) < 0.8
    chosen = np.zeros((2, LENGTH), bool)
    chosen[0, [0, 7, 30]], chosen[1, [3, 22]] = True, True
    near = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))) <= 2
    see = near | chosen[:, :, None] | chosen[:, None, :]
    see &= key_mask[:, None] & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    see &= np.tri(LENGTH, dtype=bool) | (not causal)
    see = np.pad(see, ((0, 0), (0, 0), (2, 0)), constant_values=True)[:, None]
    options = {"key_mask": key_mask, "query_segments": SEGMENTS, "causal": causal}
    options |= {"pattern": local(2), "global_mask": chosen.astype(np.int32), "num_global": 4}

    def function(query, key, value, global_key, global_value):
        return sparse_attention(query, key, value, global_key=global_key, global_value=global_value, **options)

    def oracle(query, key, value, *added):
        more = (jnp.broadcast_to(array, (2, *array.shape[1:])) for array in added)
        key, value = (jnp.concatenate([one, own], 1) for one, own in zip(more, (key, value)))
        return naive(query, key, value, see)

    added = normal(3, 1, 2, 2, 5), normal(4, 2, 2, 2, 3)
    if causal:
        compare(function, oracle, *tensors(), *added)
    else:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            want = jax.jit(oracle)(*tensors(), *added)
        np.testing.assert_allclose(jax.jit(function)(*tensors(), *added), want, atol=1e-5)
    query, key, _ = tensors()
    weights = sparse_attention_weights(query, key, global_key=added[0], **options)
    np.testing.assert_array_equal(weights != 0, np.broadcast_to(see, weights.shape))


def test_global_tokens_without_a_pattern_to_share_are_those_of_the_pattern():
    chosen = np.isin(np.arange(LENGTH), (1, 9))[None]
    inputs = tensors()
    by_mask = jax.jit(
        lambda mask: sparse_attention(*inputs, pattern=local((3, 0)), causal=True, global_mask=mask, num_global=2)
    )
    pattern = local((3, 0)) | global_tokens((1, 9))
    want = dense(*inputs, pattern.mask(LENGTH) & np.tri(LENGTH, dtype=bool))
    np.testing.assert_allclose(by_mask(chosen), want, atol=1e-5)
    np.testing.assert_array_equal(by_mask(chosen | (np.arange(LENGTH) == 20)), by_mask(chosen))


def test_longformer_with_equal_projections_is_a_pattern_for_each_example():
    query, key, value = tensors()
    chosen = np.zeros((2, LENGTH), bool)
    chosen[0, [0, 5]], chosen[1, 30] = True, True
    same = {"global_query": query, "global_key": key, "global_value": value, "window": 2, "dilation": 3}
    run = jax.jit(lambda mask: longformer_attention(query, key, value, global_mask=mask, num_global=2, **same))
    for example, indices in enumerate([(0, 5), (30,)]):
        want = dense(query, key, value, (dilated(2, 3) | global_tokens(indices)).mask(LENGTH))
        np.testing.assert_allclose(run(chosen)[example], want[example], atol=1e-5)


def test_a_causal_window_of_three_sees_four_tokens():
    # Equal scores: each query gets the mean of the numbers of the tokens that it sees.
    length = 8
    zeros = np.zeros((1, length, 1, 2), np.float32)
    value = np.arange(length, dtype=np.float32).reshape(1, length, 1, 1)
    weights = jax.jit(lambda *xs: local_attention_weights(*xs, window=3, causal=True))(zeros, zeros)
    assert int((weights > 0).sum()) == 26
    output = jax.jit(lambda *xs: local_attention(*xs, window=3, causal=True))(zeros, zeros, value)
    np.testing.assert_allclose(output.ravel(), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], atol=1e-6)


@pytest.mark.slow
def test_a_query_that_sees_nothing_gets_zeros_beside_one_that_sees():
    query, key = np.ones((1, 3, 1, 4), np.float32), np.ones((1, 3, 1, 4), np.float32)
    value = np.arange(12, dtype=np.float32).reshape(1, 3, 1, 4)
    key_mask = np.array([[True, False, False]])
    run = jax.vjp(lambda *xs: sparse_attention(*xs, pattern=dilated(1, 2), key_mask=key_mask), query, key, value)
    np.testing.assert_array_equal(run[0][0, :, 0], [value[0, 0, 0], np.zeros(4), value[0, 0, 0]])
    d_query, d_key, d_value = run[1](jnp.ones_like(run[0]))
    np.testing.assert_array_equal(d_value[0, :, 0, 0], [2, 0, 0])
    assert np.isfinite(d_query).all()
    assert np.isfinite(d_key).all()


@pytest.mark.slow
def test_dropout_is_the_same_backwards_and_keeps_the_mean(rng):
    query, key, value = tensors()
    mask = np.isin(np.arange(LENGTH), (3, 8))[None]
    options = {"pattern": local(5), "global_mask": mask, "num_global": 2, "dropout_rate": 0.3}

    @jax.jit
    def run(value, rng):
        return jax.value_and_grad(lambda value: sparse_attention(query, key, value, rng=rng, **options).sum())(value)

    # The output is linear in the values.
    output, gradient = run(value, rng)
    np.testing.assert_allclose(output, (gradient * value).sum(), rtol=1e-4)
    ones = jnp.ones_like(value)
    outputs = [run(ones, jax.random.fold_in(rng, number))[0] for number in range(8)]
    assert len(set(map(float, outputs))) == 8
    assert abs(np.mean(outputs) / (2 * LENGTH * 4 * 3) - 1) < 0.02
    assert float(run(ones, rng)[0]) == float(run(ones, rng)[0])


def temporary_bytes(length, **options):
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    function = jax.jit(
        jax.value_and_grad(lambda *xs: (sparse_attention(*xs, causal=True, **options) ** 2).sum(), (0, 1, 2))
    )
    return function.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_temporary_memory_is_linear_in_length():
    short, long = (temporary_bytes(length, pattern=strided(128)) for length in (4096, 16384))
    assert long < 4.2 * short
    assert long < 16384 * 16384 // 2  # bytes: no mask over all pairs, let alone weights


@pytest.mark.parametrize(
    ("odd", "even"),
    [
        pytest.param((dilated(64, 4), 4095), (dilated(64, 4), 4096), marks=pytest.mark.slow),
        ((strided(45), 8192), (strided(90), 8192)),
    ],
    ids=["token_short", "stride_that_divides_nothing"],
)
def test_a_length_that_blocks_do_not_divide_takes_no_padded_copies(odd, even):
    # Copies of query, key, value and gradient would add over a quarter. Each lane of stride 90 is one block of 92.
    taken, wanted = (temporary_bytes(length, pattern=pattern) for pattern, length in (odd, even))
    assert taken < 1.1 * wanted


def test_no_product_is_made_beside_the_components():
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    pattern = strided(32)
    jaxpr = jax.make_jaxpr(
        jax.value_and_grad(lambda *xs: sparse_attention(*xs, pattern=pattern, causal=True).sum(), (0, 1, 2))
    )(shape, shape, shape)
    # Two products forward and five backward, for two heads.
    executed = pattern.executed_pairs(1024, True)
    assert products(jaxpr.jaxpr) == 7 * 2 * 2 * 16 * executed
    assert executed < 2 * pattern.num_pairs(1024, True)


def test_every_named_pattern_has_its_constructors_name():
    examples = {
        "dilated": dilated(2, 3),
        "strided": strided(4),
        "fixed": fixed(4, 1),
        "bigbird": bigbird(4, 1, seed=0),
        "random_blocks": random_blocks(1, 0, 4),
        "global_tokens": global_tokens((0,)),
    }
    assert set(PATTERNS) == set(examples)
    for name, kind in PATTERNS.items():
        assert kind.name == kind.constructor.__name__ == name
        assert kind.packing == examples[name].shift_invariant


def test_what_cannot_be_is_refused():
    query, key, value = tensors()
    mask = np.ones((2, LENGTH), bool)
    for message, options in [
        ("pattern is", {"pattern": ()}),
        ("3 parts for 4 heads", {"pattern": (local(1),) * 3}),
        ("num_global is None", {"global_mask": mask}),
        ("chooses 37 tokens", {"global_mask": mask, "num_global": 2}),
        ("num_global is 2; it goes", {"num_global": 2}),
        ("global_mask has shape", {"global_mask": mask[:, 1:], "num_global": 2}),
        ("go together", {"global_key": key}),
        ("global_value has shape", {"global_key": key, "global_value": key}),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_attention(query, key, value, **{"pattern": everything(), **options})
    with pytest.raises(ValueError, match="one sequence"):
        sparse_attention(query[:, :5], key, value, pattern=everything())
    same = {"global_query": query, "global_key": key, "global_value": value, "window": 2}
    for message, options in [
        ("give one of them", {"global_indices": (0,), "global_mask": mask, "num_global": 1}),
        ("different numbers", {"global_indices": (0, 0)}),
        ("global_key has shape", {"global_key": value}),
    ]:
        with pytest.raises(ValueError, match=message):
            longformer_attention(query, key, value, **{**same, **options})
