import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data import data_loader, load_tagged, load_tagging_data, load_tokenizer, train_tokenizer
from jaxformer.data.conll import hub_tagged

FILE = "EU\tB-org\nrejects\tO\n\t\nPeter\tB-per\nBlackburn\tI-per\n  \n\n-DOCSTART-\tO\n\nworks\tO\nunhappily\tO\n"
SHARED = Path(os.environ.get("JAXFORMER_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "words.conll"
    path.write_text(FILE)
    return str(path)


def test_sentences_end_at_lines_of_blanks(file, tmp_path):
    read = load_tagged(file)
    assert read.words == [["EU", "rejects"], ["Peter", "Blackburn"], ["works", "unhappily"]]
    assert read.tags == [["B-org", "O"], ["B-per", "I-per"], ["O", "O"]]
    assert read.names == ["words.conll:1", "words.conll:4", "words.conll:10"]
    bare = tmp_path / "bare"
    bare.write_text("only\nwords\n\nhere\n")
    assert load_tagged(str(bare)).tags is None
    columns = tmp_path / "columns"
    columns.write_text("EU NNP I-NP B-org\n")
    assert load_tagged(str(columns)).tags == [["B-org"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tO\nb\n", "words:1: a word of this sentence has no tag"),
        ("a\tX-y\n", "line 1: tag 'X-y'"),
        ("\n", "no word"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "words"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tagged(str(path))


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "bytes"])
def test_labels_stand_on_first_tokens_and_come_back_as_tags(file, kind):
    if kind == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        tokenizer = train_tokenizer(kind, [FILE.replace("\t", " ")] * 3, 420)
    data = load_tagging_data(train=(file,), validation=(file,), tokenizer=tokenizer, length=30)
    assert data.classes == ("O", "B-org", "I-org", "B-per", "I-per")
    examples = data.splits["train"]
    for index, words in enumerate(examples.sentences.words):
        ids, targets = examples.rows.tokens[index], examples.rows.per_token["targets"][0][index]
        # The tokens from each label to the next spell the word.
        places = np.flatnonzero(targets != -100)
        assert places.tolist() == examples.firsts[index].tolist()
        ends = [*places[1:], len(ids) - 1]
        assert [tokenizer.decode(ids[a:b]).strip() for a, b in zip(places, ends)] == words
        assert [data.classes[target] for target in targets[places]] == examples.sentences.tags[index]
    predictions = [np.where(row == -100, 3, row) for row in examples.rows.per_token["targets"][0]]
    padded = [np.append(row, [4, 4]) for row in predictions]
    assert examples.tags(padded, data.classes) == list(examples.sentences.tags)


def test_words_that_do_not_fit_are_cut_off_as_a_whole(file):
    data = load_tagging_data(train=(file,), validation=(file,), length=12)
    examples = data.splits["validation"]
    assert examples.firsts[1].tolist() == [1, -1]
    assert examples.rows.tokens[1].tolist() == [256, *b"Peter", 257]
    assert examples.tags([np.full(12, 3)] * 3, data.classes)[1] == ["B-per", "O"]
    assert data_loader("conll") is load_tagging_data
    assert "accuracy of 0.5000" in data.baselines


def test_tags_that_training_lacks_are_refused(file, tmp_path):
    other = tmp_path / "other"
    other.write_text("x\tB-new\n")
    with pytest.raises(ValueError, match="tag 'B-new' is none of the classes"):
        load_tagging_data(train=(file,), validation=(str(other),))


@pytest.mark.data
def test_wnut_17_is_read_as_published():
    if not SHARED.is_dir():
        pytest.skip(f"there is no folder {SHARED}")
    counts = {}
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        read = load_tagged(str(SHARED / "wnut17" / name))
        counts[name] = len(read)
        kinds = {tag[2:] for tags in read.tags for tag in tags if tag != "O"}
        assert kinds == {"person", "location", "group", "corporation", "product", "creative-work"}
    assert list(counts.values()) == [3394, 1009, 1287]


class _Table(dict):
    """The part of the Hub library's table that is used: columns, their names, and their features."""

    column_names = property(list)
    names = ["O", "B-org", "I-org"]  # noqa: RUF012

    @property
    def features(self):
        numbers = types.SimpleNamespace(feature=types.SimpleNamespace(names=self.names))
        return {"tokens": None, "ner_tags": numbers, "texts": types.SimpleNamespace(feature=None)}


def test_the_hub_gives_words_with_tags_by_number_or_by_name(monkeypatch):
    asked = []
    columns = {
        "tokens": [["EU", "rejects"], [], ["Peter"]],
        "ner_tags": [[1, 0], [], [2]],
        "texts": [["B-x", "O"], [], ["I-x"]],
    }

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return _Table({key: columns[key] for key in columns if split != "bare" or key == "tokens"})

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    path = ("owner/name:part",)
    data = load_tagging_data(name="huggingface_tags", train=path, validation=path, test=("owner/name@bare",))
    assert data_loader("huggingface_tags") is load_tagging_data
    assert asked == [
        ("owner/name", "part", "train"),
        ("owner/name", "part", "validation"),
        ("owner/name", None, "bare"),
    ]
    assert data.classes == ("O", "B-org", "I-org")
    sentences = data.splits["train"].sentences
    assert sentences.names == ["owner/name:part@train:0", "owner/name:part@train:2"]
    assert (sentences.words, sentences.tags) == ([["EU", "rejects"], ["Peter"]], [["B-org", "O"], ["I-org"]])
    assert data.splits["test"].sentences.tags is None
    read = hub_tagged("owner/name", ("tokens", "texts"))
    assert read.tags == [["B-x", "O"], ["I-x"]]
    for column, message in (([[1], [], [2]], "words and tags differ"), ([[1, 0], [], [3]], "'X' is not O, B-class")):
        columns["ner_tags"] = column
        monkeypatch.setattr(_Table, "names", ["O", "B-org", "I-org", "X"])
        with pytest.raises(ValueError, match=message):
            hub_tagged("owner/name")
    with pytest.raises(ValueError, match="have no column 'words'; they have tokens, ner_tags, texts"):
        hub_tagged("owner/name", ("words", "ner_tags"))
    columns["tokens"], columns["ner_tags"] = [[]], [[]]
    with pytest.raises(ValueError, match="holds no word"):
        hub_tagged("owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxformer\[datasets\]'"):
        hub_tagged("owner/name")
