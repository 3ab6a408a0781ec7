import os
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data import SubwordTokenizer, load_tokenizer
from jaxformer.data.offsets import encode_with_offsets
from jaxformer.data.vocabulary import ordinary_ids, sentinel_ids, with_sentinels, word_starts

SHARED = Path(os.environ.get("JAXFORMER_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))
NORMAL, UNKNOWN, CONTROL, USER, _, BYTE = range(1, 7)
PIECES = {"▁": -3.0, "a": -2.0, "b": -2.5, "ab": -3.1, "▁a": -2.2, "bab": -6.0, "s": -4.0, ">": -5.0, "▁abb": -4.5}

# From SentencePiece 0.2.3 itself.
EXPECTED = {
    "Thank you for inviting me to your party last week.": [1562, 25, 21, 14256, 140, 12, 39, 1088, 336, 471, 5],
    "translate English to German: That is good.": [13959, 1566, 12, 2968, 10, 466, 19, 207, 5],
    "  a\n\tb  z ": [3, 9, 3, 115, 3, 172],
    "\ufb01ne \u2460\xbd \uff26\uff55\uff4c\uff4c \xe9t\xe9 e\u0301": [1399, 850, 2, 357, 4043, 1366, 3, 154],
    "\u65e5\u672c x <extra_id_0> </s>": [3, 2, 3, 226, 3, 2, 25666, 834, 23, 26, 834, 632, 3155, 3, 2, 87, 7, 3155],
    "": [],
}


def _varint(value):
    found = bytearray()
    value %= 2**64
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _field(number, value):
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _model(*, marks=("<pad>", "</s>", "<unk>"), more=(), trainer=b"", normalizer=b""):
    """The bytes of a model: padding 0, end 1, unknown 2, then pieces."""
    entries = [(mark, 0.0, UNKNOWN if mark == "<unk>" else CONTROL) for mark in marks]
    entries += [*((piece, score, NORMAL) for piece, score in PIECES.items()), *more]
    messages = [_field(1, piece.encode()) + _field(2, score) + _field(3, kind) for piece, score, kind in entries]
    settings = [_field(40, 2), _field(41, -1), _field(42, 1), _field(43, 0), trainer]
    # Also a number of 64 bits that no one asks for.
    unread = _varint(9 << 3 | 1) + bytes(8)
    return b"".join(_field(1, one) for one in messages) + unread + _field(2, b"".join(settings)) + _field(3, normalizer)


def _load(tmp_path, content):
    (tmp_path / "a.model").write_bytes(content)
    return load_tokenizer(tmp_path / "a.model")


def _best(text, front="▁"):
    """The segmentation of the highest score of all that there are; unknown characters that are neighbours are one."""
    text = front + "▁".join(text.split()) if text.split() else ""
    known = {piece: (number, PIECES[piece]) for number, piece in enumerate(PIECES, start=3)}

    def best(rest):
        if not rest:
            return 0.0, []
        ways = [(*known[rest[:size]], size) for size in range(1, len(rest) + 1) if rest[:size] in known]
        ways += [] if rest[0] in known else [(2, min(PIECES.values()) - 10, 1)]
        return max((score + best(rest[size:])[0], [token, *best(rest[size:])[1]]) for token, score, size in ways)

    ids = best(text)[1]
    return [token for place, token in enumerate(ids) if token != 2 or place == 0 or ids[place - 1] != 2]


def test_ids_are_those_of_the_best_of_all_segmentations(tmp_path):
    tokenizer = _load(tmp_path, _model())
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (12, 0, 1)
    assert tokenizer.encode("abb ab") == [11, 7, 5] == _best("abb ab")
    random = np.random.default_rng(0)
    for _ in range(150):
        text = "".join(random.choice([*"aaabbbs> xy"], random.integers(0, 10)))
        assert tokenizer.encode(text) == _best(text), text
    assert tokenizer.decode(tokenizer.encode("  ab  sab ")) == "ab sab"
    assert ordinary_ids(tokenizer).tolist() == list(range(3, 12))
    assert word_starts(tokenizer).nonzero()[0].tolist() == [3, 7, 11]
    assert encode_with_offsets(tokenizer, " abb  ab")[1].tolist() == [[1, 4], [6, 7], [7, 8]]


def test_text_that_looks_like_a_special_token_is_text_even_where_it_stands_in_the_vocabulary(tmp_path):
    tokenizer = with_sentinels(_load(tmp_path, _model()), 3)
    assert sentinel_ids(tokenizer).tolist() == [14, 13, 12]
    # The two unknown characters in front of "s" are one to SentencePiece, but here text is cut between them.
    assert tokenizer.encode("a</s>b") == [7, 2, 2, 9, 10, 5]
    for text in ("<pad>", "</s>", "<unk>", "<extra_id_0>", "a</s></s>"):
        assert not {0, 1, 12, 13, 14} & set(tokenizer.encode(text))
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, SubwordTokenizer)
    assert again.backend.to_str() == tokenizer.backend.to_str()
    assert (again.pad_id, again.eos_id) == (0, 1)


def test_a_folder_with_the_model_alone_is_a_tokenizer(tmp_path):
    (tmp_path / "spiece.model").write_bytes(_model())
    assert load_tokenizer(tmp_path).encode("ab") == _best("ab")


def test_settings_of_the_file_are_followed(tmp_path):
    bare = _load(tmp_path, _model(normalizer=_field(3, 0) + _field(4, 0)))
    assert bare.encode("ab  a") == [6, 3, 7]
    spelled = _load(
        tmp_path, _model(trainer=_field(35, 1), more=[(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)])
    )
    assert spelled.encode("aé") == [7, 12 + 0xC3, 12 + 0xA9]
    assert spelled.decode([7, 12 + 0xC3, 12 + 0xA9]) == "aé"
    marked = _load(tmp_path, _model(marks=("<s>", "<pad>", "<unk>"), trainer=_field(41, 0) + _field(43, 1)))
    assert (marked.bos_id, marked.eos_id, marked.pad_id) == (0, 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_model(trainer=_field(3, 2)), "kind BPE; only unigram"),
        (_model(more=[("x", 0.0, USER)]), "user-defined or unused pieces"),
        (_model(trainer=_field(24, 1)), "blanks behind words"),
        (_model(normalizer=_field(5, 0)), "blanks behind words"),
        (b"", "no unknown piece"),
        (_model()[:-20], "not a SentencePiece model"),
        (b'{"model": 1}', "not a SentencePiece model"),
        (b"\xff" * 20, "not a SentencePiece model"),
    ],
)
def test_what_is_no_unigram_model_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, content)


@pytest.mark.data
def test_t5s_model_gives_the_ids_of_sentencepiece():
    path = SHARED / "t5_sentencepiece/t5_32000.spm.model"
    if not path.is_file():
        pytest.skip(f"there is no file {path}")
    tokenizer = with_sentinels(load_tokenizer(path))
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (32_100, 0, 1)
    assert sentinel_ids(tokenizer)[[0, 99]].tolist() == [32_099, 32_000]
    for text, ids in EXPECTED.items():
        assert tokenizer.encode(text) == ids
