import json
import math

import pytest

from jaxformer.training.metrics import MetricsWriter, cut_back, read_metrics


def write(path, steps):
    with MetricsWriter(path) as metrics:
        for step in steps:
            metrics.write(step, "train", loss=step / 2)


def steps_of(path):
    return [record["step"] for record in read_metrics(path)]


def test_each_record_is_one_json_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(3, "train", loss=0.5, tokens=7)
        metrics.write(3, "sample", text="a\nb é")
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"step": 3, "split": "train", "loss": 0.5, "tokens": 7},
        {"step": 3, "split": "sample", "text": "a\nb é"},
    ]


def test_line_stands_in_the_file_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(1, "train", loss=0.5)
        assert steps_of(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figure_that_is_not_finite_is_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, "train", loss=value)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None


def test_cutting_back_leaves_each_step_once_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5])
    assert cut_back(path, 3) == 2
    write(path, [4, 5, 6])
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", ['{"step": 4, "spl', "\x00\x00", '{"step": 4', "4\n", '{"loss": 1}\n'])
def test_unfinished_last_line_is_cut_away(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write(torn)
    assert steps_of(path) == [1, 2]
    assert cut_back(path, 7) == 1
    write(path, [3])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_cutting_back_what_does_not_exist_does_nothing(tmp_path):
    assert cut_back(tmp_path / "metrics.jsonl", 3) == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_receives_numbers_and_text(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        metrics.write(3, "train", loss=0.5)
        metrics.write(3, "sample", text="hello")
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"hello" in content


def test_missing_tensorboard_is_told_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"jaxformer\[tensorboard\]"):
        MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
