import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from jaxformer.data import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer, train_tokenizer

SAMPLE = [
    "def add(first, second):\n    return first + second\n\n\n",
    "class Été:\n\tname = 'café'  # crème brûlée\n" * 3,
    "for index in range(10):\n    if index % 2 == 0:\n        print(index, 'is even')\n",
] * 3
TRICKY = ["", " ", "\n\n  x", "<eos><bos><pad></s>", "<0x41>", "[SEP] [PAD]", "漢字 🙂\x00\x7f", "é", "\r\n", "a" * 300]
TRAINED = {
    "bpe": train_tokenizer("bpe", SAMPLE, 300),
    "unigram": train_tokenizer("unigram", SAMPLE, 400),
    "wordpiece": train_tokenizer("wordpiece", SAMPLE, 150),
}
LOSSLESS = {"bytes": ByteTokenizer(), "bpe": TRAINED["bpe"], "unigram": TRAINED["unigram"]}
ALL = {**LOSSLESS, "wordpiece": TRAINED["wordpiece"]}


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", codec="utf-8"), max_size=60))
def test_any_text_comes_back(kind, text):
    tokenizer = LOSSLESS[kind]
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", [*TRICKY, SAMPLE[1]])
def test_text_that_looks_like_special_tokens_is_text(kind, text):
    tokenizer = LOSSLESS[kind]
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert tokenizer.decode(ids) == text


def test_wordpiece_keeps_words_but_not_blanks_and_marks_the_unknown():
    tokenizer = TRAINED["wordpiece"]
    assert tokenizer.decode(tokenizer.encode("for  index\nin range")) == "for index in range"
    assert tokenizer.decode(tokenizer.encode("for 漢")) == "for [UNK]"
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(tokenizer.encode("[CLS] [SEP] [PAD]"))


def test_wordpiece_can_drop_capitals_and_no_other_kind_can():
    tokenizer = train_tokenizer("wordpiece", ["Some Words"] * 5, 60, lowercase=True)
    assert tokenizer.decode(tokenizer.encode("SOME words")) == "some words"
    with pytest.raises(ValueError, match="lowercase is only for wordpiece"):
        train_tokenizer("bpe", SAMPLE, 300, lowercase=True)


@pytest.mark.parametrize("kind", ALL)
def test_a_batch_equals_its_texts_one_by_one(kind):
    tokenizer = ALL[kind]
    texts = [*SAMPLE, *TRICKY]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype in (np.uint8, np.uint16, np.int32)
        assert ids.tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("kind", ALL)
def test_start_end_and_padding_leave_no_text(kind):
    tokenizer = ALL[kind]
    assert isinstance(tokenizer, Tokenizer)
    marks = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(marks)) == 3
    assert max(marks) < tokenizer.vocab_size
    ids = [tokenizer.bos_id, *tokenizer.encode("def index"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(np.array(ids)) == "def index"
    assert tokenizer.decode(iter(ids)) == "def index"
    for mark in marks:
        assert str(mark) in tokenizer.summary


def test_bytes_are_utf8_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 259
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([97, 195]) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("wrong", [-1, 100_000])
def test_ids_outside_the_vocabulary_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of {ALL[kind].vocab_size}"):
        ALL[kind].decode([1, wrong])


@pytest.mark.parametrize("kind", ALL)
def test_a_lone_surrogate_is_refused(kind):
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at position 1"):
        ALL[kind].encode("a\ud800")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("as_folder", [True, False])
def test_saved_tokenizers_load_the_same(kind, as_folder, tmp_path):
    path = tmp_path / "run" if as_folder else tmp_path / "run" / "tokenizer.json"
    ALL[kind].save(path)
    loaded = load_tokenizer(str(path))
    assert type(loaded) is type(ALL[kind])
    for attribute in ("vocab_size", "bos_id", "eos_id", "pad_id"):
        assert getattr(loaded, attribute) == getattr(ALL[kind], attribute)
    for text in [*SAMPLE, *TRICKY]:
        assert loaded.encode(text) == ALL[kind].encode(text)
    assert not [file for file in (tmp_path / "run").iterdir() if file.name.startswith(".")]


def _save_foreign(path, tokens, config=None):
    """A tokenizer.json made without this library: words, with truncation, padding and special tokens of its own."""
    backend = tokenizers.Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([token for token in tokens if token[0] in "<["])
    backend.enable_truncation(3)
    backend.enable_padding(length=7, pad_id=0, pad_token=tokens[0])
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("tokens", "bos", "eos", "pad"),
    [
        (["a", "b", "c", "d", "<|endoftext|>"], 4, 4, 4),  # GPT-2
        (["<pad>", "</s>", "<unk>", "a", "b", "c", "d"], 1, 1, 0),  # T5
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"], 2, 3, 0),  # BERT
        (["<s>", "<pad>", "</s>", "a", "b", "c", "d"], 0, 2, 1),  # RoBERTa
        (["a", "b", "c", "d", "<|begin_of_text|>", "<|end_of_text|>"], 4, 5, 5),  # Llama 3
        (["a", "b", "c", "d"], None, None, 0),
    ],
)
def test_special_tokens_of_published_tokenizers_are_found_by_name(tokens, bos, eos, pad, tmp_path):
    tokenizer = _save_foreign(tmp_path, tokens)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (bos, eos, pad)
    if bos is None:
        assert "no start or end token" in tokenizer.summary
    else:
        assert f"start {tokens[bos]!r} {bos}, end {tokens[eos]!r} {eos}, padding {pad}" in " ".join(
            tokenizer.summary.replace(")", "").split()
        )


def test_truncation_and_padding_of_a_file_are_switched_off(tmp_path):
    tokenizer = _save_foreign(tmp_path, ["[PAD]", "a", "b", "c", "d"])
    assert tokenizer.encode("a b c d a b c d a") == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert tokenizer.encode("a") == [1]


def test_a_token_that_fills_rows_but_is_text_is_still_decoded(tmp_path):
    tokenizer = _save_foreign(tmp_path, ["a", "b"])
    assert tokenizer.decode([0, 1, 0]) == "a b a"


def test_the_configuration_beside_a_file_names_its_special_tokens(tmp_path):
    config = {"bos_token": "<go>", "eos_token": {"content": "<stop>"}, "pad_token": None}
    tokenizer = _save_foreign(tmp_path, ["<s>", "</s>", "<go>", "<stop>", "a"], config)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 3, 3)
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert (again.bos_id, again.eos_id, again.pad_id) == (2, 3, 3)
    with pytest.raises(ValueError, match="bos token '<nowhere>' is not in its vocabulary"):
        _save_foreign(tmp_path, ["a"], {"bos_token": "<nowhere>"})


def test_the_size_counts_gaps_between_ids():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, "a"))
    assert SubwordTokenizer(backend).vocab_size == 10


@pytest.mark.parametrize("kind", TRAINED)
def test_a_long_text_is_cut_only_where_its_ids_do_not_change(kind):
    text = "".join(f"{SAMPLE[index % 3]}word {index} and more words\n  \n" for index in range(200))
    tokenizer = TRAINED[kind]
    from jaxformer.data.long_texts import cut_text

    pieces = list(cut_text(text, tokenizer.encode, characters=1500))
    assert len(pieces) > 5
    assert "".join(pieces) == text
    joined = [token for piece in pieces for token in tokenizer.backend.encode(piece, add_special_tokens=False).ids]
    assert joined == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_a_text_without_a_safe_cut_stays_whole():
    from jaxformer.data.long_texts import cut_text

    assert list(cut_text("no blanks here".replace(" ", "") * 50, list, characters=10)) == ["noblankshere" * 50]
    # A tokenizer that marks the start of each text, so that no cut leaves the ids as they are.
    text = "many words in a line " * 20
    assert list(cut_text(text, lambda text: [0, *map(ord, text)], characters=10)) == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, 'is not "bytes", a tokenizer.json'), ("{", "is not a tokenizer.json"), ("{}", "is not a tokenizer.json")],
)
def test_what_is_not_a_tokenizer_is_refused(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_importing_the_data_layer_loads_neither_jax_nor_grain_nor_tokenizers():
    unwanted = ["jax", "flax", "grain", "tokenizers", "datasets"]
    code = f"import jaxformer.data, sys; print([name for name in {unwanted} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
