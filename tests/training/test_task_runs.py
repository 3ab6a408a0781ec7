"""Runs that classify, tag and answer, from config to files of predictions."""

import json

import numpy as np
import pytest

from jaxformer.cli import main
from jaxformer.training.config import load_config
from jaxformer.training.finished import evaluate_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.predicting import load_predictor, predict_file
from jaxformer.training.task_metrics import answer_metrics, classification_metrics, entity_metrics, regression_metrics

TINY = (
    "model.num_layers=1",
    "model.embed_dim=8",
    "model.num_heads=2",
    "train.steps=2",
    "train.batch_size=4",
    "eval.batch_size=4",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "schedule.warmup_steps=1",
    "log.every_steps=1",
    "data.num_buckets=1",
    "data.length=24",
)
COUNTS = {"train": 8, "validation": 5, "test": 3}


def _config(spec, folder, ending, *overrides):
    """A tiny run's, with every split's file of a folder."""
    files = [f"data.{split}={folder}/{split}.{ending}" for split in COUNTS]
    return load_config(f"finetune:{spec}", [*TINY, *files, *overrides])


def _records(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """A finished run of classes, and its files."""
    folder = tmp_path_factory.mktemp("classes")
    for split, count in COUNTS.items():
        lines = [f"{split} film {number}, für\t{('bad', 'good')[number % 2]}" for number in range(count)]
        (folder / f"{split}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    figures = train_and_evaluate(_config("size=tiny", folder, "tsv", "data.length=16"), folder / "run")
    return folder, figures


@pytest.fixture(scope="module")
def predictor(classified):
    return load_predictor(classified[0] / "run")


def test_training_has_the_figures_of_the_task(classified):
    folder, figures = classified
    (record,) = [record for record in _records(folder / "run/metrics.jsonl") if record["split"] == "validation"]
    assert record["step"] == 2
    for name in ("accuracy", "f1_macro", "matthews"):
        assert record[name] == pytest.approx(figures[name])
    facts = json.loads((folder / "run/task.json").read_text())
    assert facts == {"task": "classification", "classes": ["bad", "good"], "may_lack_answers": False}


def test_eval_writes_predictions_and_figures(classified, predictor):
    folder, figures = classified
    evaluated = evaluate_run(folder / "run")
    assert evaluated["accuracy"] == pytest.approx(figures["accuracy"])
    assert evaluated["loss"] == pytest.approx(figures["validation_loss"])
    written = folder / "run/predictions/step_00000002"
    assert {file.name for file in written.iterdir()} == {
        f"{split}.{ending}" for split in ("validation", "test") for ending in ("json", "jsonl")
    }
    for split in ("validation", "test"):
        own = evaluated if split == "validation" else evaluated["test"]
        records = _records(written / f"{split}.jsonl")
        assert own["predictions"] == str(written / f"{split}.jsonl")
        assert [record["name"] for record in records] == [f"{split}.tsv:{line + 2}" for line in range(COUNTS[split])]
        expected = classification_metrics(
            [record["prediction"] for record in records], [record["label"] for record in records]
        )
        stored = json.loads((written / f"{split}.json").read_text())
        assert {name: stored[name] for name in expected} == expected == {name: own[name] for name in expected}
        assert stored["loss"] == own["loss"]
        found = predictor.predict([record["text"] for record in records])
        assert [prediction.label for prediction in found] == [record["prediction"] for record in records]
        shares = [list(record["probabilities"].values()) for record in records]
        np.testing.assert_allclose([list(one.probabilities.values()) for one in found], shares, rtol=1e-4)
        # The loss is the mean of minus the logarithm of what the right class gets.
        right = [record["probabilities"][record["label"]] for record in records]
        assert own["loss"] == pytest.approx(-np.log(right).mean(), rel=1e-4)


def test_predict_fills_files(classified, predictor, tmp_path, capsys):
    workdir = classified[0] / "run"
    texts = ["unseen text", "für", "", "far too long a text for the rows of this run, which is cut"]
    labels = [prediction.label for prediction in predictor.predict(texts)]
    table, lines = tmp_path / "in.tsv", tmp_path / "in.jsonl"
    table.write_text("id\ttext\n" + "".join(f"{place}\t{text}\n" for place, text in enumerate(texts)))
    lines.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    command = ["predict", f"--workdir={workdir}"]
    assert main([*command, f"--input={table}", f"--output={tmp_path}/out.tsv"]) == 0
    assert "4 predictions in" in capsys.readouterr().err
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert rows[0] == ["id", "text", "label"]
    assert [row[:2] for row in rows[1:]] == [[str(place), text] for place, text in enumerate(texts)]
    assert [row[2] for row in rows[1:]] == labels
    assert main([*command, f"--input={lines}", "--output=-", "--fields=body"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["label"] for record in printed] == labels
    assert all(0.5 <= record["probability"] <= 1.0 for record in printed)
    assert main([*command, f"--input={table}", f"--output={table}"]) == 1
    assert "is the input itself" in capsys.readouterr().err
    assert main([*command, f"--input={table}", "--output=-", f"--n_best={tmp_path}/best"]) == 2
    assert "n_best is of answers" in capsys.readouterr().err


@pytest.mark.slow
def test_classes_of_other_data_are_refused(classified, tmp_path):
    folder = classified[0]
    (tmp_path / "other.tsv").write_text("text\tlabel\na\tfair\nb\tgood\n")
    with pytest.raises(ConfigError, match="data have classes fair, good, must have the run's: bad, good"):
        evaluate_run(folder / "run", [f"data.{split}={tmp_path}/other.tsv" for split in COUNTS])


def test_figures_that_cannot_be_had_are_refused_before_training(classified, tmp_path):
    with pytest.raises(ConfigError, match=r"predict_examples is -1, must be at least 0, or None"):
        train_and_evaluate(_config("size=tiny", classified[0], "tsv", "eval.predict_examples=-1"), tmp_path / "run")


def test_what_is_no_run_of_a_task_does_not_predict(trained, tmp_path):
    with pytest.raises(ConfigError, match="has no head that classifies, tags or answers"):
        load_predictor(trained[0])
    with pytest.raises(ConfigError, match="has no head"):
        predict_file(trained[0], __file__, tmp_path / "out")


@pytest.mark.slow
def test_numbers_of_pairs(tmp_path):
    for split, count in COUNTS.items():
        lines = [f"{split} {number}\tand {number}\t{number / 2}" for number in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    changes = ("data.fields=0,1", "data.label=2", "eval.predict_examples=0")
    config = _config("size=tiny,task=regression", tmp_path, "tsv", *changes)
    figures = train_and_evaluate(config, tmp_path / "run")
    assert "pearson" not in figures
    evaluated = evaluate_run(tmp_path / "run")
    records = _records(tmp_path / "run/predictions/step_00000002/validation.jsonl")
    pair = [np.array([float(record[name]) for record in records]) for name in ("prediction", "label")]
    assert evaluated["pearson"] == pytest.approx(regression_metrics(*pair)["pearson"])
    assert evaluated["loss"] == pytest.approx(np.mean((pair[0] - pair[1]) ** 2), rel=1e-3)
    predict_file(tmp_path / "run", tmp_path / "test.tsv", tmp_path / "out.tsv", batch_size=2)
    last = [float(line.split("\t")[2]) for line in (tmp_path / "out.tsv").read_text().splitlines()]
    written = _records(tmp_path / "run/predictions/step_00000002/test.jsonl")
    np.testing.assert_allclose(last, [record["prediction"] for record in written], rtol=1e-5)
    (tmp_path / "empty.tsv").write_text("")
    assert predict_file(tmp_path / "run", tmp_path / "empty.tsv", tmp_path / "none.tsv") == 0
    assert (tmp_path / "none.tsv").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_tags(tmp_path, model):
    for split, count in COUNTS.items():
        text = "".join(f"Zoë\tB-per\n{split}\tO\nlives\tO\n\n" for _ in range(count))
        (tmp_path / f"{split}.conll").write_text(text, encoding="utf-8")
    config = _config(f"size=tiny,task=ner,model={model}", tmp_path, "conll", "eval.predict_examples=2")
    figures = train_and_evaluate(config, tmp_path / "run")
    assert {"precision", "recall", "f1", "tag_accuracy"} <= set(figures)
    evaluated = evaluate_run(tmp_path / "run")
    records = _records(tmp_path / "run/predictions/step_00000002/validation.jsonl")
    assert len(records) == COUNTS["validation"]
    expected = entity_metrics([record["prediction"] for record in records], [record["label"] for record in records])
    assert {name: evaluated[name] for name in expected} == expected
    (tmp_path / "bare.conll").write_text("Zoë\nvalidation\nlives\n\n# text\nThere\n", encoding="utf-8")
    assert predict_file(tmp_path / "run", tmp_path / "bare.conll", tmp_path / "out.conll") == 2
    output = (tmp_path / "out.conll").read_text(encoding="utf-8").split("\n")
    tags = records[0]["prediction"]
    assert output[:5] == [f"Zoë\t{tags[0]}", f"validation\t{tags[1]}", f"lives\t{tags[2]}", "", "# text"]


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["spans", "tokens"])
def test_answers(tmp_path, answers):
    context = "Zoë lives in Orléans, far from the sea; Émile does not, and nobody knows why that is so."
    for split, count in COUNTS.items():
        questions = [
            {"id": f"{split}{number}", "question": "Who?", "answers": [{"text": "Émile", "answer_start": 40}]}
            if number % 2
            else {"id": f"{split}{number}", "question": "When?", "answers": [], "is_impossible": True}
            for number in range(count)
        ]
        content = {"data": [{"paragraphs": [{"context": context, "qas": questions}]}]}
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    changes = ("data.length=40", "data.stride=10", "data.question_length=8")
    config = _config(f"size=tiny,task=qa,answers={answers}", tmp_path, "json", *changes)
    figures = train_and_evaluate(config, tmp_path / "run")
    assert {"exact_match", "f1", "best_f1", "best_threshold"} <= set(figures)
    evaluated = evaluate_run(tmp_path / "run")
    records = _records(tmp_path / "run/predictions/step_00000002/validation.jsonl")
    assert [record["id"] for record in records] == [f"validation{number}" for number in range(COUNTS["validation"])]
    expected = answer_metrics([record["prediction"] for record in records], [record["answers"] for record in records])
    assert {name: evaluated[name] for name in expected} == expected
    command = ["predict", f"--workdir={tmp_path}/run", f"--input={tmp_path}/validation.json"]
    files = [f"--output={tmp_path}/out.json", f"--n_best={tmp_path}/best.json"]
    assert main([*command, *files]) == 0
    output = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert output == {record["id"]: record["prediction"] for record in records}
    best = json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    assert list(best) == list(output)
    assert all(sum(entry["probability"] for entry in entries) == pytest.approx(1.0) for entries in best.values())
    assert main([*command, f"--output={tmp_path}/always.json", "--no_answer_threshold=1e9"]) == 0
    assert all(json.loads((tmp_path / "always.json").read_text(encoding="utf-8")).values())
    evaluate_run(tmp_path / "run", ["eval.most_answer_tokens=1", "eval.no_answer_threshold=1e9"])
    short = _records(tmp_path / "run/predictions/step_00000002/validation.jsonl")
    # Bytes of UTF-8 are the tokens.
    assert all(1 <= len(record["prediction"].encode()) <= 2 for record in short)
