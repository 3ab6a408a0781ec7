"""Files to predict from come back in their own format."""

import json
import math
from pathlib import Path

import pytest

from jaxformer.data import Answer, Candidate, LabelledTexts, load_labelled, load_questions, load_tagged
from jaxformer.training.evaluating_tasks import task_figures, write_predictions
from jaxformer.training.output_files import check_target, write_target
from jaxformer.training.overrides import ConfigError
from jaxformer.training.predicting import read_input
from jaxformer.training.prediction_files import (
    candidates_of,
    read_json_lines,
    read_questions,
    read_table,
    read_words,
)
from jaxformer.training.task_outputs import ClassPrediction


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8"))
        return str(path)

    return write


def _classes(*labels):
    return [ClassPrediction(label, 0.75, {label: 0.75, "other": 0.25}) for label in labels]


def test_a_table_has_its_label_column_filled(write, tmp_path):
    path = write("a.tsv", 'id\tlabel\ttext\r\n1\tbad\tHe said "no\r\n\r\n2\t\tgünstig 日本\r\n')
    file = read_table(path, ("text",), "label")
    assert file.given.texts == ['He said "no', "günstig 日本"]
    assert file.given.labels is None
    output = file.filled(_classes("good", "bad"))
    assert output == 'id\tlabel\ttext\n1\tgood\tHe said "no\n\n2\tbad\tgünstig 日本\n'
    read = load_labelled("tsv_labels", write("out.tsv", output), ("text",), "label")
    assert (read.texts, read.labels) == (file.given.texts, ["good", "bad"])


def test_a_table_without_labels_gets_a_last_column(write):
    named = read_table(write("a.tsv", "text\tid\nx y\t1\nz\n"), ("text",), "label")
    assert named.filled(_classes("a", "b")) == "text\tid\tlabel\nx y\t1\ta\nz\t\tb\n"
    pairs = read_table(write("b.tsv", "x\ty\nz\tw\t\n"), ("0", "1"), "2")
    assert pairs.given.seconds == ["y", "w"]
    assert pairs.filled([0.5, -1.25]) == "x\ty\t0.5\nz\tw\t-1.25\n"
    lines = read_table(write("c.txt", "\ufeffone line\nand another"), ("0",), "label")
    assert lines.given.texts == ["one line", "and another"]
    assert lines.filled(_classes("a", "b")) == "one line\ta\nand another\tb\n"
    with pytest.raises(ValueError, match=r"label is column 3, but c.txt has 1"):
        read_table(write("c.txt", "one line\n"), ("0",), "3")
    with pytest.raises(ValueError, match="no column 'text'"):
        read_table(write("c.txt", "one line\n"), ("text",), "label")


def test_tables_of_nothing(write):
    assert read_table(write("a.tsv", "text\tlabel\n"), ("text",), "label").filled([]) == "text\tlabel\n"
    assert read_table(write("b.tsv", ""), ("0",), "1").filled([]) == ""


def test_json_lines_keep_their_records(write):
    lines = [
        '{"id": 7, "a": {"b": "für"}, "label": "old"}',
        "",
        '{"a": {"b": "x"}, "label": 1}',
        '{"a": {"b": "\\ud800"}}',
    ]
    file = read_json_lines(write("a.jsonl", "\n".join(lines) + "\n"), ("a.b",), "label")
    assert file.given.texts[:2] == ["für", "x"]
    output = file.filled(_classes("new", "0", "1"))
    assert output.encode("utf-8").count(b"\n") == 4
    records = [json.loads(line) if line else None for line in output.splitlines()]
    assert records[0] == {"id": 7, "a": {"b": "für"}, "label": "new", "probability": 0.75}
    assert "für" in output
    assert records[1] is None
    assert records[2]["label"] == 0
    assert records[3] == {"a": {"b": "\ud800"}, "label": "1", "probability": 0.75}
    numbers = read_json_lines(write("b.jsonl", '{"text": "x"}\n{"text": "y"}\n'), ("text",), "score")
    found = [json.loads(line) for line in numbers.filled([1.5, math.nan]).splitlines()]
    assert found == [{"text": "x", "score": 1.5}, {"text": "y", "score": None}]
    with pytest.raises(ValueError, match=r"c.jsonl, line 2: not JSON"):
        read_json_lines(write("c.jsonl", '{"text": "x"}\n{\n'), ("text",), "label")


WORDS = "# id = 1\nEU\nrejects\n\n-DOCSTART-\n \t\n# text = Zoë\n#\nZoë\n"


def test_words_get_their_tags_and_other_lines_stay(write):
    file = read_words(write("a.conll", WORDS))
    assert file.given.words == [["EU", "rejects"], ["#", "Zoë"]]
    assert file.given.names == ["a.conll:2", "a.conll:8"]
    output = file.filled([["B-org", "O"], ["O", "B-per"]])
    wanted = "# id = 1\nEU\tB-org\nrejects\tO\n\n-DOCSTART-\n \t\n# text = Zoë\n#\tO\nZoë\tB-per\n"
    assert output == wanted
    again = read_words(write("b.conll", output))
    assert again.given == file.given.__class__(["b.conll:2", "b.conll:8"], file.given.words, None, again.given.source)
    assert again.filled([["B-org", "O"], ["O", "B-per"]]) == output


def test_tags_that_stood_there_are_replaced(write):
    tabs = write("a.conll", "EU\tNNP\tO\nsays\tVB\tB-x\n\nso\tRB\tO\n")
    output = read_words(tabs).filled([["B-org", "O"], ["I-y"]])
    assert output == "EU\tNNP\tB-org\nsays\tVB\tO\n\nso\tRB\tI-y\n"
    assert load_tagged(write("b.conll", output)).tags == [["B-org", "O"], ["I-y"]]
    blanks = write("c.conll", "EU NNP O\nsays VB O\n# # O\n")
    assert read_words(blanks).filled([["B-org", "O", "O"]]) == "EU NNP B-org\nsays VB O\n# # O\n"
    others = write("d.conll", "EU NNP\nsays VB\n")
    assert read_words(others).filled([["B-org", "O"]]) == "EU NNP\tB-org\nsays VB\tO\n"
    empty = write("e.conll", "EU\t\nsays\t\n")
    assert read_words(empty).filled([["B-org", "O"]]) == "EU\tB-org\nsays\tO\n"
    nothing = read_words(write("f.conll", "\n# none here\n"))
    assert (len(nothing.given), nothing.filled([])) == (0, "\n# none here\n")


def _squad(*ids):
    questions = [{"id": name, "question": "Who?"} for name in ids]
    return json.dumps({"data": [{"paragraphs": [{"context": "Émile did.", "qas": questions}]}]})


ANSWERS = [
    Answer("a", "Émile", (Candidate("Émile", 0, 3.0), Candidate("did", 6, 1.0)), 2.0),
    Answer("b", "", (), 0.0),
]


def test_answers_stand_by_their_questions_ids(write):
    file = read_questions(write("a.json", _squad("a", "b")))
    assert [question.context for question in file.given.questions] == ["Émile did."] * 2
    assert json.loads(file.filled(ANSWERS)) == {"a": "Émile", "b": ""}
    assert "Émile" in file.filled(ANSWERS)
    with pytest.raises(ValueError, match="2 questions with the id 'a'"):
        read_questions(write("b.json", _squad("a", "b", "a")))


def test_candidates_have_none_among_them():
    listed = json.loads(candidates_of(ANSWERS))
    total = math.exp(3) + math.exp(2) + math.exp(1)
    assert [(entry["text"], entry["start"], entry["score"]) for entry in listed["a"]] == [
        ("Émile", 0, 3.0),
        ("", None, 2.0),
        ("did", 6, 1.0),
    ]
    assert [entry["probability"] for entry in listed["a"]] == pytest.approx([math.exp(x) / total for x in (3, 2, 1)])
    assert listed["b"] == [{"text": "", "start": None, "score": 0.0, "probability": 1.0}]


def test_evaluated_examples_stand_beside_what_is_right(write, tmp_path):
    given = LabelledTexts(["f:1", "f:2", "f:3"], ["für", "x", "y"], ["a", "b", "c"], ["1.5", "2", ""], "f")
    file = write_predictions(tmp_path, "test", given, [1.0, 3.0, 2.0], {"pearson": math.nan, "loss": 0.5})
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert records[0] == {"name": "f:1", "text": "für", "second": "a", "prediction": 1.0, "label": "1.5"}
    assert json.loads((tmp_path / "test.json").read_text()) == {"pearson": None, "loss": 0.5}
    # What has no label is predicted and not counted.
    assert task_figures(given, [1.0, 3.0, 2.0])["squared_error"] == pytest.approx((0.25 + 1.0) / 2)
    words = load_tagged(write("words", "EU\tB-org\nso\tO\n"))
    (record,) = [json.loads(line) for line in write_predictions(tmp_path, "w", words, [["O", "O"]], {}).open()]
    assert record == {"name": "words:1", "words": ["EU", "so"], "prediction": ["O", "O"], "label": ["B-org", "O"]}
    questions = load_questions(write("q.json", _squad("a", "b")))
    (first, second) = [json.loads(line) for line in write_predictions(tmp_path, "q", questions, ANSWERS, {}).open()]
    assert (first["id"], first["prediction"], first["answers"], first["null_score"]) == ("a", "Émile", [], 2.0)
    assert first["candidates"][1] == {"text": "did", "first": 6, "score": 1.0}
    assert second["candidates"] == []
    # Questions that are only to be answered have no figures.
    assert task_figures(questions, ANSWERS) == {}


def test_formats_are_those_of_the_task(write):
    table, lines = write("a.txt", "x\ty\n"), write("a.jsonl", '{"t": "x"}\n')
    tsv = {"name": "tsv_labels", "fields": ("0",), "label": "1"}
    assert read_input(table, "classification", tsv).filled(_classes("b")) == "x\tb\n"
    assert read_input(lines, "classification", tsv, fields=("t",)).given.texts == ["x"]
    assert read_input(table, "classification", {}, fields=("1",)).given.texts == ["y"]
    assert read_input(write("b", '{"text": "x"}\n'), "regression", {"name": "jsonl_labels"}).given.texts == ["x"]
    with pytest.raises(ConfigError, match="format is 'conll', must be tsv or jsonl for classification"):
        read_input(table, "classification", tsv, "conll")
    with pytest.raises(ConfigError, match=r"format is 'squat'; .*squad"):
        read_input(table, "answers", {}, "squat")
    with pytest.raises(ValueError, match="fields is"):
        read_input(table, "classification", tsv, fields=("0", "1", "2"))


def test_output_is_written_at_once_and_never_over_the_input(tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("given")
    target.write_text("before")
    (tmp_path / "link").symlink_to(source)
    check_target(target, source)
    for wrong, message in [
        (source, "the input itself"),
        (tmp_path / "link", "the input itself"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "out", "there is no folder"),
        (tmp_path / ("n" * 256), "cannot be written: File name too long"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_target(wrong, source)

    def fail(self, other):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(ValueError, match="cannot be written: No space left"):
            write_target(target, "after")
    assert target.read_text() == "before"
    write_target(target, "für")
    assert target.read_text(encoding="utf-8") == "für"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "link", "out"]
    longest = tmp_path / ("n" * 255)
    check_target(longest, source)
    write_target(longest, "kept")
    assert longest.read_text() == "kept"
    write_target("-", "shown für\n")
    assert capsys.readouterr().out == "shown für\n"
