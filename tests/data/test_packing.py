import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.data import IGNORE_LABEL, check_ids, pack_documents, stream_documents
from jaxformer.data.packing import join_documents

DOCUMENTS = st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=8)


def _rows(rows):
    return rows.batch(np.arange(len(rows)))


def _pairs_of(documents):
    return [(document[i], document[i + 1]) for document in documents for i in range(len(document) - 1)]


def _naive_segments(documents, length):
    """Segments and positions of every row by a loop over documents, one token at a time."""
    segments, positions, count = [], [], 0
    for document in documents:
        for index in range(len(document) - 1):
            column = count % length
            if column == 0:
                segment, position = 1, 0
            elif index == 0:
                segment, position = segments[-1] + 1, 0
            else:
                segment, position = segments[-1], positions[-1] + 1
            segments.append(segment)
            positions.append(position)
            count += 1
    return segments, positions


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 11))
def test_every_pair_of_every_document_stands_exactly_once_in_order(documents, length):
    batch = _rows(pack_documents([np.array(document, np.int64) for document in documents], length))
    scored = batch["targets"] != IGNORE_LABEL
    found = list(zip(batch["tokens"][scored].tolist(), batch["targets"][scored].tolist()))
    assert found == _pairs_of(documents)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 11))
def test_segments_and_positions_equal_a_loop_over_tokens(documents, length):
    batch = _rows(pack_documents([np.array(document, np.int64) for document in documents], length))
    segments, positions = _naive_segments(documents, length)
    padding = [0] * (-len(segments) % length)
    assert batch["segments"].reshape(-1).tolist() == segments + padding
    assert batch["positions"].reshape(-1).tolist() == positions + padding
    assert ((batch["segments"] == 0) == (batch["targets"] == IGNORE_LABEL)).all()


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.integers(1, 11))
def test_all_rows_but_the_last_are_full(documents, length):
    rows = pack_documents([np.array(document, np.int64) for document in documents], length)
    filled = (_rows(rows)["segments"] > 0).sum(axis=1)
    assert (filled[:-1] == length).all()
    assert (filled > 0).all()
    assert rows.fill == pytest.approx(filled.sum() / max(1, length * len(rows)))


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.integers(1, 11))
def test_a_stream_holds_the_same_pairs_in_the_same_places_without_segments(documents, length):
    arrays = [np.array(document, np.int64) for document in documents]
    packed, streamed = _rows(pack_documents(arrays, length)), _rows(stream_documents(arrays, length))
    assert set(streamed) == {"tokens", "targets"}
    np.testing.assert_array_equal(packed["tokens"], streamed["tokens"])
    np.testing.assert_array_equal(packed["targets"], streamed["targets"])


def test_the_shift_is_done_once():
    batch = _rows(pack_documents([np.array([5, 6, 7])], 3))
    assert batch["tokens"].tolist() == [[5, 6, 0]]
    assert batch["targets"].tolist() == [[6, 7, -100]]


def test_a_hand_made_example():
    documents = [np.array([1, 2, 3, 4]), np.array([11, 12]), np.array([21, 22, 23, 24, 25, 26])]
    batch = _rows(pack_documents(documents, 5, pad_id=99))
    assert batch["tokens"].tolist() == [[1, 2, 3, 11, 21], [22, 23, 24, 25, 99]]
    assert batch["targets"].tolist() == [[2, 3, 4, 12, 22], [23, 24, 25, 26, -100]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 3], [1, 1, 1, 1, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0]]


def test_documents_of_one_row_differ_in_segment_and_never_in_part():
    rng = np.random.default_rng(3)
    documents = [np.full(size, index) for index, size in enumerate(rng.integers(2, 40, 50))]
    batch = _rows(pack_documents(documents, 13))
    for tokens, segments in zip(batch["tokens"], batch["segments"]):
        for segment in range(1, segments.max() + 1):
            assert len(set(tokens[segments == segment])) == 1
        assert segments.max() == len(set(tokens[segments > 0]))


def test_batches_are_int32_and_a_row_past_the_end_is_empty():
    rows = pack_documents([np.arange(9, dtype=np.uint8)], 5, pad_id=7)
    batch = rows.batch(np.array([1, 2]))
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert batch["tokens"].tolist() == [[5, 6, 7, 7, 7], [7] * 5]
    assert batch["targets"].tolist() == [[6, 7, 8, -100, -100], [-100] * 5]
    assert batch["segments"][1].tolist() == batch["positions"][1].tolist() == [0] * 5


def test_a_row_by_index_equals_the_batch_and_ends():
    rows = pack_documents([np.arange(12)], 4)
    for index in range(len(rows)):
        for name, array in rows[index].items():
            np.testing.assert_array_equal(array, rows.batch(np.array([index]))[name][0])
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert len(list(rows)) == len(rows)


def test_documents_without_a_pair_are_left_out():
    rows = pack_documents([np.array([3]), np.array([], np.int64), np.array([4, 5])], 2)
    assert rows.num_documents == 1
    assert rows.num_pairs == 1


def test_joining_puts_start_and_end_around_documents_in_the_smallest_type():
    tokens, offsets = join_documents([np.array([1, 2], np.uint8), np.array([], np.uint8)], start_id=256, end_id=257)
    assert tokens.tolist() == [256, 1, 2, 257, 256, 257]
    assert offsets.tolist() == [0, 4, 6]
    assert tokens.dtype == np.uint16
    assert join_documents([np.array([1, 70_000])])[0].dtype == np.int32


@pytest.mark.parametrize(("wrong", "shown"), [(300, "300"), (-1, "-1"), (70_000, "70000")])
def test_ids_out_of_range_are_refused_with_dataset_document_and_id(wrong, shown):
    tokens, offsets = join_documents([np.array([1, 2, 3]), np.array([4, 5, wrong, 6])])
    with pytest.raises(ValueError, match=rf"'text', document 'b\.txt': token id {shown} at position 2 .* of 259 "):
        check_ids(tokens, offsets, vocab_size=259, dataset="text", names=["a.txt", "b.txt"])


def test_ids_in_range_pass():
    tokens, offsets = join_documents([np.array([0, 258])])
    check_ids(tokens, offsets, vocab_size=259, dataset="text", names=["a"])


def test_a_row_needs_a_length():
    with pytest.raises(ValueError, match="length is 0"):
        pack_documents([np.array([1, 2])], 0)
