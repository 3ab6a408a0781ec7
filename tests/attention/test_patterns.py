"""Patterns are sets of pairs, and their components hold each pair once in few blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.attention import patterns
from jaxformer.attention.patterns import (
    bigbird,
    blocks,
    causal,
    dilated,
    everything,
    fixed,
    fixed_parts,
    global_tokens,
    local,
    longformer,
    random_blocks,
    strided,
    strided_parts,
    summaries,
)

few, size = st.integers(0, 9), st.integers(1, 20)
indices = st.lists(st.integers(0, 150), unique=True, max_size=5)
windows = st.one_of(few, st.tuples(few, few), st.tuples(few, st.none()))


def later(function, *arguments):
    """Draws calls, to be made by the test."""
    return st.builds(functools.partial, st.just(function), *arguments)


LEAVES = st.one_of(
    later(local, windows),
    later(dilated, windows, size),
    later(strided, size),
    later(lambda count, more, offset: fixed(count + more + offset, count, offset=offset), size, few, few),
    later(blocks, size, st.tuples(few, few)),
    later(global_tokens, indices),
    later(functools.partial(global_tokens, rows=False), indices),
    later(random_blocks, st.integers(1, 4), few, size, st.none() | size),
    later(lambda size, num, length: bigbird(size, num, seed=1, num_blocks=length), size, few, st.none() | size),
    later(longformer, few, indices),
    later(causal),
)
PATTERNS = st.recursive(
    LEAVES,
    lambda inner: (
        later(lambda one, other: one() | other(), inner, inner)
        | later(lambda one, other: one() & other(), inner, inner)
    ),
    max_leaves=4,
)
LENGTHS = st.integers(1, 200)


def counted(pattern, length, is_causal):
    """How often the components name each pair: by loops over their blocks."""
    counts = np.zeros((length, length), int)
    for component in pattern.components(length, is_causal):
        assert len(component.query_order) % component.query_block == 0
        assert (component.pairs[:, 0] % component.query_block == 0).all()
        assert np.array_equal(component.pairs, np.unique(component.pairs, axis=0))
        run = component.run or 1
        each = component.each_pair()
        owned = np.full(len(component.pairs), run) - (0 if component.skips is None else component.skips)
        assert len(each) == owned.sum()
        for (query, key), full in zip(each, component.full.repeat(owned)):
            queries = component.query_order[query : query + component.query_block]
            keys = component.key_order[key : key + component.key_block]
            assert (len(queries), len(keys)) == (component.query_block, component.key_block)
            seen = component.visible(queries[:, None], keys[None]) & (queries >= 0)[:, None] & (keys >= 0)[None]
            assert seen.all() or not full
            rows, columns = np.nonzero(seen)
            np.add.at(counts, (queries[rows], keys[columns]), 1)
        for order in (component.query_order, component.key_order):
            tokens = order[order >= 0]
            assert len(np.unique(tokens)) == len(tokens)
    return counts


@settings(max_examples=60, deadline=None)
@given(PATTERNS, LENGTHS, st.booleans())
def test_components_hold_each_pair_exactly_once(pattern, length, is_causal):
    pattern = pattern()
    mask = pattern.mask(length) & (np.tri(length, dtype=bool) | (not is_causal))
    np.testing.assert_array_equal(counted(pattern, length, is_causal), mask)
    assert pattern.num_pairs(length, is_causal) == mask.sum()
    assert pattern.executed_pairs(length, is_causal) >= mask.sum()


@settings(max_examples=60, deadline=None)
@given(PATTERNS, PATTERNS, PATTERNS, st.integers(1, 60))
def test_patterns_are_sets(one, two, three, length):
    one, two, three = one(), two(), three()
    a, b = one.mask(length), two.mask(length)
    np.testing.assert_array_equal((one | two).mask(length), a | b)
    np.testing.assert_array_equal((one & two).mask(length), a & b)
    np.testing.assert_array_equal((one & ~two).mask(length), a & ~b)
    np.testing.assert_array_equal((one & causal()).mask(length), np.tril(a))
    for left, right in [
        (one | two, two | one),
        (one & two, two & one),
        ((one | two) | three, one | (two | three)),
        ((one & two) & three, one & (two & three)),
        (one | one, one),
        (one & one, one),
        (one & everything(), one),
        (one | everything(), everything()),
        (~~one, one),
        (eval(repr(one), vars(patterns).copy()), one),
    ]:
        assert left == right
        assert hash(left) == hash(right)


@settings(max_examples=50, deadline=None)
@given(PATTERNS, st.integers(1, 80), st.integers(0, 80))
def test_what_a_token_sees_does_not_depend_on_the_length(pattern, length, more):
    pattern = pattern()
    np.testing.assert_array_equal(pattern.mask(length + more)[:length, :length], pattern.mask(length))
    np.testing.assert_array_equal(pattern.dense_mask(length, length + more), pattern.mask(length + more)[more:])


@settings(max_examples=50, deadline=None)
@given(PATTERNS, st.integers(1, 60))
def test_shift_invariant_patterns_are_the_same_everywhere(pattern, length):
    pattern = pattern()
    if pattern.shift_invariant:
        mask = pattern.mask(length + 7)
        np.testing.assert_array_equal(mask[7:, 7:], mask[:length, :length])


def test_shift_invariance_of_each_kind():
    assert (local(3) | dilated(2, 5) | strided(4) & causal()).shift_invariant
    assert not any(one.shift_invariant for one in (fixed(4, 1), blocks(3), longformer(2, (0,)), random_blocks(1, 0)))


def test_arrays_of_jax_see_the_same():
    every = [local((3, 1)), dilated(2, 3), blocks(4, 1), summaries(5, 2, offset=1), longformer(2, (0, 7)) & causal()]
    every += [random_blocks(2, 7, 3), bigbird(3, 2, seed=5, num_blocks=9, global_blocks=(0, 8)), strided(4) | blocks(3)]
    queries, keys = np.arange(40, dtype=np.int32)[:, None], np.arange(40, dtype=np.int32)[None]
    traced = jax.jit(lambda queries, keys: [pattern.visible(queries, keys) for pattern in every])(queries, keys[0])
    for pattern, seen in zip(every, traced):
        assert seen.dtype == jnp.bool_
        np.testing.assert_array_equal(seen, pattern.mask(40))
    assert local(2).visible(5, 3)
    assert not random_blocks(1, 0, 4, exclude_window=0).visible(3, 2)


@pytest.mark.parametrize(
    ("length", "num_strided", "num_fixed"), [(64, 708, 512), (256, 5896, 4096), (1024, 48144, 32768)]
)
def test_sparse_transformers_reach_every_earlier_token_in_two_steps(length, num_strided, num_fixed):
    """Child et al. 2019: with stride √length, of length (length + 1) / 2 causal pairs."""
    stride = int(length**0.5)
    assert causal().num_pairs(length) == length * (length + 1) // 2
    assert strided(stride).num_pairs(length, causal=True) == num_strided
    assert fixed(stride, 1).num_pairs(length, causal=True) == num_fixed
    for parts in (strided_parts(stride), fixed_parts(stride, 1)):
        masks = [(part & causal()).mask(length) for part in parts]
        one, two = ((mask | np.eye(length, dtype=bool)).astype(np.float32) for mask in masks)
        assert ((one @ two + two @ one > 0) == np.tri(length, dtype=bool)).all()


def test_two_directions_of_strided_and_fixed():
    positions = np.arange(20)
    query, key = positions[:, None], positions[None]
    near = (abs(query - key) < 6) | ((query - key) % 6 == 0)
    np.testing.assert_array_equal(strided(6).mask(20), near)
    own_or_summary = (query // 6 == key // 6) | (key % 6 == 4)
    np.testing.assert_array_equal(fixed(6, 1, offset=1).mask(20), own_or_summary)


def test_the_edge_of_a_causal_window():
    """8 tokens, each seeing itself and 3 before."""
    mask = (local(3) & causal()).mask(8)
    assert mask.sum() == (local(3) & causal()).num_pairs(8) == local(3).num_pairs(8, causal=True) == 26
    assert np.flatnonzero(mask[7]).tolist() == [4, 5, 6, 7]
    assert (local(3) & causal()) == local((3, 0))
    assert dilated((2, 1), 4) & dilated(3, 6) == dilated((0, 0), 12)
    assert dilated((7, 5), 4) & local((17, 9)) == dilated((4, 2), 4)


GLOBAL = tuple(range(16))
LONG = {
    "local": local(256),
    "strided_90": strided(90),
    "strided_128": strided(128),
    "column_90": strided_parts(90)[1],
    "column_128": strided_parts(128)[1],
    "fixed": fixed(128, 8),
    "own_block": blocks(128),
    "longformer": longformer(256, GLOBAL),
    "longformer_spread": longformer(256, tuple(range(0, 8192, 512))),
    "bigbird": bigbird(64, 3, seed=0, num_blocks=128, global_blocks=(0, 127)),
    "bigbird_past": bigbird(64, 3, seed=0),
    "dilated": dilated(16, 4),
    "everything": everything(),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_little_more_than_the_pattern_is_computed(name, is_causal):
    pattern = LONG[name]
    # Whole lanes of 91 tokens and a few of 92, half of them in the past.
    most = 2.05 if name == "column_90" else 2
    assert pattern.executed_pairs(8192, is_causal) <= most * pattern.num_pairs(8192, is_causal)
    for component in pattern.components(8192, is_causal):
        assert component.query_block * component.key_block <= 2**17
        arrays = (component.query_order, component.key_order, component.pairs, component.full)
        assert sum(array.nbytes for array in arrays) <= 20 * 8192


def test_long_sequences_are_counted_without_matrices():
    length = 65_536
    assert local(256).num_pairs(length) == 513 * length - 256 * 257
    own, columns = blocks(128).num_pairs(length, causal=True), summaries(128, 8).num_pairs(length, causal=True)
    both = length // 128 * (8 * 9 // 2)
    assert fixed(128, 8).num_pairs(length, causal=True) == own + columns - both
    assert longformer(256, GLOBAL).num_pairs(length) == local(256).num_pairs(length) + 2 * sum(
        length - 257 - index for index in GLOBAL
    )
    assert bigbird(64, 3, seed=0, num_blocks=1024, global_blocks=()).num_pairs(length) == 64 * 64 * (6 * 1024 - 2)


def test_random_blocks_are_distinct_even_and_elsewhere():
    pattern = random_blocks(3, seed=4, block_size=1, num_blocks=64, exclude_window=1, exclude_blocks=(0, 63))
    mask = pattern.mask(64)
    assert (mask.sum(1) == 3).all()
    near = abs(np.arange(64)[:, None] - np.arange(64)[None]) <= 1
    assert not (mask & near).any()
    assert not mask[:, [0, 63]].any()
    drawn = sum(random_blocks(3, seed, 1, 64).mask(64).astype(int) for seed in range(200))
    expected = 200 * 3 / 64
    assert abs(drawn - expected).max() < 6 * expected**0.5
    assert abs(drawn.sum(0) - 64 * expected).max() < 5 * (64 * expected) ** 0.5
    past = random_blocks(2, seed=1, block_size=4)
    assert not np.triu(past.mask(40), 4).any()
    assert past.mask(40)[:8].sum(1).tolist() == [4] * 4 + [8] * 4


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("window is -1", lambda: local(-1)),
        ("window is -2", lambda: dilated((3, -2), 2)),
        ("dilation is 0", lambda: dilated(3, 0)),
        ("stride is 0", lambda: strided(0)),
        ("stride is 0", lambda: fixed(0, 1)),
        ("num_summary is 5", lambda: fixed(4, 5)),
        ("num_summary is 3 and offset 2", lambda: fixed(4, 3, offset=2)),
        ("num_summary is 0", lambda: fixed(4, 0)),
        ("block_size is 0", lambda: blocks(0)),
        ("indices is -1", lambda: global_tokens((0, -1))),
        (r"indices is \(1, 1\)", lambda: global_tokens((1, 1))),
        ("columns and rows", lambda: global_tokens((1,), columns=False, rows=False)),
        ("num is 0", lambda: random_blocks(0, 0)),
        ("num is 1000000000; it must be at most 256", lambda: random_blocks(10**9, 0)),
        ("window is 1000000000000; it must be at most", lambda: local(10**12)),
        ("num_blocks is 0", lambda: random_blocks(1, 0, num_blocks=0)),
        ("global_blocks is", lambda: bigbird(seed=0, global_blocks=(2, 2))),
        ("^window is 300", lambda: bigbird(seed=0, window=300)),
        ("num_queries is 3", lambda: local(1).dense_mask(3, 2)),
        ("length is -1", lambda: local(1).components(-1)),
    ],
)
def test_bad_patterns_are_refused_by_name(message, make):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_of_more_than_any_row_see_everything_in_32_bits():
    positions = jnp.arange(20, dtype=jnp.int32)
    for wide, open_ended in (
        (dilated(2**30, 3), dilated(None, 3)),
        (dilated(1, 2**30) & dilated(1, 2**29 + 1), local(0)),
    ):
        seen = wide.visible(positions[:, None], positions[None])
        np.testing.assert_array_equal(seen, open_ended.mask(20))
