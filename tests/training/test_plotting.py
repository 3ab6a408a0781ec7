"""Pictures of runs: names of runs, files, and the command."""

import json
import sys
from pathlib import Path

import pytest

from jaxformer.cli import main
from jaxformer.training.plotting import tell_apart

pytest.importorskip("matplotlib", reason="plots need matplotlib (extra plots)")


@pytest.fixture
def runs(tmp_path):
    """Two run directories that hold metrics alone."""
    for name, loss in (("a", 2.0), ("b", 3.0)):
        folder = tmp_path / name
        folder.mkdir()
        records = [{"step": step, "split": "train", "loss": loss / step} for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [f"--workdir={tmp_path / name}" for name in "ab"]


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_the_command_writes_a_picture(runs, tmp_path, name, capsys):
    assert main(["plot", *runs, f"--output={tmp_path / name}", "--smoothing=2"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "2 runs in" in stderr
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_without_matplotlib_nothing_is_computed_for_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ["compare", "--config=language_model:size=tiny", "--attention=dense", "--length=32"]
    assert main([*flags, f"--plot={tmp_path / 'cells.png'}"]) != 0
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "plots need matplotlib: pip install 'jaxformer[plots]'" in stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output=curves.gif"], "output is 'curves.gif'; its name must end in .png, .svg, .pdf"),
        (["--output=/nowhere/curves.png"], "there is no folder /nowhere"),
        (["--metrics=los"], "metrics has 'los', which no run has; it must be among loss"),
        (["--workdir=/nowhere"], "workdir /nowhere holds no metrics"),
    ],
)
def test_wrong_flags_end_with_a_sentence(runs, tmp_path, capsys, flags, message):
    output = [] if flags[0].startswith("--output") else [f"--output={tmp_path / 'curves.png'}"]
    assert main(["plot", *runs, *output, *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_runs_have_the_shortest_names_that_tell_them_apart():
    assert tell_apart([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert tell_apart([Path("x/a/run"), Path("y/a/run")]) == ["x/a/run", "y/a/run"]
    with pytest.raises(ValueError, match="each must be given once"):
        tell_apart([Path("a"), Path("a")])
