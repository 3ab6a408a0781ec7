import json
import os
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data import (
    data_loader,
    encode_labelled,
    eval_batches,
    load_classification_data,
    load_documents,
    load_labelled,
    load_tokenizer,
    train_batches,
)

BYTES = load_tokenizer("bytes")
SHARED = Path(os.environ.get("JAXFORMER_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))


@pytest.fixture
def write(tmp_path):
    def write(name, lines):
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


def test_a_table_by_names_and_by_numbers(write):
    named = write("a.tsv", ["id\ttext\tgrade", '1\tHe said "no\tbad', "2\tgood one\tgood"])
    read = load_labelled("tsv_labels", named, ("text",), "grade")
    assert read.texts == ['He said "no', "good one"]
    assert read.labels == ["bad", "good"]
    assert read.names == ["a.tsv:2", "a.tsv:3"]
    bare = write("b.tsv", ["x\ty\t0", "z\tw\t1"])
    read = load_labelled("tsv_labels", bare, ("0", "1"), "2")
    assert (read.texts, read.seconds, read.labels) == (["x", "z"], ["y", "w"], ["0", "1"])
    assert load_labelled("tsv_labels", bare, ("1",), None).labels is None
    with pytest.raises(ValueError, match="no column 'text'"):
        load_labelled("tsv_labels", bare, ("text",), "2")


def test_labels_of_json_lines_may_be_text_numbers_or_truth(write):
    lines = [json.dumps({"a": {"b": str(index)}, "y": label}) for index, label in enumerate(["x", 1, 2.5, True])]
    read = load_labelled("jsonl_labels", write("c.jsonl", [*lines, ""]), ("a.b",), "y")
    assert read.texts == ["0", "1", "2", "3"]
    assert read.labels == ["x", "1", "2.5", "true"]
    with pytest.raises(ValueError, match=r"d.jsonl:1: no label 'z'"):
        load_labelled("jsonl_labels", write("d.jsonl", lines), ("a.b",), "z")


def _zip(tmp_path, count=12):
    path = tmp_path / "polarity.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for ending, word in (("pos", "good"), ("neg", "bad")):
            text = "".join(f"film {index} is {word} , caf\xe9 . \n" for index in range(count))
            archive.writestr(f"folder/rt-polarity.{ending}", text.encode("latin-1"))
        archive.writestr("folder/README.txt", "about")
    return str(path)


def test_sentence_polarity_is_two_files_in_latin_1(tmp_path):
    path = _zip(tmp_path)
    read = load_labelled("sentence_polarity", path)
    assert read.labels == ["positive"] * 12 + ["negative"] * 12
    assert read.texts[13] == "film 1 is bad , café ."
    assert load_documents("sentence_polarity", path=path).texts == list(read.texts)
    with pytest.raises(ValueError, match="cannot be read as a zip"):
        load_labelled("sentence_polarity", __file__)


def test_rows_of_pairs_are_cut_from_the_longer_text(write):
    path = write("e.tsv", ["abcdefgh\txy\t1", "ab\tuvwxyz\t0", "\tz\t1"])
    texts = load_labelled("tsv_labels", path, ("0", "1"), "2")
    rows = encode_labelled(texts, BYTES, length=9, classes=("0", "1"), separators=2).rows
    batch = rows.batch(np.arange(4), 0)
    start, end, pad = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id
    wanted = [
        [start, *b"abc", end, end, *b"xy", end],
        [start, *b"ab", end, end, *b"uvw", end],
        [start, end, end, *b"z", end, pad, pad, pad, pad],
        [pad] * 9,
    ]
    assert batch["tokens"].tolist() == [list(row) for row in wanted]
    assert batch["token_types"].tolist() == [[0] * 6 + [1] * 3, [0] * 5 + [1] * 4, [0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 9]
    np.testing.assert_array_equal(batch["key_mask"], batch["tokens"] != pad)
    assert batch["labels"].tolist() == [1, 0, 1, -100]


def test_numbers_are_targets_of_regression(write):
    path = write("f.tsv", ["a\t1.5", "b\t-2", "c\t3", "d\t0"])
    data = load_classification_data(
        name="tsv_labels", train=(path,), validation=(path,), fields=("0",), label="1", regression=True, num_buckets=1
    )
    batch = data.validation_rows.batch(np.arange(5), 0)
    assert batch["labels"].tolist() == [1.5, -2.0, 3.0, 0.0, 0.0]
    assert batch["label_mask"].tolist() == [True, True, True, True, False]
    assert batch["labels"].dtype == np.float32
    assert data.task == "regression"
    assert f"{np.var([1.5, -2, 3, 0]):.4f}" in data.baselines
    bad = write("g.tsv", ["a\t1", "b\tx"])
    with pytest.raises(ValueError, match="label 'x' is not a number"):
        load_classification_data(
            name="tsv_labels", train=(path,), validation=(bad,), fields=("0",), label="1", regression=True
        )
    with pytest.raises(ValueError, match=r"h\.tsv:2: label '1e39' is more than a float32 holds"):
        load_classification_data(
            train=(write("h.tsv", ["a\t1", "b\t1e39"]),), name="tsv_labels", fields=("0",), label="1", regression=True
        )


def test_no_row_is_wider_than_the_longest_that_there_may_be(write):
    options = {"name": "tsv_labels", "fields": ("0",), "label": "1", "length": 11}
    short, long = (write(f"{size}.tsv", [f"{'a' * size}\tx", f"{'b' * size}\ty"]) for size in (3, 40))
    for train, validation, widths in ((long, short, (11,)), (short, long, (8, 11))):
        data = load_classification_data(train=(train,), validation=(validation,), **options)
        assert data.validation_rows.widths == widths
        assert data.max_length == 11


def test_examples_without_a_label_are_not_counted(write):
    paths = [write(f"{name}.tsv", lines) for name, lines in (("n", ["a\tnan", "b\t-2", "c\t4"]), ("e", ["a\tnan"]))]
    options = {"name": "tsv_labels", "fields": ("0",), "label": "1"}
    numbers = load_classification_data(train=paths[:1], validation=paths[:1], regression=True, **options)
    assert f"{np.var([-2, 4]):.4f}" in numbers.baselines
    with pytest.raises(ValueError, match=r"e\.tsv: no example of validation has a label"):
        load_classification_data(train=paths[:1], validation=paths[1:], regression=True, **options)
    classes = write("c.tsv", ["a\t", "b\t", "c\t", "d\tx", "e\tx", "f\ty"])
    data = load_classification_data(train=(classes,), validation=(classes,), **options)
    assert data.baselines.endswith(f"'x', has an accuracy of {2 / 3:.4f}")
    with pytest.raises(ValueError, match=r"u\.tsv: no example of validation has a label"):
        load_classification_data(train=(classes,), validation=(write("u.tsv", ["a\t"]),), **options)


def test_data_of_a_run(tmp_path):
    assert data_loader("sentence_polarity") is load_classification_data
    data = load_classification_data(train=(_zip(tmp_path, 60),), validation_fraction=0.25, num_buckets=2, length=40)
    assert data.classes == ("negative", "positive")
    train, validation = (data.splits[name].texts for name in ("train", "validation"))
    assert len(train) + len(validation) == 120
    assert not set(train.texts) & set(validation.texts)
    seen = []
    for batch in eval_batches(data.validation_rows, batch_size=7):
        for row, label in zip(batch["tokens"], batch["labels"]):
            if label >= 0:
                seen.append((BYTES.decode(row), data.classes[label]))
    assert sorted(seen) == sorted(zip(validation.texts, validation.labels))
    assert next(train_batches(data.train_rows, batch_size=8, seed=0))["labels"].shape == (8,)
    assert data.max_length <= 40
    assert (
        data.hash
        == load_classification_data(
            train=(_zip(tmp_path, 60),), validation_fraction=0.25, num_buckets=2, length=40
        ).hash
    )
    assert "classes negative, positive" in data.summary


class _Table(list):
    """The part of the Hub library's table that is used: rows, and names of classes."""

    features = types.MappingProxyType({"grade": types.SimpleNamespace(names=["bad", "good"]), "text": None})


def test_the_hub_gives_labels_by_their_names(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return _Table([{"text": "a", "grade": 1}, {"text": "b", "grade": 0}, {"text": "c", "grade": -1}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    path = ("owner/name:part",)
    data = load_classification_data(
        name="huggingface_labels", train=path, validation=path, test=("owner/name@dev",), label="grade", num_buckets=1
    )
    assert asked == [("owner/name", "part", "train"), ("owner/name", "part", "validation"), ("owner/name", None, "dev")]
    assert data.classes == ("bad", "good")
    assert data.rows["test"].batch(np.arange(3), 0)["labels"].tolist() == [1, 0, -100]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxformer\[datasets\]'"):
        load_labelled("huggingface_labels", "owner/name")


def test_what_cannot_be_is_refused(write):
    path = write("h.tsv", ["a\t0", "b\t1"])
    arguments = {"name": "tsv_labels", "fields": ("0",), "label": "1"}
    with pytest.raises(ValueError, match="unknown; there are tsv_labels"):
        load_labelled("csv", path)
    with pytest.raises(ValueError, match="train is"):
        load_classification_data(**arguments)
    with pytest.raises(ValueError, match="label '2' is none of the classes 0, 1"):
        load_classification_data(train=(path,), validation=(write("i.tsv", ["a\t2"]),), **arguments)
    with pytest.raises(ValueError, match="has 1 classes"):
        load_classification_data(train=(write("j.tsv", ["a\t2"]),), validation=(path,), **arguments)
    with pytest.raises(ValueError, match="length is 3"):
        load_classification_data(train=(path,), validation=(path,), length=3, **arguments)


@pytest.mark.data
def test_sentence_polarity_is_read_as_published():
    if not SHARED.is_dir():
        pytest.skip(f"there is no folder {SHARED}")
    read = load_labelled("sentence_polarity", str(SHARED / "sentence_polarity/sentence_polarity.zip"))
    assert read.labels == ["positive"] * 5331 + ["negative"] * 5331
    assert not any(text != text.strip() or "\n" in text for text in read.texts)
