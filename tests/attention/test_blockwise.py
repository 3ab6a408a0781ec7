"""The blockwise form: any length, linear memory, no work where nothing is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from pairwise import dense_oracle, draw

from jaxformer.attention import dense_attention
from jaxformer.attention.block_plan import BLOCK_SIZE_CPU, Plan, make_plan
from jaxformer.attention.terms import Terms


def pairs_of(plan):
    full, masked = plan.pairs()
    return [(*pair, False) for pair in full.tolist()] + [(*pair, True) for pair in masked.tolist()]


@given(
    queries=st.integers(1, 200),
    keys=st.integers(1, 200),
    query_block=st.integers(1, 200),
    key_block=st.integers(1, 200),
    causal=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_pairs_of_blocks_count_every_visible_pair_once(queries, keys, query_block, key_block, causal):
    start = keys - queries if causal else None
    plan = Plan(queries, keys, min(query_block, queries), min(key_block, keys), start, False, 0.0)
    assert plan.num_pairs() == len(pairs_of(plan))
    counted = np.zeros((queries, keys), int)
    seen = np.tril(np.ones((queries, keys), bool), keys - queries) if causal else np.ones((queries, keys), bool)
    for query_start, key_start, query_skip, key_skip, masked in pairs_of(plan):
        rows = slice(query_start + query_skip, query_start + plan.query_block)
        columns = slice(key_start + key_skip, key_start + plan.key_block)
        assert query_start >= 0
        assert rows.stop <= queries
        assert key_start >= 0
        assert columns.stop <= keys
        assert seen[rows, columns].any()
        assert masked or (seen[rows, columns].all() and query_skip == key_skip == 0)
        counted[rows, columns] += 1
    assert (counted[seen] == 1).all()
    assert counted.max() <= 1


@given(length=st.integers(1, 5000))
def test_default_blocks_divide_the_length_evenly(length):
    plan = make_plan(Terms(num_queries=length, num_keys=length), None, 0.0)
    blocks = -(-length // plan.key_block)
    assert plan.key_block <= BLOCK_SIZE_CPU
    assert blocks == -(-length // BLOCK_SIZE_CPU)
    assert blocks * plan.key_block - length < 8 * blocks


def test_causal_pairs_are_half_of_all():
    plan = make_plan(Terms(num_queries=4096, num_keys=4096, causal=True), 512, 0.0)
    full, masked = plan.pairs()
    assert (len(full), len(masked)) == (28, 8)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 13), (6, 6), (8, 16), (13, 13), (17, 9)])
def test_lengths_that_are_no_multiple_of_the_block(queries, keys):
    case = draw(queries=queries, keys=keys)
    output = jax.jit(lambda *inputs: dense_attention(*inputs, block_size=6))(*case.inputs)
    np.testing.assert_allclose(output, dense_oracle(case).output, atol=1e-5)


def temporary_bytes(length, **options):
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]

    def loss(*inputs):
        return (dense_attention(*inputs, implementation="blockwise", block_size=256, **options) ** 2).sum()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dropout", [False, True])
def test_temporary_memory_is_linear_in_length(dropout, rng):
    options = {"causal": True, "dropout_rate": 0.1, "rng": rng} if dropout else {"causal": True}
    short, long = (temporary_bytes(length, **options) for length in (4096, 16384))
    assert long < 4.2 * short
    assert long < 16384 * 16384 // 4


def products(jaxpr):
    """Operations in matrix products, each loop's body counted once a trip."""
    total = 0
    for equation in jaxpr.eqns:
        trips = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = int(np.prod([shape[axis] for axis in contracted]))
            total += 2 * inner * int(np.prod(equation.outvars[0].aval.shape))
        total += trips * sum(products(inner) for inner in jaxprs_in_params(equation.params))
    return total


def test_no_product_touches_blocks_above_the_diagonal():
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    jaxpr = jax.make_jaxpr(
        jax.value_and_grad(lambda *inputs: dense_attention(*inputs, causal=True, block_size=128).sum(), (0, 1, 2))
    )(shape, shape, shape)
    # Two products forward and five backward, each over 36 of the 64 pairs of blocks.
    assert products(jaxpr.jaxpr) == 7 * 36 * 2 * (2 * 128 * 128 * 16)


def test_blocks_that_masks_hide_are_not_computed():
    # A key that would turn the output into NaN if it were multiplied at all.
    case = draw(queries=12, keys=12)
    query, key, value = case.inputs
    segments = np.repeat([1, 2, 3], 4)[None].astype(np.int32)
    given = {"query_segments": segments, "key_segments": segments, "block_size": 4}
    poisoned = value.at[:, 4:].set(jnp.nan)
    output = dense_attention(query, key, poisoned, **given)[:, :4]
    np.testing.assert_array_equal(output, dense_attention(query, key, value, **given)[:, :4])


@pytest.mark.slow
def test_reverse_over_reverse_works():
    case = draw(batch=1, queries=5, keys=5, heads=2, kv_heads=1, head_dim=3, value_dim=3, causal=True)

    def curvature(**form):
        def slope(*inputs):
            gradients = jax.grad(lambda *xs: (dense_attention(*xs, causal=True, **form) ** 3).sum(), (0, 1, 2))(*inputs)
            return sum((gradient**2).sum() for gradient in gradients)

        return jax.jit(jax.grad(slope, (0, 1, 2)))(*case.inputs)

    for got, want in zip(curvature(block_size=2), curvature(implementation="xla")):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-3)


def test_the_plain_form_has_forward_mode():
    case = draw()
    direction = tuple(array + 1 for array in case.inputs)
    _, forward = jax.jvp(lambda *inputs: dense_attention(*inputs, implementation="xla"), case.inputs, direction)
    ends = [
        dense_attention(*(array + step * way for array, way in zip(case.inputs, direction))) for step in (1e-2, -1e-2)
    ]
    np.testing.assert_allclose(forward, (ends[0] - ends[1]) / 2e-2, atol=5e-3)
