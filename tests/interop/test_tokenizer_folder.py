"""The tokenizer of a checkpoint: from tokenizer.json or from older files, and what is said where there is none."""

import json

import numpy as np
import pytest
import tokenizers
from folders import sentencepiece_file

from jaxformer.data import ByteTokenizer, load_tokenizer
from jaxformer.interop import PretrainedError
from jaxformer.interop.tokenizer_folder import (
    decoder_start_notes,
    load_pretrained_tokenizer,
    save_pretrained_tokenizer,
)

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "a"]


def byte_pairs(folder):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: number for number, piece in enumerate([*sorted(alphabet), "th", "the", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")


def test_byte_pairs_from_two_files(tmp_path):
    byte_pairs(tmp_path)
    tokenizer, notes = load_pretrained_tokenizer(tmp_path, "gpt2")
    assert notes == []
    ids = tokenizer.encode("the end")
    assert ids[0] == tokenizer.backend.token_to_id("the")
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.eos_id == tokenizer.backend.token_to_id("<|endoftext|>")


@pytest.mark.parametrize(("config", "expected"), [({}, [5, 6, 7]), ({"do_lower_case": False}, [1, 6, 7])])
def test_word_pieces_from_their_list(tmp_path, config, expected):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, _ = load_pretrained_tokenizer(tmp_path, "bert")
    assert tokenizer.encode("The foxes") == expected
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 3, 0)
    assert tokenizer.backend.encode("a", "fox").ids == [2, 8, 3, 6, 3]


def test_t5s_pieces_are_followed_by_its_sentinels(tmp_path):
    words = [f"▁w{number}" for number in range(31_997)]
    sentencepiece_file(tmp_path / "spiece.model", words)
    tokenizer, notes = load_pretrained_tokenizer(tmp_path, "t5")
    assert notes == []
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (32_100, 0, 1)
    assert tokenizer.encode("w0 w31996 w7") == [3, 31_999, 10]
    assert tokenizer.decode([31_999, 10]) == "w31996 w7"
    ids = [tokenizer.backend.token_to_id(f"<extra_id_{number}>") for number in range(100)]
    assert ids == list(range(32_099, 31_999, -1))


def test_t5s_sentinels_are_as_many_as_its_settings_say(tmp_path):
    sentencepiece_file(tmp_path / "spiece.model", ["▁a", "▁b"])
    for count, size in ((2, 7), (0, 5)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": count}))
        assert load_pretrained_tokenizer(tmp_path, "t5")[0].vocab_size == size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": "many"}))
    with pytest.raises(PretrainedError, match="extra_ids='many', must be a number of sentinels"):
        load_pretrained_tokenizer(tmp_path, "t5")


def test_a_decoder_that_begins_otherwise_here_is_told(tmp_path):
    sentencepiece_file(tmp_path / "spiece.model", ["▁a", "▁b"])
    assert decoder_start_notes(None, {"decoder_start_token_id": 0}) == []
    for count, told in ((2, False), (0, True)):  # without sentinels nothing says that it is a T5's
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": count}))
        tokenizer, _ = load_pretrained_tokenizer(tmp_path, "t5")
        assert decoder_start_notes(tokenizer, {}) == []
        notes = decoder_start_notes(tokenizer, {"decoder_start_token_id": 0})
        assert [f"with id 0 by config.json, but with {tokenizer.eos_id}" in note for note in notes] == [True] * told


def test_t5s_pieces_are_handed_on_as_they_were_from_a_run_too(tmp_path):
    source, out = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    out.mkdir()
    sentencepiece_file(source / "spiece.model", ["▁a", "▁b"])
    load_pretrained_tokenizer(source, "t5")[0].save(tmp_path / "tokenizer.json")
    assert save_pretrained_tokenizer(load_tokenizer(tmp_path / "tokenizer.json"), out, source, "t5") == []
    assert [file.name for file in out.iterdir()] == ["spiece.model"]


def test_no_tokenizer_is_none_and_one_that_can_not_be_read_is_told(tmp_path):
    assert load_pretrained_tokenizer(tmp_path, "t5") == (None, [])
    (tmp_path / "spiece.model").write_bytes(b"model")
    tokenizer, notes = load_pretrained_tokenizer(tmp_path, "t5")
    assert tokenizer is None
    assert len(notes) == 1
    assert "spiece.model is not a tokenizer that can be read" in notes[0]
    (tmp_path / "spiece.model").rename(tmp_path / "tokenizer.model")
    tokenizer, notes = load_pretrained_tokenizer(tmp_path, "llama")
    assert tokenizer is None
    assert notes == ["no tokenizer: tokenizer.model can't be read alone; it needs tokenizer.json beside it"]


def test_files_are_handed_on_as_they_were(tmp_path):
    source, out = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    out.mkdir()
    byte_pairs(source)
    tokenizer, _ = load_pretrained_tokenizer(source, "gpt2")
    save_pretrained_tokenizer(tokenizer, out, source, "gpt2")
    assert sorted(file.name for file in out.iterdir()) == ["merges.txt", "vocab.json"]
    assert (out / "vocab.json").read_bytes() == (source / "vocab.json").read_bytes()


def test_bytes_are_written_so_that_others_read_them(tmp_path):
    save_pretrained_tokenizer(ByteTokenizer(), tmp_path, None, "gpt2")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "naïve fox"
    assert backend.encode(text).ids == ByteTokenizer().encode(text)
    assert load_tokenizer(tmp_path).vocab_size == ByteTokenizer().vocab_size
    assert np.all(np.array(load_tokenizer(tmp_path).encode(text)) == ByteTokenizer().encode(text))
