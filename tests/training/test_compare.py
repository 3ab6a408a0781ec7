"""Comparisons of attentions: their configs, cells in processes of their own, tables, and the command."""

import csv
import io
import json
import math
import statistics

import pytest

from jaxformer.cli import main
from jaxformer.training import compare as compare_module
from jaxformer.training.compare import Row, cell_config, compare, in_a_process, split_attentions, split_lengths
from jaxformer.training.compare_cell import Measured, measure, reason_of
from jaxformer.training.compare_table import compare_csv, compare_figure, compare_table
from jaxformer.training.metrics import read_metrics
from jaxformer.training.overrides import ConfigError

MEASURED = Measured(
    parameters=1234,
    seconds=0.25,
    tokens_per_second=512.0,
    compile_seconds=3.0,
    temporary_bytes=5_000_000,
    state_bytes=1_000_000,
    loss=2.5,
    steps=4,
)
ROWS = [
    Row("dense", 32, 4, MEASURED, None),
    Row("dense", 64, 2, None, "it took longer than 9 seconds"),
    Row("local:window=3", 32, 4, MEASURED, None),
]
CHILDREN = """
import os, time
def answer(connection, number):
    connection.send((2 * number, None))
def die(connection, number):
    os.kill(os.getpid(), number)
def leave(connection, status):
    os._exit(status)
def sleep(connection, seconds):
    time.sleep(seconds)
"""


def test_a_cell_has_the_files_arguments_and_the_batchs_tokens():
    config = cell_config("language_model:size=tiny", "local", 64, ["train.batch_size=6"], 7, None).config
    assert config.model.attention == "local"
    assert config.model.attention_args.window == 63
    # Six rows of 128 tokens.
    assert (config.data.length, config.train.batch_size, config.train.steps) == (64, 12, 7)
    assert config.model.num_layers == 2


def test_a_cell_may_have_arguments_and_rows_of_its_own():
    config = cell_config("language_model", "local:window=5", 4096, [], 7, 3).config
    assert config.model.attention_args.to_dict() == {"window": 5}
    assert config.train.batch_size == 3
    assert cell_config("language_model", "dense", 2**20, [], 7, None).config.train.batch_size == 1


def test_a_config_that_knows_no_attentions_takes_the_models_field(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxformer.training.config import load_config\n"
        "def get_config():\n    return load_config('language_model').config.copy_and_resolve_references()\n"
    )
    config = cell_config(str(file), "lsh:num_hashes=3", 64, [], 2, None).config
    assert (config.model.attention, config.model.attention_args.num_hashes) == ("lsh", 3)


def test_lists_of_flags():
    assert split_attentions(["dense,local", "lsh:a=1,b=2"]) == ["dense", "local", "lsh:a=1,b=2"]
    assert split_lengths("64,1024") == [64, 1024]
    with pytest.raises(ConfigError, match="length must be whole numbers"):
        split_lengths("64,x")


def test_a_process_that_ends_badly_says_how(tmp_path, monkeypatch):
    (tmp_path / "children_of_compare.py").write_text(CHILDREN)
    monkeypatch.syspath_prepend(tmp_path)
    import children_of_compare as children

    assert in_a_process(children.answer, 21, timeout=None) == (42, None)
    killed = (None, "its process was killed by SIGKILL, most likely for want of memory")
    assert in_a_process(children.die, 9, timeout=None) == killed
    assert in_a_process(children.leave, 3, timeout=None) == (None, "its process ended with status 3")
    assert in_a_process(children.sleep, 600, timeout=0.1) == (None, "it took longer than 0.1 seconds")


def test_reasons_are_a_line():
    assert reason_of(ValueError("first\nsecond")) == "first"
    assert reason_of(MemoryError()) == "memory does not suffice: MemoryError"
    assert reason_of(RuntimeError("RESOURCE_EXHAUSTED: 9 GB")).startswith("memory does not suffice: ")


def test_what_is_measured_is_the_loss_of_training(trained, text, tiny_config):
    workdir, figures = trained
    losses = [record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if record["split"] == "train"]
    measured = measure(tiny_config(text, f"train.steps={figures['step']}"))
    assert measured.steps == len(losses)
    assert measured.loss == pytest.approx(statistics.fmean(losses[-(len(losses) // 4) :]), rel=1e-5)
    assert measured.state_bytes > 3 * 4 * measured.parameters
    assert measured.temporary_bytes > 0
    assert measured.tokens_per_second == pytest.approx(4 * 23 / measured.seconds)


def test_what_cannot_be_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(compare_module, "in_a_process", lambda *_, timeout: (MEASURED, None))
    rows = list(compare("language_model:size=tiny", ["dense", "local:window"], [32, 64]))
    assert [(row.attention, row.length, row.measured) for row in rows[:2]] == [
        ("dense", 32, MEASURED),
        ("dense", 64, MEASURED),
    ]
    assert all(row.measured is None and "attention must be name" in row.refusal for row in rows[2:])


def test_tables_have_every_row():
    lines = compare_table(ROWS).splitlines()
    assert len(lines) == 5
    assert lines[1].split() == ["dense", "32", "4", "1.23", "k", "250", "ms", "512", "6.00", "MB", "2.5000"]
    assert lines[-1] == "dense at 64: it took longer than 9 seconds"
    read = list(csv.DictReader(io.StringIO(compare_csv(ROWS))))
    assert [row["loss"] for row in read] == ["2.5", "", "2.5"]
    assert read[1]["refusal"] == "it took longer than 9 seconds"


def test_the_picture_has_a_gap_where_nothing_was_measured():
    pytest.importorskip("matplotlib", reason="plots need matplotlib (extra plots)")
    panels = compare_figure([*ROWS, Row("lsh", 32, None, None, "it can't")]).axes
    assert len(panels) == 3
    assert {line.get_label() for line in panels[0].get_lines()} == {"dense", "local:window=3"}
    dense = next(line for line in panels[0].get_lines() if line.get_label() == "dense")
    assert dense.get_ydata()[0] == 250.0
    assert math.isnan(dense.get_ydata()[1])
    with pytest.raises(ValueError, match="nothing was measured"):
        compare_figure(ROWS[1:2])


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_module, "in_a_process", lambda *_, timeout: (MEASURED, None))
    flags = ["compare", "--config=language_model:size=tiny", "--attention=dense,linformer", "--length=32"]
    assert main([*flags, f"--output={tmp_path / 'cells.csv'}", "--steps=4"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.splitlines()[0].split()[:3] == ["attention", "length", "rows"]
    assert "linformer" in stderr
    assert len((tmp_path / "cells.csv").read_text().splitlines()) == 3
    assert main([*flags, "--json"]) == 0
    assert [json.loads(line)["attention"] for line in capsys.readouterr().out.splitlines()] == ["dense", "linformer"]


@pytest.mark.slow
def test_cells_are_measured_in_processes_of_their_own(tiny_flags, capsys):
    flags = ["--attention=dense,linformer", "--length=23", "--steps=2", "--json"]
    assert main(["compare", *tiny_flags, *flags]) == 0
    dense, linformer = map(json.loads, capsys.readouterr().out.splitlines())
    assert dense["steps"] == 2
    assert dense["loss"] > 0
    assert "can't be causal" in linformer["refusal"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length=0"], "length is 0, must be at least 1"),
        (["--length=8", "--steps=0"], "steps is 0, must be at least 1"),
        (["--length=8", "--timeout=nan"], "timeout is nan, must be at least 1"),
        (["--length=8", "--timeout=1e300"], "timeout is 1e+300, must be at most 2000000 seconds"),
        (["--length=8", f"--output={'n' * 256}"], "cannot be written: File name too long"),
        (["--length=8", "--config.model.num_head=2"], "num_head"),
        (["--length=8", "--plot=a.gif"], "its name must end in .png, .svg, .pdf"),
    ],
)
def test_wrong_flags_end_with_a_sentence(capsys, flags, message):
    assert main(["compare", "--config=language_model", "--attention=dense", *flags]) in (1, 2)
    assert message in capsys.readouterr().err
