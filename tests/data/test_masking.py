import numpy as np
import pytest

from jaxformer.data import SubwordTokenizer, load_tokenizer, train_tokenizer
from jaxformer.data.masking import EVALUATION, TRAINING, Masking, random_numbers, row_numbers
from jaxformer.data.vocabulary import (
    mask_id,
    ordinary_ids,
    sentinel_ids,
    special_ids,
    with_mask,
    with_sentinels,
    word_starts,
)

TEXTS = [
    "The unhappiness of walking, talking and unwalkable walks. " * 5,
    "Walkers talked; unhappily they walked on." * 5,
]
MASK, VOCABULARY = 4, 1000
# Start, end, padding, unknown and mask, 0 to 4, are special.
ORDINARY = np.arange(5, VOCABULARY)
# Of seed 42, epoch 3, example 17.
FIRST = 18063267918128037830


def _rows(rows, length, seed=0):
    """Rows with a start in front, an end behind and padding after it; one million ordinary tokens of 400 by 2500."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, VOCABULARY, (rows, length + 5))
    maskable = np.zeros(tokens.shape, bool)
    maskable[:, 1 : length + 1] = True
    tokens[:, 0], tokens[:, length + 1], tokens[:, length + 2 :] = 0, 1, 2
    return tokens.astype(np.int32), maskable


def test_shares_of_a_million_tokens():
    tokens, maskable = _rows(400, 2500)
    numbers = row_numbers(7, TRAINING, [0] * 400, range(400), (3, tokens.shape[1]))
    inputs, targets = Masking(MASK, ORDINARY).apply(tokens, maskable, numbers)
    chosen = targets != -100
    assert maskable.sum() == 1_000_000
    assert not chosen[~maskable].any()
    np.testing.assert_array_equal(targets[chosen], tokens[chosen])
    np.testing.assert_array_equal(inputs[~chosen], tokens[~chosen])
    masked = inputs == MASK
    same = chosen & (inputs == tokens)
    random = chosen & ~masked & ~same
    # A random token is the same as before one time in 995, which moves 0.00002 from random to unchanged.
    assert abs(chosen.sum() / 1e6 - 0.15) < 0.0015
    assert abs(masked.sum() / 1e6 - 0.12) < 0.0013
    assert abs(random.sum() / 1e6 - 0.015) < 0.0005
    assert abs(same.sum() / 1e6 - 0.015) < 0.0005
    assert inputs[random].min() >= 5
    # Random ids are uniform: 15 of each expected, and none near none or fifty.
    counts = np.bincount(inputs[random], minlength=VOCABULARY)[5:]
    assert counts.min() > 0
    assert counts.max() < 45
    # Every place of a row is chosen equally often, and each row equally (5 sd of the binomials).
    assert np.abs(chosen[:, 1:2501].mean(axis=0) - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 400)
    assert np.abs(chosen[:, 1:2501].mean(axis=1) - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 2500)


def test_one_row_by_a_naive_loop():
    tokens, maskable = _rows(4, 30, seed=1)
    numbers = np.random.default_rng(5).integers(0, 2**64, (4, 3, 35), dtype=np.uint64)
    starts = np.random.default_rng(6).random(VOCABULARY) < 0.4
    for words in (None, starts):
        masking = Masking(MASK, ORDINARY, words, fraction=0.4, mask_fraction=0.5, random_fraction=0.25)
        inputs, targets = masking.apply(tokens, maskable, numbers)
        for row in range(4):
            word = 0
            for place in range(35):
                token = int(tokens[row, place])
                if words is None or words[token] or place == 0 or not maskable[row, place - 1]:
                    word = place
                choice, kind = (int(n) / 2**64 for n in (numbers[row, 0, word], numbers[row, 1, place]))
                expected = token
                if maskable[row, place] and choice < 0.4:
                    assert targets[row, place] == token
                    if kind < 0.5:
                        expected = MASK
                    elif kind < 0.75:
                        expected = 5 + int(numbers[row, 2, place]) % 995
                else:
                    assert targets[row, place] == -100
                assert inputs[row, place] == expected


def test_numbers_depend_on_seed_stream_epoch_and_example_and_on_nothing_else():
    cases = [(1, TRAINING, 0, 0), (2, TRAINING, 0, 0), (1, EVALUATION, 0, 0), (1, TRAINING, 1, 0), (1, TRAINING, 0, 1)]
    found = [tuple(random_numbers(*case, 9).tolist()) for case in cases]
    assert len({number for numbers in found for number in numbers}) == 45
    assert found == [tuple(random_numbers(*case, 9).tolist()) for case in cases]
    # Stated as a number: a run resumed after an upgrade must go on with the same masks.
    assert random_numbers(42, TRAINING, 3, 17, 1)[0] == FIRST
    together = row_numbers(1, TRAINING, [0, 1], [0, 0], (3, 3))
    assert together.shape == (2, 3, 3)
    assert tuple(together[1].ravel().tolist()) == found[3]


def test_words_of_wordpiece_are_chosen_as_a_whole():
    tokenizer = train_tokenizer("wordpiece", TEXTS, 60)
    starts = word_starts(tokenizer)
    pieces = {token: piece for piece, token in tokenizer.backend.get_vocab().items()}
    assert all(starts[token] != piece.startswith("##") for token, piece in pieces.items())
    tokens = np.array([tokenizer.encode(TEXTS[0])], np.int32)
    maskable = np.ones(tokens.shape, bool)
    numbers = row_numbers(0, TRAINING, [0], [0], (3, tokens.shape[1]))
    masking = Masking(mask_id(tokenizer), ordinary_ids(tokenizer), starts, fraction=0.5)
    chosen = masking.apply(tokens, maskable, numbers)[1][0] != -100
    follows = ~starts[tokens[0]]
    assert follows.sum() > 20
    assert 0 < chosen.sum() < chosen.size
    np.testing.assert_array_equal(chosen[1:][follows[1:]], chosen[:-1][follows[1:]])


def test_words_of_byte_level_pairs_and_unigrams_begin_behind_a_blank():
    for kind, size in (("bpe", 300), ("unigram", 500)):
        tokenizer = with_mask(train_tokenizer(kind, TEXTS, size))
        ids = tokenizer.encode("happily walking they talk.")
        starts = word_starts(tokenizer)[ids]
        words = np.split(np.array(ids), np.flatnonzero(starts[1:]) + 1)
        assert [tokenizer.decode(word) for word in words] == ["happily", " walking", " they", " talk."]


def test_special_ids_of_each_kind_and_what_is_added():
    wordpiece = train_tokenizer("wordpiece", TEXTS, 60)
    assert with_mask(wordpiece) is wordpiece
    assert special_ids(wordpiece).tolist() == [0, 1, 2, 3, 4]
    plain = load_tokenizer("bytes")
    marked = with_sentinels(with_mask(plain), 7)
    assert marked.vocab_size == 259 + 1 + 7
    assert mask_id(marked) == 259
    assert sentinel_ids(marked).tolist() == [266, 265, 264, 263, 262, 261, 260]
    assert with_sentinels(marked) is marked
    assert ordinary_ids(marked).tolist() == list(range(256))
    text = "é[MASK] <extra_id_0>\n\0 ü"
    assert marked.encode(text) == plain.encode(text)
    assert marked.decode(marked.encode(text)) == text
    assert (marked.bos_id, marked.eos_id, marked.pad_id) == (plain.bos_id, plain.eos_id, plain.pad_id)


def test_special_pieces_of_a_published_vocabulary_need_no_mark():
    import tokenizers

    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)} | {"c": 9}
    tokenizer = SubwordTokenizer(tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")))
    # Nothing has id 8.
    assert ordinary_ids(tokenizer).tolist() == [6, 7, 9]
    assert mask_id(tokenizer) == 5


def test_a_tokenizer_with_more_tokens_is_read_again(tmp_path):
    marked = with_sentinels(with_mask(train_tokenizer("bpe", TEXTS, 300)), 5)
    marked.save(tmp_path)
    read = load_tokenizer(tmp_path)
    assert read.vocab_size == marked.vocab_size
    assert sentinel_ids(read)[0] == marked.vocab_size - 1
    assert mask_id(read) == mask_id(marked)
    assert read.encode(TEXTS[0]) == marked.encode(TEXTS[0])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="has no mask token"):
        mask_id(load_tokenizer("bytes"))
    with pytest.raises(ValueError, match="has 0 sentinels"):
        sentinel_ids(load_tokenizer("bytes"))
    with pytest.raises(ValueError, match="does not show where words begin"):
        word_starts(load_tokenizer("bytes"))
    with pytest.raises(ValueError, match=r"fraction is 1\.5"):
        Masking(MASK, ORDINARY, fraction=1.5)
    with pytest.raises(ValueError, match="together at most 1"):
        Masking(MASK, ORDINARY, mask_fraction=0.9, random_fraction=0.2)
    with pytest.raises(ValueError, match="ordinary_ids is empty"):
        Masking(MASK, ORDINARY[:0])
