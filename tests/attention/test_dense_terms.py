"""Dense attention by each implementation under positions, segments and masks, against a loop over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import dense_oracle, draw, see

from jaxformer.attention import dense_attention, dense_attention_weights

IMPLEMENTATIONS = {
    "xla": {"implementation": "xla"},
    "blockwise": {"implementation": "blockwise"},
    "blocks_of_4": {"implementation": "blockwise", "block_size": 4},
}
each_implementation = pytest.mark.parametrize("how", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
# Small blocks meet every border; the others run with the slow tests.
each_implementation_of_values = pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=() if name == "blocks_of_4" else pytest.mark.slow, id=name)
        for name, how in IMPLEMENTATIONS.items()
    ],
)


def random_mask(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.7


def integers(seed, high, *shape):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def hide_row(mask, row):
    """The mask with nothing left to see in one query's row."""
    mask = mask.copy()
    mask[..., row, :] = False
    return mask


CASES = {
    "positions": {"causal": True, "query_positions": integers(3, 9, 2, 7), "key_positions": integers(4, 9, 2, 11)},
    "segments": {"causal": True, "query_segments": integers(5, 2, 2, 7), "key_segments": integers(6, 2, 2, 11)},
    "mask": {"mask": hide_row(random_mask(7, 2, 6, 7, 11), 3)},
    "mask_of_queries_and_keys": {"mask": random_mask(8, 7, 11).astype(np.int32), "scale": 0.3},
}


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@each_implementation_of_values
def test_values_and_gradients_equal_the_loop(how, options):
    case = draw(**options)
    expected = dense_oracle(case)

    def loss(*inputs):
        output = dense_attention(*inputs, **how, **case.options)
        return (output * jnp.asarray(case.d_output, output.dtype)).sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*case.inputs)
    wanted = (expected.output, expected.d_query, expected.d_key, expected.d_value)
    for got, want in zip((output, *gradients), wanted):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
def test_weights_equal_the_loop_and_are_a_distribution(options):
    case = draw(**options)
    query, key, _ = case.inputs
    weights = dense_attention_weights(query, key, **case.options)
    np.testing.assert_allclose(weights, dense_oracle(case).weights, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), see(case).any(-1).astype(np.float32), atol=1e-6)


@pytest.mark.parametrize("queries", [1, 3, 4, 8, 11])
@each_implementation
def test_causal_aligns_the_last_query_with_the_last_key(how, queries):
    case = draw(queries=queries, causal=True)
    output = jax.jit(lambda *inputs: dense_attention(*inputs, causal=True, **how))(*case.inputs)
    np.testing.assert_allclose(output, dense_oracle(case).output, atol=1e-5)


@each_implementation
def test_visibility_by_jacobian_is_exactly_the_mask(how):
    options = {"causal": True, "key_mask": random_mask(2, 2, 11), "mask": random_mask(9, 2, 6, 7, 11)}
    case = draw(**options)
    query, key, value = case.inputs

    # Each query head's first output feature by the first value feature of the head it reads.
    def first_feature(first):
        return dense_attention(query, key, value.at[..., 0].set(first), **how, **options)[..., 0]

    jacobian = jax.jit(jax.jacrev(first_feature))(value[..., 0])
    moved = np.stack([[jacobian[b, :, n, b, :, n // 2] for n in range(6)] for b in range(2)])
    np.testing.assert_array_equal(moved != 0, see(case))
    others = np.stack([[jacobian[b, :, n, 1 - b] for n in range(6)] for b in range(2)])
    assert not others.any()


def test_positions_and_segments_are_refused_by_name():
    query, key, value = draw().inputs
    refused = [
        ("equal batch", (query[:1], key, value), {}),
        ("head_dim", (query[..., :4], key, value), {}),
        ("5 heads and key has 3", (query[:, :, :5], key, value), {}),
        ("key has 0", (query, key[:, :, :0], value[:, :, :0]), {}),
        ("no more of them", (query, key[:, :5], value[:, :5]), {"causal": True}),
        ("key_positions go together", (query, key, value), {"query_positions": integers(0, 9, 2, 7)}),
        ("query_positions has shape", (query, query, query), {"query_positions": integers(0, 9, 2, 5)}),
        ("query_positions is float32", (query, query, query), {"query_positions": np.ones((2, 7), np.float32)}),
    ]
    for message, inputs, options in refused:
        with pytest.raises(ValueError, match=message):
            dense_attention(*inputs, **options)
