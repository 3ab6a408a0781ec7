import gzip
import json

import pytest

from jaxformer.data import load_tokenizer, train_tokenizer, train_tokenizer_from_files
from jaxformer.data.tokenizer_training import _pieces

TEXTS = [f"the number {index} is {'even' if index % 2 == 0 else 'odd'}\nnumbers, number\n" * 5 for index in range(50)]


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 300), ("wordpiece", 80), ("unigram", 500)])
def test_training_from_files_writes_a_tokenizer_that_loads(kind, vocab_size, tmp_path):
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt").write_text(text)
    output = tmp_path / "out" / "tokenizer.json"
    figures = train_tokenizer_from_files(
        kind=kind, vocab_size=vocab_size, input=str(tmp_path / "*.txt"), output=str(output)
    )
    tokenizer = load_tokenizer(output)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["vocab_size"] == tokenizer.vocab_size <= vocab_size
    assert figures["documents"] == 50
    assert figures["bytes"] == sum(len(text) for text in TEXTS)
    assert figures["bytes_per_token"] > 1.5
    assert tokenizer.decode(tokenizer.encode("the number 7 is odd")) == "the number 7 is odd"


def test_training_from_json_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    figures = train_tokenizer_from_files(kind="bpe", vocab_size=280, input=str(file), output=tmp_path, field="body")
    assert figures["documents"] == 50
    assert (tmp_path / "tokenizer.json").is_file()


def test_byte_pairs_are_the_same_each_time_and_read_an_iterator_once():
    first, second = (train_tokenizer("bpe", iter(TEXTS), 290).backend.to_str() for _ in range(2))
    assert first == second


def test_frequent_words_become_one_token():
    for kind, vocab_size in (("bpe", 300), ("wordpiece", 80), ("unigram", 500)):
        tokenizer = train_tokenizer(kind, TEXTS, vocab_size)
        assert len(tokenizer.encode("number")) <= 2


def test_rare_characters_are_spelled_in_bytes_and_take_no_piece():
    rare = "".join(chr(0x4E00 + index) for index in range(900))
    tokenizer = train_tokenizer("unigram", [*TEXTS * 400, rare], 600)
    assert tokenizer.decode(tokenizer.encode(rare)) == rare
    assert len(tokenizer.encode(rare)) == len(rare.encode())


def test_further_special_tokens_get_ids_of_their_own():
    tokenizer = train_tokenizer("bpe", TEXTS, 280, extra_special_tokens=("<mask>", "<extra>"))
    ids = {tokenizer.backend.token_to_id(token) for token in ("<pad>", "<bos>", "<eos>", "<mask>", "<extra>")}
    assert len(ids) == 5
    assert None not in ids


def test_a_long_text_is_read_in_pieces():
    text = "".join(f"line {index}\n" for index in range(1000)) + "x" * 5000
    pieces = list(_pieces([text, "", "short"], characters=700))
    assert "".join(pieces) == text + "short"
    assert all(len(piece) < 720 for piece in pieces[:10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sentencepiece", TEXTS, 300), "kind is 'sentencepiece'; must be one of bpe, wordpiece, unigram"),
        (("bpe", TEXTS, 256), "vocab_size is 256: bpe needs more"),
        (("wordpiece", TEXTS, 4), "vocab_size is 4: wordpiece needs more"),
        (("unigram", TEXTS, 260), "vocab_size is 260: unigram needs more"),
        (("unigram", TEXTS, 300), "vocab_size is 300: unigram needs more"),
        (("bpe", [], 300), "there is no text"),
        (("unigram", [], 400), "there is no text"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(*arguments)


@pytest.fixture
def sides(tmp_path):
    """The same pairs as parallel files, one of them compressed, as a table and as JSON lines; and a folder."""
    sources, targets = ["zzzz yyyy", "yyyy zzzz"] * 20, ["qqqq", "qqqq wwww"] * 20
    (tmp_path / "t.x.gz").write_bytes(gzip.compress("\n".join(sources).encode()))
    (tmp_path / "t,y").write_text("\n".join(targets))
    (tmp_path / "t.y").write_text("\n".join(targets))
    (tmp_path / "t.tsv").write_text("\n".join(f"{s}\t{t}" for s, t in zip(sources, targets)))
    (tmp_path / "n.tsv.gz").write_bytes(gzip.compress(("src\ttgt\n" + (tmp_path / "t.tsv").read_text()).encode()))
    lines = [json.dumps({"src": s, "t": {"tgt": t}}) for s, t in zip(sources, targets)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    ("input", "field", "known"),
    [
        ("{0}/t.x.gz,{0}/t.y", None, "zq"),
        ("{0}/t.[xy]*", None, "zq"),
        ("{0}/t.x.gz", None, "z"),
        ("{0}/t,y", None, "q"),  # a file with a comma in its name
        ("{0}/t.tsv", "0,1", "zq"),
        ("{0}/t.tsv", "1", "q"),
        ("{0}/n.tsv.gz", "src", "z"),
        ("{0}/?.tsv*", "1", "q"),
        ("{0}/t.jsonl", "src,t.tgt", "zq"),
        ("{0}/t.jsonl", "t.tgt", "q"),
    ],
)
def test_a_tokenizer_is_trained_on_both_sides_of_pairs_or_on_one(sides, input, field, known):
    output = sides / "out" / "tokenizer.json"
    figures = train_tokenizer_from_files(
        kind="bpe", vocab_size=275, input=input.format(sides), output=output, field=field
    )
    tokenizer = load_tokenizer(output)
    for letter in "zq":
        assert (len(tokenizer.encode(4 * letter)) == 1) == (letter in known)
    assert figures["documents"] > 0
    assert figures["bytes_per_token"] > 1.5


def test_a_side_that_is_not_there_is_refused(sides):
    for input, field, message in (
        ("{0}/t.x.gz,{0}/none", None, "there is no file at .*none"),
        ("{0}/t.tsv", "2", r"t\.tsv, line 1: no column 2"),
        ("{0}/n.tsv.gz", "src,trg", "no column 'trg'; there is 'src', 'tgt'"),
    ):
        with pytest.raises(ValueError, match=message):
            train_tokenizer_from_files(kind="bpe", vocab_size=275, input=input.format(sides), output=sides, field=field)
