import gzip
import json
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from jaxformer.data import DATASETS, Documents, load_documents


def test_the_standard_library_is_sorted_sources_without_tests():
    documents = load_documents("python_stdlib")
    names = list(documents.names)
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    unwanted = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if unwanted & set(Path(name).parts[:-1])]
    assert documents.num_bytes > 5_000_000
    assert all(documents.texts)
    path = Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py"
    assert documents.texts[names.index("json/decoder.py")] == path.read_bytes().decode()


def test_python_sources_are_decoded_by_their_own_comment_and_others_skipped(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes("\ufeffname = 'é'\n".encode())
    (tmp_path / "c.py").write_bytes(b"# coding: nothing-known\n")
    (tmp_path / "d.py").write_bytes(b"name = '\xff'\n")
    (tmp_path / "e.py").write_bytes(b"")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "f.py").write_text("x = 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents = load_documents("python_stdlib")
    assert list(documents.names) == ["a.py", "b.py"]
    assert list(documents.texts) == ["# -*- coding: latin-1 -*-\nname = 'é'\n", "name = 'é'\n"]
    assert documents.skipped == 3


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_bytes("bé\r\n".encode())
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"c"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git" / "config").write_text("no")
    return tmp_path


def test_a_folder_is_all_files_below_it_but_hidden_and_unreadable_ones(folder):
    documents = load_documents("text", path=str(folder))
    assert dict(zip(documents.names, documents.texts)) == {"a.md": "a", "b.txt": "bé\r\n", "sub/c.txt.gz": "c"}
    assert list(documents.names) == sorted(documents.names)
    assert documents.skipped == 2


def test_a_file_and_a_glob(folder):
    assert list(load_documents("text", path=str(folder / "b.txt")).texts) == ["bé\r\n"]
    assert list(load_documents("text", path=str(folder / "*" / "*.gz")).texts) == ["c"]
    assert list(load_documents("text", path=str(folder / "**" / "*.txt*")).texts) == ["bé\r\n", "c"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("text", {"path": "picture.bin"}, r"picture\.bin is not text in UTF-8 \(byte 0\)"),
        ("text", {"path": "empty.txt"}, r"no document in .* \(1 skipped\)"),
        ("text", {"path": "*.nothing"}, "there is no file at"),
        ("text", {}, "needs a path"),
        ("text", {"path": "b.txt", "field": "x"}, "takes no field, got 'x'"),
        ("python_stdlib", {"path": "b.txt"}, "takes no path"),
        ("jsonl", {"path": "a.md"}, r"a\.md, line 1: not JSON"),
        ("texts", {}, r"'texts' is unknown; there are .* Did you mean 'text'\?"),
        ("huggingface", {}, "needs a path"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(folder, name, arguments, message):
    if "path" in arguments:
        arguments = {**arguments, "path": str(folder / arguments["path"])}
    with pytest.raises(ValueError, match=message):
        load_documents(name, **arguments)


def test_a_damaged_archive_is_refused_by_name(tmp_path):
    whole = gzip.compress(bytes(range(256)) * 100)
    # Cut short, and changed in the middle.
    for content in (whole[:-9], whole[:40] + bytes(30) + whole[70:]):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.gz cannot be read"):
            load_documents("text", path=str(tmp_path / "a.gz"))


def test_json_lines_give_a_field_of_each_line(tmp_path):
    lines = [{"body": "one\u2028line"}, {"body": ""}, {"body": "two", "text": "no"}]
    content = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "b.jsonl").write_text('{"body": "three"}')
    documents = load_documents("jsonl", path=str(tmp_path), field="body")
    assert list(documents.texts) == ["one\u2028line", "two", "three"]
    assert list(documents.names) == ["a.jsonl.gz:1", "a.jsonl.gz:3", "b.jsonl:1"]
    assert documents.skipped == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"a\.jsonl, line 2: no field 'text'; there is 'body'"),
        ('{"text": 5}', "line 2: field 'text' is int, must be text"),
        ("[1]", "line 2: no field 'text'; there is a list, not an object"),
        ("{", "line 2: not JSON"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_documents("jsonl", path=str(tmp_path / "a.jsonl"))


def test_huggingface_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxformer\[datasets\]'"):
        load_documents("huggingface", path="owner/name")


class _Table(list):
    """The part of the Hub library's table that is used: rows, column names, columns."""

    column_names = ("text", "label")

    def __getitem__(self, column):
        return [row[column] for row in self]


def test_huggingface_takes_a_column_of_the_train_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return _Table([{"text": "one", "label": 0}, {"text": "", "label": 1}, {"text": "two", "label": 1}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    documents = load_documents("huggingface", path="owner/name:part")
    assert asked == [("owner/name", "part", "train")]
    assert list(documents.texts) == ["one", "two"]
    assert documents.skipped == 1
    with pytest.raises(ValueError, match="no column 'body'; it has text, label"):
        load_documents("huggingface", path="owner/name", field="body")
    with pytest.raises(ValueError, match="column 'label' of row owner/name:1 is not text"):
        load_documents("huggingface", path="owner/name", field="label")


def test_the_hash_depends_on_texts_and_their_order_alone():
    def digest(names, texts):
        return Documents(names, texts, "x").hash

    assert digest(["a", "b"], ["1", "2"]) == digest(["c", "d"], ["1", "2"])
    assert len({digest(["a", "b"], texts) for texts in (["1", "2"], ["2", "1"], ["12", ""], ["", "12"])}) == 4


def test_every_dataset_has_a_line_of_description():
    for load in DATASETS.values():
        assert 20 < len(load.__doc__.splitlines()[0]) < 140
