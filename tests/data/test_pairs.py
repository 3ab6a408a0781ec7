import gzip
import json
import sys
import types

import numpy as np
import pytest

from jaxformer.data import (
    PAIR_DATASETS,
    ByteTokenizer,
    Pairs,
    SymbolTokenizer,
    data_loader,
    load_pair_data,
    load_pairs,
    load_text_task_data,
    train_tokenizer,
)
from jaxformer.data.vocabulary import with_sentinels

SMALL = {"train_examples": 9, "validation_examples": 5, "test_examples": 7}


def _write(path, lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Train and validation files, a side each, with a blank on either side of both."""
    sources = ["ein Hund", "", "eine Katze", "drei", "vier Hunde laufen schnell davon", "fünf"]
    targets = ["a dog", "nothing", "a cat", "  ", "four dogs run away fast", "five"]
    return {
        "train": (_write(tmp_path / "t.de.gz", sources), _write(tmp_path / "t.en", targets)),
        "validation": (_write(tmp_path / "v.de", ["", "zwei"]), _write(tmp_path / "v.en", ["x", ""])),
    }


def test_a_line_of_one_file_stands_for_a_line_of_the_other(files):
    pairs = load_pairs("parallel", paths=files["train"])
    assert list(pairs.names) == [f"t.de.gz:{number}" for number in range(1, 7)]
    assert pairs.sources[1] == ""
    assert (pairs.sources[5], pairs.targets[5]) == ("fünf", "five")
    kept = pairs.without_blank()
    assert list(kept.names) == ["t.de.gz:1", "t.de.gz:3", "t.de.gz:5", "t.de.gz:6"]
    assert kept.skipped == 2
    assert pairs.skipped == 0


def test_lines_end_with_lf_or_crlf_and_with_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffone\r\ntwo\u2028parts\r\n\r\nfour".encode())
    (tmp_path / "b").write_bytes(b"1\n2\n3\n4\n")
    pairs = load_pairs("parallel", paths=(str(tmp_path / "a"), str(tmp_path / "b")))
    assert list(pairs.sources) == ["one", "two\u2028parts", "", "four"]
    assert list(pairs.targets) == ["1", "2", "3", "4"]


def test_columns_of_a_table_by_number_or_by_name(tmp_path):
    path = _write(tmp_path / "a.tsv.gz", ['id\tde\ten "x"', '1\tein "Hund\ta dog', "", "2\teine Katze\ta cat\tmore"])
    by_number = load_pairs("tsv_pairs", paths=(path,), fields=("2", "1"))
    assert list(by_number.sources) == ['en "x"', "a dog", "a cat"]
    assert list(by_number.targets) == ["de", 'ein "Hund', "eine Katze"]
    by_name = load_pairs("tsv_pairs", paths=(path,), fields=("de", 'en "x"'))
    assert list(by_name.sources) == ['ein "Hund', "eine Katze"]
    assert list(by_name.names) == ["a.tsv.gz:2", "a.tsv.gz:4"]


def test_fields_of_json_lines_may_be_inside_others(tmp_path):
    lines = [{"de": "eins", "t": {"en": "one"}}, {"de": "zwei", "t": {"en": ""}}, {"de": "3", "t.en": "whole", "t": 1}]
    path = _write(tmp_path / "a.jsonl", [*map(json.dumps, lines), ""])
    pairs = load_pairs("jsonl_pairs", paths=(path,), fields=("de", "t.en"))
    assert list(zip(pairs.names, pairs.sources, pairs.targets)) == [
        ("a.jsonl:1", "eins", "one"),
        ("a.jsonl:2", "zwei", ""),
        ("a.jsonl:3", "3", "whole"),
    ]


CONTENTS = {
    "a.txt": b"one\ntwo\n",
    "b.txt": b"1\n2\n3\n",
    "empty": b"",
    "latin": b"gut\nsch\xf6n\n",
    "short.tsv": b"a\tb\nc\n",
    "named.tsv": b"de\ten\neins\tone\n",
    "bad.jsonl": b'{"source": "a", "target": "b"}\n{"source": "a"}\n',
    "type.jsonl": b'{"source": "a", "target": null}\n',
    "not.jsonl": b"{\n",
    "cut.gz": gzip.compress(b"text" * 100)[:-9],
}


@pytest.mark.parametrize(
    ("name", "paths", "fields", "message"),
    [
        ("parallel", ("a.txt", "b.txt"), None, r"a\.txt has 2 lines and .*b\.txt 3: a line of one must stand"),
        ("parallel", ("a.txt", "latin"), None, r"latin is not text in UTF-8 \(byte 7\)"),
        ("parallel", ("a.txt", "none"), None, "none cannot be read"),
        ("parallel", ("a.txt", "cut.gz"), None, r"cut\.gz cannot be read"),
        ("parallel", ("empty", "empty"), None, "no pair in"),
        ("parallel", ("a.txt",), None, "are read from two files: the source's and the target's; paths is"),
        ("parallel", "a.txt", None, "are read from two files: the source's and the target's; paths is"),
        ("tsv_pairs", ("a.txt", "b.txt"), None, "are read from one file; paths is"),
        ("tsv_pairs", ("short.tsv",), ("0", "1"), r"short\.tsv, line 2: no column 1 \(from 0\); there are 1"),
        ("tsv_pairs", ("named.tsv",), None, r"named\.tsv, line 1: no column 'source'; there is 'de', 'en'\. Without"),
        ("tsv_pairs", ("empty",), None, r"empty, line 1: no column 'source'; there is nothing\. Without"),
        ("jsonl_pairs", ("bad.jsonl",), None, r"bad\.jsonl, line 2: no field 'target'; there is 'source'"),
        ("jsonl_pairs", ("type.jsonl",), None, "line 1: field 'target' is NoneType, must be text"),
        ("jsonl_pairs", ("type.jsonl",), ("source.de", "target"), "line 1: no field 'de'; there is a str, not an"),
        ("jsonl_pairs", ("not.jsonl",), None, "line 1: not JSON"),
        ("paralel", ("a.txt", "b.txt"), None, r"'paralel' are unknown; there are .* Did you mean 'parallel'\?"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path, name, paths, fields, message):
    for file, content in CONTENTS.items():
        (tmp_path / file).write_bytes(content)
    if not isinstance(paths, str):
        paths = tuple(str(tmp_path / path) for path in paths)
    with pytest.raises(ValueError, match=message):
        load_pairs(name, paths=paths, **({} if fields is None else {"fields": fields}))


class _Table(list):
    """The part of the Hub library's table that is used: rows, column names, columns."""

    column_names = ("translation", "title")

    def __getitem__(self, column):
        return [row[column] for row in self]


@pytest.fixture
def asked(monkeypatch):
    found = []

    def load_dataset(name, config, split):
        found.append((name, config, split))
        rows = [{"translation": {"de": f"{split} {word}", "en": word}, "title": 5} for word in ("one", "two")]
        return _Table(rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return found


def test_the_hub_gives_two_columns_of_each_split(asked):
    fields = ("translation.de", "translation.en")
    path = ("owner/name:part",)
    data = load_pair_data(
        name="huggingface_pairs", train=path, validation=path, test=("owner/name@train[:5]",), fields=fields
    )
    assert asked == [
        ("owner/name", "part", "train"),
        ("owner/name", "part", "validation"),
        ("owner/name", None, "train[:5]"),
    ]
    assert list(data.splits["validation"].source_texts) == ["validation one", "validation two"]
    assert list(data.splits["test"].target_texts) == ["one", "two"]
    for field, message in (
        ("de", "have no column 'de'; they have translation, title"),
        ("translation.fr", "row 0: no field 'fr'; there is 'de', 'en'"),
        ("title", "row 0: field 'title' is int, must be text"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pairs("huggingface_pairs", paths=path, fields=("translation.en", field))


def test_the_hub_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxformer\[datasets\]'"):
        load_pairs("huggingface_pairs", paths=("owner/name",))


def test_blank_sides_are_left_out_of_training_alone(files, tmp_path):
    data = load_pair_data(name="parallel", **files)
    assert len(data.train_rows) == 4
    assert "left out of training: 2 with a blank side" in data.summary
    validation = data.splits["validation"]
    assert list(validation.source_texts) == ["", "zwei"]
    assert [ids.tolist() for ids in (validation.sources[0], validation.targets[1])] == [[257], [257]]
    assert (len(validation), data.test_rows) == (2, None)
    assert set(data.splits) == {"validation"}
    files["train"] = (_write(tmp_path / "blank", ["", " "]), _write(tmp_path / "full", ["a", "b"]))
    with pytest.raises(ValueError, match="full: a side of every training pair is blank"):
        load_pair_data(name="parallel", train=files["train"])


def test_ids_end_and_the_decoder_begins_with_start_end_or_padding(files):
    data = load_pair_data(name="parallel", batching="padded", **files)
    assert bytes(data.train_rows.targets[0][:-1].tolist()).decode() == "a dog"
    assert {int(ids[-1]) for side in (data.train_rows.sources, data.train_rows.targets) for ids in side} == {257}
    assert data.start_id == 256
    assert data.train_rows.batch(np.array([0]), 0)["tokens"][0, :3].tolist() == [256, *b"a "]
    assert load_pair_data(name="copy_pairs", **SMALL).start_id == 11


def test_the_decoder_of_a_tokenizer_with_sentinels_begins_with_padding_as_t5s(files):
    data = load_pair_data(name="parallel", tokenizer=with_sentinels(ByteTokenizer(), 3), batching="padded", **files)
    assert data.start_id == 258
    batch = data.train_rows.batch(np.array([0]), 0)
    assert batch["targets"][0].tolist() == [*b"a dog", 257, *[-100] * (batch["targets"].shape[1] - 6)]
    assert batch["tokens"][0, :7].tolist() == [258, *b"a dog", 257]
    assert set(batch["tokens"][0, 7:].tolist()) <= {258}


def test_long_pairs_are_left_out_of_training_alone(files):
    files["test"] = files["train"]
    data = load_pair_data(name="parallel", length=16, **files)
    assert len(data.train_rows) == 3
    assert "1 of more than 16 tokens" in data.summary
    assert data.train_rows.length == 16
    assert len(data.splits["test"]) == 6
    assert data.test_rows.length == data.max_length == 32
    with pytest.raises(ValueError, match="no training pair with at most length = 3 tokens"):
        load_pair_data(name="parallel", length=3, **files)


@pytest.mark.parametrize("batching", ["bucketed", "padded", "packed"])
def test_rows_are_the_same_once_their_length_is_written_down(files, batching):
    data = load_pair_data(name="parallel", batching=batching, **files)
    again = load_pair_data(name="parallel", batching=batching, length=data.train_rows.length, **files)
    assert again.hash == data.hash
    assert again.max_length == data.max_length == 32
    assert batching.removeprefix("pad") in data.summary or batching == "padded"


def test_the_hash_tells_what_training_reads(files, tmp_path):
    other = (files["train"][0], _write(tmp_path / "o.en", ["a dog", "x", "a cat", "y", "four", "six"]))
    hashes = [
        load_pair_data(name="parallel", **{**files, **change}).hash
        for change in (
            {},
            {},
            {"test": files["train"]},
            {"train": other},
            {"num_buckets": 1},
            {"batching": "packed"},
            {"length": 16},
            {"validation": files["train"]},
        )
    ]
    assert len(set(hashes[:3])) == 1
    assert len(set(hashes)) == 6


def test_a_share_of_training_is_held_out_by_source(tmp_path):
    sources = [f"source {index % 50}" for index in range(200)]
    targets = [f"target {index}" for index in range(200)]
    train = (_write(tmp_path / "s", sources), _write(tmp_path / "t", targets))
    splits = []
    for seed in (0, 0, 1):
        data = load_pair_data(name="parallel", train=train, validation_fraction=0.2, split_seed=seed)
        held_out = data.splits["validation"]
        trained = {bytes(ids[:-1].tolist()).decode() for ids in data.train_rows.sources}
        assert 0 < len(set(held_out.source_texts)) < 20
        assert not trained & set(held_out.source_texts)
        assert len(data.train_rows) + len(held_out) == 200
        splits.append(set(held_out.source_texts))
    assert splits[0] == splits[1] != splits[2]
    same = (_write(tmp_path / "s", ["x"] * 9), _write(tmp_path / "t", targets[:9]))
    with pytest.raises(ValueError, match="not two different sources to split; give validation"):
        load_pair_data(name="parallel", train=same)


def test_source_and_target_may_have_tokenizers_of_their_own(files, tmp_path):
    own = train_tokenizer("bpe", ["a dog runs"] * 9, 262)
    data = load_pair_data(name="parallel", tokenizer=own, source_tokenizer="bytes", batching="padded", **files)
    assert data.source_tokenizer == ByteTokenizer()
    assert data.tokenizer is own
    batch = data.train_rows.batch(np.array([0]), 0)
    assert batch["source"][0, :9].tolist() == [*b"ein Hund", 257]
    assert batch["source"][0, -1] == 258
    assert batch["tokens"][0, 0] == own.bos_id
    assert batch["tokens"][0, -1] == own.pad_id
    for one in (own, "bytes"):
        both = load_pair_data(name="parallel", tokenizer=one, source_tokenizer=one, **files)
        assert both.source_tokenizer is both.tokenizer
    endless = SymbolTokenizer(("a", "dog", "pad"), pad_id=2)
    with pytest.raises(ValueError, match="tokenizer 'symbols' has no end token"):
        load_pair_data(name="parallel", tokenizer=endless, **files)
    with pytest.raises(ValueError, match=r"document 't\.de\.gz:1': 'ein' is none of the symbols"):
        load_pair_data(name="parallel", source_tokenizer=SymbolTokenizer(("a", "e"), pad_id=0, eos_id=1), **files)


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_tasks_are_pairs_of_a_word_and_its_answer(task):
    data = load_pair_data(
        name=f"{task}_pairs", train_examples=90, validation_examples=30, test_examples=50, min_length=2, max_length=7
    )
    oracle = {"copy": lambda word: word, "reverse": lambda word: word[::-1], "sort": sorted}[task]
    test = data.splits["test"]
    lengths = set()
    for source, target in zip(test.source_texts, test.target_texts):
        assert target.split() == oracle(source.split())
        lengths.add(len(source.split()))
    assert lengths == set(range(2, 8))
    assert (len(data.train_rows), len(data.splits["validation"]), len(test)) == (90, 30, 50)
    assert data.train_rows.length == 8
    assert test.sources[0].tolist() == [*map(int, test.source_texts[0].split()), data.tokenizer.eos_id]
    assert set(test.source_texts) != set(data.splits["validation"].source_texts)
    again = load_pair_data(name=f"{task}_pairs", max_length=7, split_seed=3, **SMALL)
    assert again.splits["test"].source_texts[:5] != test.source_texts[:5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "parallel"}, "pairs 'parallel' take no train_examples"),
        ({"name": "pairs", "train": ("a",)}, "pairs 'pairs' are unknown"),
        ({"name": "parallel", "train": ("a", "b"), "locales": ("de",)}, "take no locales, got"),
        ({"name": "parallel", "train": ("a", "b"), "max_length": 5}, "take no max_length, got 5"),
        ({"name": "copy_pairs", "train": ("a", "b")}, "pairs 'copy_pairs' take no train, got"),
        ({"name": "copy_pairs", "years": (1990, 1999)}, "take no years, got"),
        ({"name": "dates", "num_symbols": 5}, "pairs 'dates' take no num_symbols, got 5"),
        ({"name": "copy_pairs", "min_length": 5, "max_length": 4}, "min_length is 5 and max_length 4"),
        ({"name": "copy_pairs", "num_symbols": 2}, "num_symbols is 2"),
        ({"name": "copy_pairs", "split_seed": -1}, "split_seed is -1"),
        ({"name": "copy_pairs", "source_tokenizer": "bytes"}, "bring their own tokenizer; source_tokenizer is 'bytes'"),
        ({"name": "copy_pairs", "batching": "bucket"}, "batching is 'bucket'; must be one of bucketed, packed, padded"),
        ({"name": "copy_pairs", "num_buckets": 0}, "num_buckets is 0"),
        ({"name": "copy_pairs", "length": 0}, "length is 0"),
        ({"name": "copy_pairs", "length": 1}, "no training pair with at most length = 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_pair_data(**({} if "train" in arguments else SMALL), **arguments)


def test_a_share_must_leave_something(files):
    with pytest.raises(ValueError, match="pairs 'parallel' need train"):
        load_pair_data(name="parallel")
    with pytest.raises(ValueError, match="test_examples is 0"):
        load_pair_data(name="copy_pairs", test_examples=0)
    with pytest.raises(ValueError, match=r"validation_fraction is 1\.0"):
        load_pair_data(name="parallel", train=files["train"], validation_fraction=1.0)


def test_the_baseline_is_the_entropy_of_targets_with_their_end(tmp_path):
    train = (_write(tmp_path / "s", "abcd"), _write(tmp_path / "t", ["aa", "aa", "aa", "aa"]))
    data = load_pair_data(name="parallel", train=train, validation=train)
    # Counts plus one: 9 of 271 for the letter, 5 of 271 for the end.
    loss = -(2 * np.log(9 / 271) + np.log(5 / 271)) / 3
    assert f"{loss:.4f} nats per token" in data.baselines


def test_every_name_is_loaded_as_pairs_and_described():
    assert set(PAIR_DATASETS) == {
        *("parallel", "tsv_pairs", "jsonl_pairs", "huggingface_pairs"),
        *("dates", "copy_pairs", "reverse_pairs", "sort_pairs", "text_tasks"),
    }
    for name, load in PAIR_DATASETS.items():
        assert data_loader(name) is (load_text_task_data if name == "text_tasks" else load_pair_data)
        assert 20 < len(load.__doc__.splitlines()[0]) < 200


def test_pairs_are_as_many_on_each_side():
    with pytest.raises(ValueError, match=r"are \[1, 1, 2\] in number"):
        Pairs(["a"], ["b"], ["c", "d"], "x")
    with pytest.raises(ValueError, match=r"are \[1, 1, 1, 0\] in number"):
        Pairs(["a"], ["b"], ["c"], "x", [])
