"""Cached steps equal the full pass, however the tokens are split, padded and stacked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import draw

from jaxformer.attention import dense_attention, dense_step, init_cache, kernel_attention, kernel_step
from jaxformer.functional import AlibiBias, RelativeBias, alibi_slopes

attend = jax.jit(dense_attention, static_argnames="causal")

SPLITS = {
    "one_by_one": [1] * 7,
    "prompt_and_singles": [3, 1, 1, 1, 1],
    "chunk_in_the_middle": [2, 1, 2, 1, 1],
    "at_once": [7],
}


def tokens(seed=0, **sizes):
    return draw(seed, queries=7, keys=7, **sizes).inputs


def cut(arrays, start, stop):
    return [array[:, start:stop] for array in arrays]


def run(step, cache, inputs, split, **options):
    """Outputs of all steps, joined; options with one entry per token are split too."""
    outputs, start = [], 0
    for size in split:
        stop = start + size
        now = {name: option[:, start:stop] if np.ndim(option) == 2 else option for name, option in options.items()}
        output, cache = step(cache, *cut(inputs, start, stop), **now)
        outputs.append(output)
        start = stop
    return jnp.concatenate(outputs, 1), cache


@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
def test_steps_equal_the_full_pass(split):
    inputs = tokens()
    output, _ = run(jax.jit(dense_step), init_cache(2, 9, 3, 5, value_dim=8), inputs, split)
    np.testing.assert_allclose(output, attend(*inputs, causal=True), atol=1e-5)


@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
def test_only_the_written_slots_of_one_layer_change(split):
    inputs = tokens()
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init_cache(2, 9, 3, 5, value_dim=8))
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1) if leaf.ndim == 5 else leaf, cache)
    output, after = run(jax.jit(dense_step), cache, inputs, split, layer=1)
    np.testing.assert_allclose(output, attend(*inputs, causal=True), atol=1e-5)
    assert after.index.tolist() == [0, 7, 0]
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
        np.testing.assert_array_equal(new[::2], old[::2])
    np.testing.assert_array_equal(after.key[1, :, :, 7:], cache.key[1, :, :, 7:])


def test_a_scan_over_layers_carries_the_cache():
    inputs = tokens()
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init_cache(2, 7, 3, 5, value_dim=8))

    @jax.jit
    def step(cache, query, key, value):
        def layer(cache, number):
            output, cache = dense_step(cache, query, key * (1.0 + number.astype(jnp.float32)), value, layer=number)
            return cache, output

        cache, outputs = jax.lax.scan(layer, cache, jnp.arange(3))
        return outputs[2], cache

    output, _ = run(step, cache, inputs, [3, 1, 2, 1])
    query, key, value = inputs
    np.testing.assert_allclose(output, attend(query, key * 3.0, value, causal=True), atol=1e-5)


@pytest.mark.parametrize("pads", [[0, 2], [3, 0]])
@pytest.mark.parametrize("split", [[4, 1, 1, 1], [1] * 7])
def test_unequal_prompts_padded_on_the_left(split, pads):
    inputs = tokens()
    key_mask = np.arange(7)[None] >= np.array(pads)[:, None]
    positions = np.maximum(np.arange(7)[None] - np.array(pads)[:, None], 0).astype(np.int32)
    poisoned = [jnp.where(key_mask[:, :, None, None], array, jnp.nan) for array in inputs[1:]]
    cache = init_cache(2, 8, 3, 5, value_dim=8)
    output, _ = run(jax.jit(dense_step), cache, [inputs[0], *poisoned], split, key_mask=key_mask, positions=positions)
    for row, pad in enumerate(pads):
        alone = attend(*(array[row : row + 1, pad:] for array in inputs), causal=True)
        np.testing.assert_allclose(output[row : row + 1, pad:], alone, atol=1e-5)


@pytest.mark.slow
def test_padding_on_the_right_of_a_prompt_is_skipped():
    query, key, value = tokens()
    cache = init_cache(2, 9, 3, 5, value_dim=8)
    # Row 0 has 3 tokens and a pad, row 1 has 4; then both go on.
    key_mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    positions = np.array([[0, 1, 2, 3], [0, 1, 2, 3]], np.int32)
    _, cache = dense_step(cache, *cut((query, key, value), 0, 4), key_mask=key_mask, positions=positions)
    output, _ = dense_step(cache, *cut((query, key, value), 4, 5), positions=np.array([[3], [4]], np.int32))
    keep = np.array([0, 1, 2, 4])
    short = attend(query[:1, 4:5], key[:1, keep], value[:1, keep], causal=True)
    long = attend(query[1:, 4:5], key[1:, :5], value[1:, :5], causal=True)
    np.testing.assert_allclose(output, jnp.concatenate([short, long]), atol=1e-5)


@pytest.mark.parametrize("split", [[1] * 7, [3, 2, 2]])
@pytest.mark.parametrize("name", ["alibi", "relative"])
def test_position_biases_hold_in_the_cache(name, split):
    inputs = tokens()
    table = jnp.asarray(np.random.default_rng(1).standard_normal((32, 6)), jnp.float32)
    bias = {
        "alibi": AlibiBias(alibi_slopes(6)),
        "relative": RelativeBias(table, bidirectional=False, max_distance=128),
    }[name]
    output, _ = run(jax.jit(dense_step), init_cache(2, 9, 3, 5, value_dim=8), inputs, split, bias=bias)
    np.testing.assert_allclose(output, attend(*inputs, causal=True, bias=bias), atol=1e-5)


def test_segments_hold_in_the_cache():
    inputs = tokens()
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2, 2]], np.int32)
    output, _ = run(jax.jit(dense_step), init_cache(2, 9, 3, 5, value_dim=8), inputs, [2, 3, 2], segments=segments)
    np.testing.assert_allclose(output, attend(*inputs, causal=True, query_segments=segments), atol=1e-5)


def test_a_token_is_hidden_from_itself_in_the_cache_too():
    """Kernel attention that leaves one out, by loops over pairs; row 0 has two tokens of padding before it."""
    inputs, pads = tokens(), np.array([2, 0])
    key_mask = np.arange(7)[None] >= pads[:, None]
    positions = np.maximum(np.arange(7)[None] - pads[:, None], 0).astype(np.int32)
    step = jax.jit(functools.partial(kernel_step, width=2.0, leave_one_out=True))
    cache = init_cache(2, 9, 3, 5, value_dim=8)
    output, _ = run(step, cache, inputs, [4, 1, 1, 1], key_mask=key_mask, positions=positions)
    query, key, value = (np.asarray(array, np.float64) for array in inputs)
    for row, head, now in np.ndindex(2, query.shape[2], 7):
        if not key_mask[row, now]:
            continue
        total, weighted, group = 0.0, np.zeros(8), head * 3 // query.shape[2]
        for past in range(pads[row], now):
            weight = np.exp(-((query[row, now, head] - key[row, past, group]) ** 2).sum() / 8)
            total, weighted = total + weight, weighted + weight * value[row, past, group]
        np.testing.assert_allclose(output[row, now, head], weighted / (total or 1), atol=1e-5)
    whole = jax.jit(functools.partial(kernel_attention, width=2.0, leave_one_out=True, causal=True))
    np.testing.assert_allclose(output[1], whole(*inputs)[1], atol=1e-5)


def test_long_prompts_take_the_blockwise_form():
    inputs = draw(queries=130, keys=130, heads=2, kv_heads=1).inputs
    output, _ = run(jax.jit(dense_step), init_cache(2, 150, 1, 5, value_dim=8), inputs, [100, 30])
    np.testing.assert_allclose(output, attend(*inputs, causal=True), atol=1e-5)


def test_a_scaled_step_and_a_cache_of_another_dtype():
    inputs = tokens()
    cache = init_cache(2, 9, 3, 5, value_dim=8, dtype=jnp.bfloat16)
    output, cache = run(jax.jit(functools.partial(dense_step, scale=0.5)), cache, inputs, [4, 3])
    assert output.dtype == jnp.float32
    assert cache.key.dtype == jnp.bfloat16
    np.testing.assert_allclose(output, attend(*inputs, causal=True, scale=0.5), atol=0.05)


def test_one_trace_serves_every_step():
    inputs = tokens()
    traces = []

    @jax.jit
    def step(cache, *inputs):
        traces.append(0)
        return dense_step(cache, *inputs)

    run(step, init_cache(2, 9, 3, 5, value_dim=8), inputs, [1] * 7)
    assert len(traces) == 1


def test_bad_steps_are_refused_by_name():
    query, key, value = tokens()
    cache = init_cache(2, 9, 3, 5, value_dim=8)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), cache)
    _, full = dense_step(cache, query, key, value)
    for message, arguments, options in [
        ("7 tokens do not fit: 7 of the cache's 9", (full, query, key, value), {}),
        ("stacked cache", (stacked, query, key, value), {}),
        ("stacked cache", (cache, query, key, value), {"layer": 0}),
        ("does not fit the cache's", (cache, query, key[..., :1, :], value[..., :1, :]), {}),
        ("query has 1 tokens and key 7", (cache, query[:, :1], key, value), {}),
        ("positions", (cache, query, key, value), {"positions": np.zeros((2, 5), np.int32)}),
        ("key_mask", (cache, query, key, value), {"key_mask": np.ones((2, 9), bool)}),
    ]:
        with pytest.raises(ValueError, match=message):
            dense_step(*arguments, **options)
    with pytest.raises(ValueError, match="max_length is 0"):
        init_cache(2, 0, 3, 5)
    with pytest.raises(ValueError, match="dtype is int32"):
        init_cache(2, 9, 3, 5, dtype=jnp.int32)
