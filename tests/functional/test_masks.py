"""Masks against loops over every pair."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import as_mask, causal_mask, combine_masks, mask_from_lengths, padding_mask, segment_mask


def pairwise(queries, keys, visible):
    """[B, 1, T, S] by asking about each pair."""
    mask = np.zeros((queries.shape[0], 1, queries.shape[1], keys.shape[1]), bool)
    for b, t, s in itertools.product(*(range(size) for size in (queries.shape[0], queries.shape[1], keys.shape[1]))):
        mask[b, 0, t, s] = visible(queries[b, t], keys[b, s])
    return mask


def test_lengths_per_example_mark_the_first_entries():
    mask = mask_from_lengths(np.array([0, 2, 5]), 5)
    np.testing.assert_array_equal(mask, [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert mask.dtype == jnp.bool_


def test_lengths_per_query_mark_the_first_entries_of_each_row():
    lengths = np.array([[1, 0, 3], [2, 4, 9]], np.uint8)
    expected = [[[s < length for s in range(4)] for length in row] for row in lengths]
    np.testing.assert_array_equal(mask_from_lengths(lengths, 4), expected)


def test_lengths_outside_the_range_mark_nothing_or_everything():
    np.testing.assert_array_equal(mask_from_lengths(np.array([-3, 300]), 3), [[0, 0, 0], [1, 1, 1]])
    assert mask_from_lengths(np.array([1, 2]), 0).shape == (2, 0)


def test_causal_mask_compares_positions_not_indices():
    # A ring buffer: keys stand in any order; row 1 starts later; queries are the last ones.
    query_positions = np.array([[4, 5, 6], [10, 11, 12]])
    key_positions = np.array([[5, 6, 2, 3, 4], [8, 12, 10, 11, 9]])
    expected = pairwise(query_positions, key_positions, lambda query, key: key <= query)
    np.testing.assert_array_equal(causal_mask(query_positions, key_positions), expected)


def test_positions_of_batch_size_one_serve_the_whole_batch():
    key_positions = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    expected = pairwise(np.array([[1, 2]] * 2), key_positions, lambda query, key: key <= query)
    np.testing.assert_array_equal(causal_mask(np.array([[1, 2]]), key_positions), expected)


def test_segments_hide_documents_from_each_other():
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 0, 0]])
    expected = pairwise(segments[:, 1:4], segments, lambda query, key: query == key)
    np.testing.assert_array_equal(segment_mask(segments[:, 1:4], segments), expected)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8])
def test_padding_mask_hides_keys_from_every_query(dtype):
    mask = padding_mask(np.array([[1, 1, 0], [0, 1, 1]], dtype))
    assert mask.shape == (2, 1, 1, 3)
    np.testing.assert_array_equal(mask[:, 0, 0], np.array([[1, 1, 0], [0, 1, 1]], bool))


def test_combining_is_a_logical_and_of_every_form():
    random = np.random.default_rng(0)
    masks = [random.integers(0, 2, shape) for shape in ((2, 1, 1, 5), (1, 3, 4, 5), (4, 1), ())]
    expected = np.ones((2, 3, 4, 5), bool)
    for mask in masks:
        expected &= mask.astype(bool)
    np.testing.assert_array_equal(combine_masks(masks[0], None, *(m.astype(bool) for m in masks[1:])), expected)


def test_no_mask_means_everything_is_visible():
    assert combine_masks() is None
    assert combine_masks(None, None) is None


def test_masks_are_pure_under_jit_and_vmap():
    positions = np.array([[3, 1, 2], [0, 4, 5]])
    expected = causal_mask(positions, positions)
    np.testing.assert_array_equal(jax.jit(causal_mask)(positions, positions), expected)
    rows = jax.vmap(lambda row: causal_mask(row[None], row[None])[0])(jnp.asarray(positions))
    np.testing.assert_array_equal(rows, expected)


def test_shapes_that_do_not_broadcast_are_all_named():
    with pytest.raises(ValueError, match=r"\(1, 1, 1, 4\), \(2, 1, 3, 5\)"):
        combine_masks(np.ones((1, 1, 1, 4), bool), None, np.ones((2, 1, 3, 5), bool))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: as_mask(np.zeros(3, np.float32), "key_mask"), "key_mask is float32"),
        (lambda: padding_mask(np.ones(3, bool)), r"key_mask has shape \(3,\)"),
        (lambda: mask_from_lengths(np.ones(3, np.float32), 4), "lengths is float32"),
        (lambda: mask_from_lengths(np.ones(3, int), -1), "max_length is -1"),
        (lambda: causal_mask(np.arange(3), np.arange(3)[None]), r"query_positions has shape \(3,\)"),
        (lambda: causal_mask(np.zeros((2, 3), int), np.zeros((3, 4), int)), "different batch sizes"),
        (lambda: segment_mask(np.zeros((2, 3), int), np.zeros((2, 3), np.float32)), "key_segments is float32"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
