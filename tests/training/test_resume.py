"""Interrupted runs end with the same bits as uninterrupted ones."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxformer.training import loop
from jaxformer.training.checkpoint_reading import find_steps
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.metrics import read_metrics
from jaxformer.training.sharding import make_mesh

# Dropout, accumulation and a schedule: whatever could differ after a resume; epochs end inside the run.
EXACT = ("model.dropout_rate=0.1", "train.accumulation_steps=2", "train.steps=12", "schedule.decay_steps=12")


def final_params(workdir):
    """The saved parameters by name."""
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    _, params, _, step = load_model(workdir, read_run(workdir), mesh)
    assert step == find_steps(workdir / "checkpoints")[0][-1]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def figures_of(workdir):
    """Every record but its speed."""
    records = read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name != "tokens_per_second"} for record in records]


def assert_same_run(left, right):
    assert figures_of(left) == figures_of(right)
    expected = final_params(left)
    found = final_params(right)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


@pytest.fixture(scope="module")
def straight(text, tiny_config, tmp_path_factory):
    """The uninterrupted run, and the tokens of each of its steps."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        batches = record_batches(patch)
        train_and_evaluate(tiny_config(text, *EXACT), workdir)
    return workdir, batches[:12]


def record_batches(monkeypatch):
    place, batches = loop.shard_batch, []

    def shard_batch(batch, mesh):
        batches.append(np.array(batch["tokens"]))
        return place(batch, mesh)

    monkeypatch.setattr(loop, "shard_batch", shard_batch)
    return batches


@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.slow), 5, pytest.param(10, marks=pytest.mark.slow)])
def test_stopped_and_continued_run_is_bit_equal(text, tiny_config, straight, tmp_path, monkeypatch, stop):
    """Stopped in the middle of an epoch and near its end, each step made of two parts."""
    expected, tokens = straight
    batches = record_batches(monkeypatch)
    train_and_evaluate(tiny_config(text, *EXACT, f"train.steps={stop}"), tmp_path)
    del batches[stop:]
    train_and_evaluate(tiny_config(text, *EXACT), tmp_path)
    for step in range(12):
        np.testing.assert_array_equal(batches[step], tokens[step], err_msg=f"step {step + 1}")
    lines = [record for record in figures_of(tmp_path) if (record["split"], record["step"]) != ("validation", stop)]
    assert lines == figures_of(expected)
    np.testing.assert_equal(final_params(tmp_path), final_params(expected))


def test_epochs_differ_and_hold_every_row_once(straight, text, tiny_config):
    from jaxformer.training.assembly import load_data

    _, tokens = straight
    rows = load_data(tiny_config(text).config).train_rows
    everything = sorted(tuple(rows[index]["tokens"]) for index in range(len(rows)))
    seen = [tuple(row) for batch in tokens for row in batch]
    assert len(seen) >= 2 * len(everything)
    first, second = seen[: len(everything)], seen[len(everything) : 2 * len(everything)]
    assert sorted(first) == everything
    assert sorted(second) == everything
    assert first != second


def command(workdir, flags, *more):
    return [sys.executable, "-m", "jaxformer", "train", f"--workdir={workdir}", *flags, *more]


def train_flags(tiny_flags):
    return [*tiny_flags, *(f"--config.{override}" for override in EXACT)]


def test_fresh_process_continues_what_sigterm_interrupted(tiny_flags, straight, tmp_path):
    """SIGTERM in the middle, then the command that the run itself names; exit status 75, then 0."""
    expected, _ = straight
    process = subprocess.Popen(
        command(tmp_path, train_flags(tiny_flags)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and figures_of(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    last = json.loads(stdout.splitlines()[-1])
    assert process.returncode == 75, stderr
    assert last["status"] == "interrupted"
    assert 1 <= last["step"] < 12
    assert f"go on with: jaxformer train --workdir={tmp_path}" in stderr
    result = subprocess.run(command(tmp_path, []), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert f"restored step {last['step']}" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["step"] == 12
    assert_same_run(expected, tmp_path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_together(workdir, flags, port):
    """Two processes of one run: (stdout, stderr, exit status) of each."""
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            command(workdir, flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]
    return [(*process.communicate(timeout=240), process.returncode) for process in processes]


@pytest.mark.slow
def test_two_processes_write_one_run_that_one_process_continues(tiny_flags, straight, tmp_path):
    expected, _ = straight
    flags = [*train_flags(tiny_flags), "--config.train.steps=7", "--config.eval.batch_size=2"]
    (first, first_stderr, status), (second, _, second_status) = train_together(tmp_path, flags, free_port())
    assert (status, second_status) == (0, 0), first_stderr
    assert json.loads(first)["step"] == 7
    assert second == ""
    result = subprocess.run(
        command(tmp_path, [], "--config.train.steps=12"), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    found = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["split"] == "train"]
    alone = [record["loss"] for record in read_metrics(expected / "metrics.jsonl") if record["split"] == "train"]
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def wait_for(condition, process, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_and_continue(workdir, flags, moments):
    """Starts a run again and again, killed with -9 after each of some moments (seconds); then lets it finish.

    Usable by hand: `kill_and_continue(Path("runs/a"), ["--config=language_model:size=tiny"], [5, 7, 8])`.

    Returns:
      What was there at each kill: (seconds, steps saved whole, names of unfinished saves).
    """
    seen = []
    for seconds in moments:
        process = subprocess.Popen(command(workdir, flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if seconds is None:  # inside the next save
            before = find_steps(workdir / "checkpoints")[0]
            while process.poll() is None and not unfinished(workdir, before):
                time.sleep(0.0005)
        else:
            time.sleep(seconds)
        assert process.poll() is None, "the run ended before it could be killed: give it more steps"
        process.kill()
        process.wait()
        seen.append((seconds, *find_steps(workdir / "checkpoints")))
    subprocess.run(command(workdir, flags), check=True, stdout=subprocess.DEVNULL)
    return seen


def unfinished(workdir, before):
    """Whether a save is under way that was not there before."""
    steps, broken = find_steps(workdir / "checkpoints")
    return any(int(name.partition(".")[0]) > max(before, default=0) for name in broken if "tmp" in name) or (
        len(steps) > len(before) + 1
    )


@pytest.mark.slow
def test_run_killed_inside_a_save_goes_on_bit_equal(tiny_flags, straight, tmp_path):
    expected, _ = straight
    flags = [*train_flags(tiny_flags), "--config.checkpoint.every_steps=2"]
    kill_and_continue(tmp_path, flags, [None])
    assert_same_run(expected, tmp_path)


@pytest.mark.slow
def test_run_killed_at_twenty_moments_goes_on_bit_equal(text, tiny_config, tiny_flags, tmp_path):
    """Start-up, compilation, steps and saves; at least five inside a save."""
    longer = ("train.steps=400", "schedule.decay_steps=400")
    train_and_evaluate(tiny_config(text, *EXACT, *longer), tmp_path / "straight")
    flags = [*train_flags(tiny_flags), *(f"--config.{override}" for override in longer)]
    flags += ["--config.checkpoint.every_steps=1", "--config.checkpoint.keep_latest=3"]
    draw = random.Random(0)
    moments = [draw.uniform(0.2, 9.0) for _ in range(13)] + [None] * 7
    draw.shuffle(moments)
    seen = kill_and_continue(tmp_path / "killed", flags, moments)
    inside = [broken for seconds, _, broken in seen if seconds is None and broken]
    print(f"kills: {[(seconds, steps[-1:], broken) for seconds, steps, broken in seen]}")
    assert len(inside) >= 5
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
