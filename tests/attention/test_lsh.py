"""LSH attention by hand-computed numbers, lengths beside chunks, what leaks and what doesn't, decoding and memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import (
    draw_rotations,
    init_lsh_cache,
    lsh_attention,
    lsh_attention_weights,
    lsh_buckets,
    lsh_step,
)

# Buckets 0 .. 3 are the directions +x, +y, -x, -y.
AXES = np.eye(2, dtype=np.float32)[None]
STEPS = np.array([[1, 0], [-1, 0], [1, 0], [0, 1]], np.float32)[None, :, None]
NUMBERS = np.arange(1, 5, dtype=np.float32)[None, :, None, None]


def draw(length, heads=2, head_dim=5, value_dim=3, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.standard_normal((2, length, heads, head_dim)).astype(np.float32)
    return tokens, random.standard_normal((2, length, heads, value_dim)).astype(np.float32)


def rotations(num_hashes, num_buckets=(2, 4), head_dim=5, heads=2, seed=0):
    return draw_rotations(jax.random.key(seed), num_hashes, num_buckets, head_dim, heads)


def test_buckets_are_the_nearest_of_the_rotated_axes():
    np.testing.assert_array_equal(lsh_buckets(STEPS, AXES)[0, 0, 0], [0, 2, 0, 1])
    # Two factors of two: +x or -x, then +y or -y, the first of equals.
    np.testing.assert_array_equal(lsh_buckets(STEPS, AXES, num_buckets=(2, 2))[0, 0, 0], [0, 2, 0, 0])
    masked = lsh_buckets(STEPS.astype(jnp.bfloat16), AXES, key_mask=np.array([[1, 0, 1, 1]]))
    np.testing.assert_array_equal(masked[0, 0, 0], [0, 4, 0, 1])
    assert masked.dtype == jnp.int32


def test_rotations_have_half_the_sum_of_the_factors():
    assert rotations(3, (6, 4)).shape == (3, 2, 5, 5)
    assert draw_rotations(jax.random.key(0), 3, 8, 5).shape == (3, 5, 4)
    assert lsh_buckets(draw(7)[0], rotations(3, (6, 4)), num_buckets=(6, 4)).shape == (2, 2, 3, 7)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # In the order of buckets: tokens 0, 2 | 3, 1.
        ({}, [3, 4, 1, 2]),
        ({"causal": True}, [1, 2, 1, 2]),
        ({"within_bucket": True}, [3, 2, 1, 4]),
        # The first chunk doesn't look back into the last.
        ({"num_chunks_before": 1, "causal": True}, [1, 1, 1, None]),
    ],
)
def test_hand_computed_chunks(options, wanted):
    options = {"num_chunks_before": 0, "num_chunks_after": 0, "chunk_size": 2, **options}
    output = jax.jit(functools.partial(lsh_attention, rotations=AXES, **options))(STEPS, NUMBERS)[0, :, 0, 0]
    for got, want in zip(output, wanted):
        assert want is None or got == want


def test_a_key_of_two_rounds_counts_once_or_twice():
    # Round 1: tokens 0, 1 | 2. Round 2, by y: tokens 0, 1, 2 in one bucket, so 0 and 2 meet there only.
    tokens = np.array([[3, 1], [2, 1], [-1, 1]], np.float32)[None, :, None]
    turns = np.stack([np.eye(2)[:, :1], np.eye(2)[:, 1:]]).astype(np.float32)
    options = {"rotations": turns, "within_bucket": True, "chunk_size": 3}
    logits = (tokens[0, :1, 0] * tokens[0, 1:, 0]).sum(-1) / np.linalg.norm(tokens[0, 1:, 0], axis=-1)
    for deduplicate, times in ((True, [1, 1]), (False, [2, 1])):
        powers = np.exp(logits) * times
        weights = jax.jit(functools.partial(lsh_attention_weights, deduplicate=deduplicate, **options))(tokens)
        np.testing.assert_allclose(weights[0, 0, 0], [0, *(powers / powers.sum())], rtol=1e-6)


@functools.cache
def in_chunks_of_four(num_hashes, causal):
    """(tokens, value, key_mask) to the output: compiled once for all tests of a form and length."""
    options = {"num_hashes": num_hashes, "causal": causal, "num_buckets": (2, 4), "chunk_size": 4}
    rounds = rotations(2)
    return jax.jit(lambda *inputs, key_mask: lsh_attention(*inputs, rotations=rounds, key_mask=key_mask, **options))


@pytest.mark.parametrize(
    ("length", "num_hashes", "causal"),
    [
        pytest.param(*case, marks=() if case == (7, 2, True) else pytest.mark.slow)
        for case in itertools.product((1, 3, 4, 7, 8, 9), (1, 2), (False, True))
    ],
)
def test_length_beside_chunks_and_padding_move_no_token(length, num_hashes, causal):
    """A length in chunks of 4 equals the same tokens before padding of any content and length."""
    run = in_chunks_of_four(num_hashes, causal)
    tokens, value = draw(14)
    alone = run(tokens[:, :length], value[:, :length], key_mask=np.ones((1, length), bool))
    inside = np.arange(14)[None] < length
    for content in (0.0, 7.0, draw(14, seed=1)):
        pads = content if isinstance(content, tuple) else (content, content)
        padded = [np.where(inside[:, :, None, None], x, pad) for x, pad in zip((tokens, value), pads)]
        output = run(*padded, key_mask=inside)
        np.testing.assert_allclose(output[:, :length], alone, atol=1e-6)
        assert not output[:, length:].any()


@pytest.mark.slow
def test_a_token_that_sees_nothing_gets_its_own_value_exactly():
    tokens, value = draw(12)
    tokens = tokens * 300.0
    options = {"num_buckets": (2, 4), "chunk_size": 3, "causal": True, "within_bucket": True}

    def first(*inputs):
        output = lsh_attention(*inputs, rotations=rotations(4), **options)[:, 0]
        return output.sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(first, (0, 1), has_aux=True))(tokens, value)
    np.testing.assert_array_equal(output, value[:, 0])
    assert not gradients[0].any()
    np.testing.assert_array_equal(gradients[1][:, 0], np.ones_like(value[:, 0]))


def test_the_choice_of_past_keys_depends_on_later_tokens_unless_it_is_strict():
    tokens, _ = draw(24)
    later = np.where(np.arange(24)[None, :, None, None] < 12, tokens, -tokens)
    options = {"rotations": rotations(2), "num_buckets": (2, 4), "causal": True}

    def past(tokens, **rule):
        weights = jax.jit(functools.partial(lsh_attention_weights, **options, **rule))(tokens)
        return np.asarray(weights)[:, :, :12, :12] != 0

    assert (past(tokens, chunk_size=4) != past(later, chunk_size=4)).any()
    strict = {"chunk_size": 24, "within_bucket": True}
    np.testing.assert_array_equal(past(tokens, **strict), past(later, **strict))
    assert not past(tokens, **strict)[:, :, np.triu_indices(12, 1)[0], np.triu_indices(12, 1)[1]].any()


@pytest.mark.slow
@pytest.mark.parametrize("one_bucket", [True, False])
def test_decoding_equals_the_full_pass_where_the_choice_is_causal(one_bucket):
    tokens, value = draw(6)
    rounds = rotations(3) * (0.0 if one_bucket else 1.0)
    options = {"rotations": rounds, "num_buckets": (2, 4), "deduplicate": False}
    whole = functools.partial(lsh_attention, causal=True, chunk_size=6, within_bucket=not one_bucket, **options)
    want = jax.jit(whole)(tokens, value)
    # The second of two stacked layers.
    empty = init_lsh_cache(2, 6, 2, 5, num_hashes=3, value_dim=3)
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), empty)
    step = jax.jit(functools.partial(lsh_step, **options, layer=1))
    for token in range(6):
        got, cache = step(cache, tokens[:, token : token + 1], value[:, token : token + 1])
        np.testing.assert_allclose(got[:, 0], want[:, token], atol=1e-6)
    jax.tree.map(lambda leaf, start: np.testing.assert_array_equal(leaf[0], start), cache, empty)


@pytest.mark.slow
def test_more_rounds_come_closer_to_all_pairs():
    tokens, value = draw(64)
    rounds = rotations(8, 16)

    @jax.jit
    def run(tokens, value):
        attend = functools.partial(lsh_attention, tokens, value)
        exact = attend(rotations=rounds * 0.0, chunk_size=64)
        some = [attend(rotations=rounds, num_hashes=n, chunk_size=8, within_bucket=True) for n in (1, 8)]
        return [jnp.linalg.norm(output - exact) for output in some]

    few, many = run(tokens, value)
    assert many < 0.6 * few


@pytest.mark.slow
def test_heads_taken_one_at_a_time_change_nothing(monkeypatch):
    tokens, value = draw(14)
    attend = jax.jit(lambda *inputs: lsh_attention(*inputs, rotations=rotations(2), num_buckets=(2, 4), chunk_size=4))
    together = attend(tokens, value)
    monkeypatch.setattr("jaxformer.attention.by_heads.PAIRS_AT_ONCE", 1)
    attend.clear_cache()
    np.testing.assert_allclose(attend(tokens, value), together, atol=1e-6)


def test_65536_tokens_take_less_than_4_gibibytes():
    """Two rounds of 8 heads of 64, forward and backward; the logits of all pairs would take 128 GiB."""
    tokens = jax.ShapeDtypeStruct((1, 65536, 8, 64), jnp.float32)
    rounds = jax.ShapeDtypeStruct((2, 8, 64, 48), jnp.float32)

    def loss(tokens, value, rounds):
        return lsh_attention(tokens, value, rotations=rounds, num_buckets=(32, 64), causal=True).sum()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(tokens, tokens, rounds).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2**30


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_buckets is 5", {"num_buckets": 5}),
        ("num_buckets", {"num_buckets": (4, 4)}),
        ("num_buckets", {"num_buckets": (2**16, 2**16)}),
        ("num_hashes is 3", {"num_hashes": 3}),
        ("chunk_size is 0", {"chunk_size": 0}),
        ("num_chunks_before is -1", {"num_chunks_before": -1}),
        ("rotations", {"rotations": np.zeros((2, 3, 5, 3), np.float32)}),
    ],
)
def test_unfit_options_are_refused_by_name(message, options):
    with pytest.raises(ValueError, match=message):
        lsh_attention(*draw(4), **{"rotations": rotations(2), **options})


def test_unfit_steps_are_refused_by_name():
    tokens, value = draw(4)
    options = {"rotations": rotations(2), "num_buckets": (2, 4)}
    with pytest.raises(ValueError, match="num_hashes is 0"):
        init_lsh_cache(2, 3, 2, 5, num_hashes=0)
    with pytest.raises(ValueError, match="the cache needs 3"):
        lsh_step(init_lsh_cache(2, 4, 2, 5, num_hashes=3, value_dim=3), tokens, value, **options)
    with pytest.raises(ValueError, match="4 tokens do not fit"):
        lsh_step(init_lsh_cache(2, 3, 2, 5, num_hashes=2, value_dim=3), tokens, value, **options)
    with pytest.raises(ValueError, match="value"):
        lsh_step(init_lsh_cache(2, 4, 2, 5, num_hashes=2), tokens, value, **options)
