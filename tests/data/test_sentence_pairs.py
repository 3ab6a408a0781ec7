import itertools

import numpy as np
import pytest

from jaxformer.data import Documents, load_tokenizer
from jaxformer.data.full_sentences import FullSentences
from jaxformer.data.masking import random_numbers
from jaxformer.data.sentence_pairs import (
    IS_NEXT,
    IS_RANDOM,
    NextSentences,
    Sentences,
    encode_sentences,
    pair_layout,
    truncated_lengths,
)

START, END = 2000, 2001


def _sentences(documents):
    """Sentences of given lengths in documents; every token has an id of its own, in order."""
    lengths = list(itertools.chain.from_iterable(documents))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    borders = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    return Sentences(np.arange(offsets[-1], dtype=np.int32), offsets, borders)


def _document_of(sentences, token):
    sentence = np.searchsorted(sentences.offsets, token, side="right") - 1
    return int(np.searchsorted(sentences.documents, sentence, side="right") - 1)


def _random_documents(seed=0, count=12):
    random = np.random.default_rng(seed)
    return [random.integers(1, 12, random.integers(1, 20)).tolist() for _ in range(count)]


def test_sentences_of_documents_are_encoded_with_the_blank_between_them():
    tokenizer = load_tokenizer("bytes")
    documents = Documents(["a", "b", "c"], ["One. Two is long.\n\nThree", " ", "Four."], "here")
    sentences = encode_sentences(documents, tokenizer, dataset="x", most=6)
    found = [
        [tokenizer.decode(sentences.span(index, index + 1)) for index in range(first, end)]
        for first, end in itertools.pairwise(sentences.documents.tolist())
    ]
    assert found == [["One.", " Two i", "s long", ".", " Three"], ["Four."]]


def test_one_text_and_two_as_an_encoder_reads_them():
    first, second = np.array([5, 6]), np.array([7])
    layouts = [
        pair_layout(first, None, start_id=1, end_id=2),
        pair_layout(first, second, start_id=1, end_id=2),
        pair_layout(first, second, start_id=1, end_id=2, separators=2),
    ]
    assert [(tokens.tolist(), types.tolist()) for tokens, types in layouts] == [
        ([1, 5, 6, 2], [0, 0, 0, 0]),
        ([1, 5, 6, 2, 7, 2], [0, 0, 0, 0, 1, 1]),
        ([1, 5, 6, 2, 2, 7, 2], [0, 0, 0, 0, 0, 1, 1]),
    ]
    with pytest.raises(ValueError, match="separators is 0, must be at least 1"):
        pair_layout(first, second, start_id=1, end_id=2, separators=0)


def test_the_longer_side_is_cut_token_by_token():
    for first, second, most in itertools.product(range(1, 13), range(1, 13), range(5, 14)):
        wanted = [first, second]
        while sum(wanted) > most:
            wanted[0 if wanted[0] > wanted[1] else 1] -= 1
        assert truncated_lengths(first, second, most) == tuple(wanted)


def test_chunks_part_each_document_into_two_sentences_or_more():
    documents = _random_documents()
    sentences = _sentences(documents)
    texts = NextSentences(sentences, 24, START, END, short_fraction=0.3)
    for document, (first, end) in enumerate(itertools.pairwise(sentences.documents.tolist())):
        chunks = [(begin, stop) for owner, begin, stop, _ in texts.chunks.tolist() if owner == document]
        if end - first < 2:
            assert chunks == []
            continue
        assert [begin for begin, _ in chunks] == [first, *(stop for _, stop in chunks[:-1])]
        assert chunks[-1][1] == end
        assert min(stop - begin for begin, stop in chunks) >= 2
    wanted = texts.chunks[:, 3]
    assert 2 <= wanted.min() < wanted.max() == 21
    assert (NextSentences(sentences, 24, START, END, short_fraction=0.0).chunks[:, 3] == 21).all()


def test_pairs_follow_each_other_half_the_time_and_else_are_of_two_documents():
    sentences = _sentences(_random_documents())
    texts = NextSentences(sentences, 24, START, END)
    labels, negatives, cuts = [], set(), set()
    for draw in range(60):
        for index in range(len(texts)):
            tokens, types, label = texts.row(index, random_numbers(1, 0, draw, index, texts.numbers))
            labels.append(label)
            assert len(tokens) <= 24
            assert tokens[0] == START
            ends = np.flatnonzero(tokens == END)
            assert ends.size == 2
            assert ends[1] == len(tokens) - 1
            np.testing.assert_array_equal(types, np.arange(len(tokens)) > ends[0])
            first, second = tokens[1 : ends[0]], tokens[ends[0] + 1 : -1]
            assert first.size
            assert second.size
            # Each side is one piece of text.
            assert (np.diff(first) == 1).all()
            assert (np.diff(second) == 1).all()
            owners = [_document_of(sentences, token) for token in (first[0], first[-1], second[0], second[-1])]
            assert owners[0] == owners[1] == texts.chunks[index, 0]
            assert owners[2] == owners[3]
            if label == IS_NEXT:
                assert owners[0] == owners[2]
                # What stands between them was cut off; if nothing was cut they touch, at a sentence's end.
                assert second[0] > first[-1]
                if len(tokens) < 24:
                    assert second[0] == first[-1] + 1
                    assert second[0] in sentences.offsets
                cuts.add((index, len(first)))
            else:
                assert label == IS_RANDOM
                assert owners[0] != owners[2]
                negatives.add(owners[2])
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
    # All documents serve as others, those of one sentence too; and chunks are cut at different places.
    assert negatives == set(range(12))
    assert len(cuts) > 2 * len(texts)


def test_pairs_need_another_document():
    with pytest.raises(ValueError, match="needs two documents"):
        NextSentences(_sentences([[3, 4, 5]]), 24, START, END)
    with pytest.raises(ValueError, match="length is 7"):
        NextSentences(_sentences([[3, 4], [3, 4]]), 7, START, END)
    with pytest.raises(ValueError, match="short_fraction is 2"):
        NextSentences(_sentences([[3, 4], [3, 4]]), 9, START, END, short_fraction=2.0)


def test_full_rows_by_hand():
    # Documents of tokens 0-2 3-5 | 6-7 | 8-12 13-16.
    sentences = _sentences([[3, 3], [2], [5, 4]])
    joined = FullSentences(sentences, 12, START, END)
    assert [joined.row(index)[0].tolist() for index in range(len(joined))] == [
        [START, 0, 1, 2, 3, 4, 5, END, 6, 7, END],
        [START, 8, 9, 10, 11, 12, 13, 14, 15, 16, END],
    ]
    isolated = FullSentences(sentences, 12, START, END, isolated=True)
    rows = [tuple(array.tolist() for array in isolated.row(index)) for index in range(len(isolated))]
    assert rows[0] == (
        [START, 0, 1, 2, 3, 4, 5, END, START, 6, 7, END],
        [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
    )
    assert rows[1][1:] == ([1] * 11, list(range(11)))


@pytest.mark.parametrize("isolated", [False, True])
def test_full_rows_hold_each_sentence_once_and_as_many_as_fit(isolated):
    sentences = _sentences(_random_documents(3, 30))
    texts = FullSentences(sentences, 17, START, END, isolated)
    rows = [texts.row(index) for index in range(len(texts))]
    found = np.concatenate([tokens[tokens < START] for tokens, _, _ in rows])
    np.testing.assert_array_equal(found, sentences.tokens)
    sizes = np.diff(sentences.offsets)
    for (tokens, segments, positions), after in zip(rows, [*texts.rows[1:], None]):
        assert len(tokens) <= 17
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            text = tokens[inside][tokens[inside] < START]
            assert len({_document_of(sentences, token) for token in text}) == 1
            assert positions[inside].tolist() == list(range(inside.sum()))
        if after:
            same = _document_of(sentences, tokens[-2]) == _document_of(sentences, sentences.offsets[after[0][0]])
            assert len(tokens) + sizes[after[0][0]] + (0 if same else 1 + isolated) > 17
