"""Steps of sparse attention equal dense attention with the pattern's mask, and keep only the keys that it needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import patterns, sparse_attention
from jaxformer.attention.sparse_cache import init_local_cache, init_sparse_cache, local_step, sparse_step

LENGTH = 23
# The shortest ring has 3 slots, less than a chunk; the first chunk is longer than most.
SPLIT = (9, 1, 1, 5, 1, 5, 1)
PATTERNS = {
    "dilated": patterns.dilated((2, 1), 3),
    "blocks": patterns.blocks(4, (1, 0)),
    "strided": patterns.strided(5),
    "fixed": patterns.fixed(5, 2, offset=1),
    "global": patterns.global_tokens((0, 6)),
    "read_only_global": patterns.global_tokens((1, 6, 30), rows=False),
    "longformer": patterns.longformer(3, (0, 4)) & patterns.causal(),
    "bigbird": patterns.bigbird(3, 1, seed=2),
    "intersection": patterns.strided(6) & patterns.local(7),
}


def draw(length=LENGTH, heads=4, kv_heads=2):
    random = np.random.default_rng(0)
    shapes = ((2, length, heads, 5), (2, length, kv_heads, 5), (2, length, kv_heads, 3))
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def dense(inputs, pattern, added=()):
    """The oracle: softmax over the whole matrix in numpy, each part of a tuple of patterns for its heads.

    Added keys and values stand before all others, where every query sees them.
    """
    query, key, value = (np.asarray(array, np.float64) for array in inputs)
    length, heads = query.shape[1:3]
    before = added[0].shape[1] if added else 0
    if added:
        given = [np.broadcast_to(array, (len(query), *array.shape[1:])) for array in added]
        key, value = (np.concatenate(pair, 1) for pair in zip(given, (key, value)))
    key, value = (array.repeat(heads // array.shape[2], 2) for array in (key, value))
    parts = pattern if isinstance(pattern, tuple) else (pattern,)
    seen = np.stack([part.mask(length) & np.tri(length, dtype=bool) for part in parts]).repeat(heads // len(parts), 0)
    seen = np.pad(seen, ((0, 0), (0, 0), (before, 0)), constant_values=True)
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[3])
    powers = np.where(seen, np.exp(logits), 0)
    total = powers.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnv->btnv", powers / np.where(total == 0, 1, total), value)


def run(step, cache, inputs, split, **options):
    outputs, start = [], 0
    for size in split:
        now = slice(start, start + size)
        given = {name: option[:, now] for name, option in options.items()}
        output, cache = step(cache, *(array[:, now] for array in inputs), **given)
        outputs.append(output)
        start += size
    return jnp.concatenate(outputs, 1), cache


def jitted(pattern):
    return jax.jit(functools.partial(sparse_step, pattern=pattern))


@pytest.mark.parametrize("name", PATTERNS)
def test_steps_equal_dense_attention_with_the_mask(name):
    """Row 0 has a prompt of 7 tokens behind 2 of padding, row 1 one of 9."""
    pattern, inputs = PATTERNS[name], draw()
    pads = np.array([2, 0])
    key_mask = np.arange(LENGTH)[None] >= pads[:, None]
    positions = np.maximum(np.arange(LENGTH)[None] - pads[:, None], 0).astype(np.int32)
    poisoned = [jnp.where(key_mask[:, :, None, None], array, jnp.nan) for array in inputs[1:]]
    cache = init_sparse_cache(2, LENGTH, 2, 5, pattern=pattern, value_dim=3)
    output, _ = run(jitted(pattern), cache, [inputs[0], *poisoned], SPLIT, key_mask=key_mask, positions=positions)
    for row, pad in enumerate(pads):
        alone = dense([array[row : row + 1, pad:] for array in inputs], pattern)
        np.testing.assert_allclose(output[row : row + 1, pad:], alone, atol=1e-5)


def draw_added(examples, kv_heads=2):
    random = np.random.default_rng(1)
    return [jnp.asarray(random.standard_normal((examples, 4, kv_heads, width)), jnp.float32) for width in (5, 3)]


def stepping_with(added, pattern):
    """Steps with added tokens, which have no entry for each token of a row."""
    return jax.jit(functools.partial(sparse_step, pattern=pattern, global_key=added[0], global_value=added[1]))


@pytest.mark.parametrize(
    ("pattern", "examples"),
    [(patterns.local((2, 0)), 1), pytest.param(patterns.strided_parts(4), 2, marks=pytest.mark.slow)],
    ids=["for_all", "for_each_by_heads"],
)
def test_added_tokens_are_seen_at_every_step(pattern, examples):
    """Row 0 stands behind 2 tokens of padding; what the function for whole sequences gives is the same."""
    inputs, added, pads = draw(), draw_added(examples), np.array([2, 0])
    key_mask = np.arange(LENGTH)[None] >= pads[:, None]
    positions = np.maximum(np.arange(LENGTH)[None] - pads[:, None], 0).astype(np.int32)
    cache = init_sparse_cache(2, LENGTH, 2, 5, pattern=pattern, value_dim=3)
    step = stepping_with(added, pattern)
    output, after = run(step, cache, inputs, SPLIT, key_mask=key_mask, positions=positions)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(one)] for one in (cache, after)]
    assert shapes[0] == shapes[1], "added tokens take no slots"
    for row, pad in enumerate(pads):
        alone = [array[row : row + 1, pad:] for array in inputs]
        mine = [array[row % examples : row % examples + 1] for array in added]
        np.testing.assert_allclose(output[row : row + 1, pad:], dense(alone, pattern, mine), atol=1e-5)
    whole = jax.jit(functools.partial(sparse_attention, pattern=pattern, causal=True))
    expected = whole(*inputs, global_key=added[0], global_value=added[1])
    np.testing.assert_allclose(output[1:], expected[1:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("with_added", [False, True])
def test_positions_go_on_counting_and_long_prompts_go_by_chunks(with_added):
    pattern = patterns.longformer(40, (0, 130))
    inputs, added = draw(300), draw_added(2) if with_added else ()
    cache = init_sparse_cache(2, 300, 2, 5, pattern=pattern, value_dim=3)
    step = stepping_with(added, pattern) if with_added else jitted(pattern)
    output, cache = run(step, cache, inputs, (290, 1, 9))
    np.testing.assert_allclose(output, dense(inputs, pattern, added), atol=1e-5)
    assert cache.index == 300


def test_padding_between_tokens_evicts_nothing():
    inputs = draw()
    key_mask = np.ones((2, LENGTH), bool)
    key_mask[0, 4:8] = False
    positions = np.cumsum(key_mask, 1, dtype=np.int32) - 1
    cache = init_local_cache(2, LENGTH, 2, 5, window=3, value_dim=3)
    step = jax.jit(functools.partial(local_step, window=3))
    output, _ = run(step, cache, inputs, SPLIT, key_mask=key_mask, positions=positions)
    alone = dense([array[:1, key_mask[0]] for array in inputs], patterns.local(3))
    np.testing.assert_allclose(output[:1, key_mask[0]], alone, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_groups_of_heads_have_patterns_of_their_own(kv_heads):
    pattern, inputs = patterns.strided_parts(4), draw(kv_heads=kv_heads)
    cache = init_sparse_cache(2, LENGTH, kv_heads, 5, pattern=pattern, value_dim=3)
    output, _ = run(jitted(pattern), cache, inputs, SPLIT)
    np.testing.assert_allclose(output, dense(inputs, pattern), atol=1e-5)


def test_only_one_layer_of_a_stack_changes():
    pattern, inputs = PATTERNS["longformer"], draw()
    cache = init_sparse_cache(2, LENGTH, 2, 5, pattern=pattern, value_dim=3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), cache)
    step = jax.jit(lambda cache, *inputs: sparse_step(cache, *inputs, pattern=pattern, layer=1))
    output, after = run(step, stacked, inputs, (9, 1, 13))
    np.testing.assert_allclose(output, dense(inputs, pattern), atol=1e-5)
    assert after.index.tolist() == [0, LENGTH, 0]
    for old, new in zip(jax.tree.leaves(stacked), jax.tree.leaves(after)):
        np.testing.assert_array_equal(new[::2], old[::2])


def slots(pattern, max_length):
    cache = jax.eval_shape(lambda: init_sparse_cache(1, max_length, 2, 5, pattern=pattern))
    return cache.groups[0].key.shape[2]


def test_slots_are_those_that_the_pattern_comes_back_to():
    for max_length in (4096, 2**20):
        assert slots(patterns.local(255), max_length) == 256
        assert slots(patterns.local((7, 300)), max_length) == 8
        assert slots(patterns.dilated(3, 10), max_length) == 31
        assert slots(patterns.blocks(64, 1), max_length) == 128
        assert slots(patterns.longformer(255, range(16)), max_length) == 256 + 16
        assert slots(patterns.fixed(64, 4), max_length) == 64 + max_length // 16
        assert slots(patterns.strided(64), max_length) == max_length
        assert slots(patterns.strided(64) & patterns.local(100), max_length) == 101
        assert slots((patterns.local(9) | patterns.global_tokens((0,))) & patterns.causal(), max_length) == 11
    # Never more than all tokens.
    assert slots(patterns.local(255), 100) == 100
    assert slots(patterns.fixed(8, 8), 100) == 100


def test_windows_decode_beyond_the_longest_length_and_others_refuse():
    inputs = draw()
    for max_length in (3, 4):
        cache = init_local_cache(2, max_length, 2, 5, window=2, value_dim=3)
        output, _ = run(jitted(patterns.local(2)), cache, inputs, SPLIT)
        np.testing.assert_allclose(output, dense(inputs, patterns.local(2)), atol=1e-5)
    cache = init_sparse_cache(2, 20, 2, 5, pattern=patterns.strided(4), value_dim=3)
    with pytest.raises(ValueError, match="max_length"):
        sparse_step(cache, *inputs, pattern=patterns.strided(4))


def test_bad_steps_are_refused_by_name():
    inputs = draw()
    cache = init_local_cache(2, LENGTH, 2, 5, window=3, value_dim=3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), cache)
    for message, cache_given, options in [
        ("the cache was made for", cache, {"window": 4}),
        ("give layer", stacked, {"window": 3}),
        ("layer goes with", cache, {"window": 3, "layer": 0}),
        ("window is -1", cache, {"window": -1}),
        ("positions", cache, {"window": 3, "positions": np.zeros((2, 5), np.int32)}),
        ("key_mask", cache, {"window": 3, "key_mask": np.ones((2, 5), bool)}),
    ]:
        with pytest.raises(ValueError, match=message):
            local_step(cache_given, *inputs, **options)
    with pytest.raises(ValueError, match="the cache was made for"):
        sparse_step(cache, *inputs, pattern=patterns.strided_parts(3))
    key, value = draw_added(1)
    for message, options in [
        ("go together", {"global_key": key}),
        ("global_value has shape", {"global_key": key, "global_value": value[:, :, :1]}),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_step(cache, *inputs, pattern=patterns.local(3), **options)
    with pytest.raises(ValueError, match="max_length is 0"):
        init_local_cache(2, 0, 3, 5, window=1)
    with pytest.raises(ValueError, match="dtype is int32"):
        init_local_cache(2, 9, 3, 5, window=1, dtype=jnp.int32)
