import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxformer.training.run_directory import RunDirectory, RunDirectoryError
from jaxformer.training.startup import earlier_run

HOLD = """
import pathlib, sys, time
from jaxformer.training.run_directory import RunDirectory
with RunDirectory(pathlib.Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_at_a_time_and_none_after_kill_9(tmp_path):
    directory = RunDirectory(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(RunDirectoryError, match=f"is being written to by process {process.pid}"), directory.lock():
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with directory.lock():
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    with directory.lock():
        pass


def test_workdir_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryError, match=r"workdir .* cannot be used"):
            RunDirectory(path).create()


def test_workdir_on_a_read_only_file_system_is_refused():
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc, which nobody can write to")
    with pytest.raises(RunDirectoryError, match="cannot be used"):
        RunDirectory(__import__("pathlib").Path("/proc/jaxformer-run")).create()


def test_folder_with_other_things_is_no_run_directory(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunDirectoryError, match=r"is not a run directory but holds letter\.txt"):
        RunDirectory(tmp_path).create()


def test_new_folder_is_made_with_its_parents(tmp_path):
    RunDirectory(tmp_path / "a" / "b").create()
    RunDirectory(tmp_path / "a" / "b").create()
    assert not RunDirectory(tmp_path / "a" / "b").exists


def test_start_is_recorded_with_versions_devices_threads_and_data(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.record_start({"data_hash": "abc"})
    directory.record_start({"data_hash": "def"})
    record = json.loads(directory.run.read_text())
    assert record["data_hash"] == "def"
    assert {"jaxformer", "python", "jax", "flax", "numpy"} <= set(record["versions"])
    assert record["devices"]
    assert record["threads"] == sorted(os.sched_getaffinity(0))
    assert [earlier["data_hash"] for earlier in record["earlier"]] == ["abc"]
    assert "earlier" not in record["earlier"][0]


def test_missing_tokenizer_file_of_a_run_is_told(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.tokenizer("bytes") == "bytes"
    with pytest.raises(RunDirectoryError, match=r"the run's tokenizer file .*tokenizer\.json is missing"):
        directory.tokenizer("words.json")
    directory.tokenizer_file.write_text("{}")
    assert directory.tokenizer("words.json") == str(tmp_path / "tokenizer.json")


def test_checkpoints_without_their_config_are_not_gone_on_with(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "run")
    assert earlier_run(RunDirectory(workdir))[0].config.train.steps == 12
    (workdir / "config.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"holds checkpoints \(step 12\) but no config\.json"):
        earlier_run(RunDirectory(workdir))
