"""Runs trained together are those that are trained alone: the oracle is the single run."""

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxformer.cli import main
from jaxformer.training import sweep as sweep_module
from jaxformer.training.assembly import load_data, make_parts
from jaxformer.training.checkpoint_reading import find_steps, read_facts, stored_signature
from jaxformer.training.config import ConfigError, RunConfig, resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.metrics import read_metrics
from jaxformer.training.run_directory import RunDirectoryError
from jaxformer.training.sharding import make_mesh, shard_batch
from jaxformer.training.signals import TrainingInterrupted
from jaxformer.training.startup import training_batches
from jaxformer.training.state import init_state
from jaxformer.training.sweep import at_same_place, run_sweep
from jaxformer.training.sweep_log import SweepLog
from jaxformer.training.sweep_members import Member
from jaxformer.training.sweep_parts import make_together
from jaxformer.training.sweep_spec import plan_runs

SWEEP = "optimizer.learning_rate=1e-3,4e-3; seed=0..1"
WITH_INFINITE = "optimizer.learning_rate=1e-3,4e-3,1e30; seed=0..1"
STEPS = ("model.num_layers=1", "model.dropout_rate=0.1", "train.steps=6", "eval.every_steps=3", "train.non_finite=stop")
SAVED = ("checkpoint.every_steps=2", "checkpoint.keep_latest=2")
LAST = "learning_rate=4e-3,seed=1"


def records(folder):
    return list(read_metrics(folder / "metrics.jsonl"))


def without_speed(folder):
    return [
        {name: value for name, value in record.items() if name != "tokens_per_second"} for record in records(folder)
    ]


def assert_equal_figures(left, right):
    """The same records with the same figures, but for the speed and what a sum of floats leaves open."""
    assert [(record["step"], record["split"]) for record in left] == [
        (record["step"], record["split"]) for record in right
    ]
    for ours, theirs in zip(left, right):
        assert list(ours) == list(theirs)
        for name in set(theirs) - {"split", "tokens_per_second"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (name, theirs["step"])


@pytest.fixture(scope="module")
def base(text, tiny_config):
    return tiny_config(text, *STEPS, *SAVED)


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory):
    """A finished sweep of six runs, the last two of which meet infinity: (its folder, its rows)."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    return folder, run_sweep(base, WITH_INFINITE, folder)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The last of its runs, trained alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_and_evaluate(base.with_overrides(["optimizer.learning_rate=4e-3", "seed=1"]), folder)
    return folder


@pytest.mark.slow
def test_run_of_a_sweep_is_the_run_alone(swept, alone):
    """Dropout, order of the data and rates are the same; what a sum of floats leaves open is small."""
    run = swept[0] / "runs" / LAST
    assert_equal_figures(records(run), records(alone))


@pytest.mark.slow
def test_directory_of_a_run_is_that_of_a_run_alone(swept, alone):
    run = swept[0] / "runs" / LAST
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in alone.iterdir())
    assert json.loads((run / "config.json").read_text()) == json.loads((alone / "config.json").read_text())
    assert set(json.loads((run / "run.json").read_text())) == set(json.loads((alone / "run.json").read_text()))
    steps, broken = find_steps(run / "checkpoints")
    assert (steps, broken) == find_steps(alone / "checkpoints")
    for step in steps:
        for item in ("model", "training"):
            assert stored_signature(run / "checkpoints", step, item) == stored_signature(
                alone / "checkpoints", step, item
            )
        ours, theirs = read_facts(run / "checkpoints", step), read_facts(alone / "checkpoints", step)
        losses = [facts.pop("loss") or 0.0 for facts in (ours, theirs)]  # only evaluated steps have one
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert ours == theirs


@pytest.mark.slow
def test_run_of_a_sweep_goes_on_alone(swept, alone, base, tmp_path):
    """Both runs go on for a step, by the program of a single run."""
    given = base.with_overrides(["optimizer.learning_rate=4e-3", "seed=1", "train.steps=7"])
    figures = []
    for name, run in (("ours", swept[0] / "runs" / LAST), ("theirs", alone)):
        shutil.copytree(run, tmp_path / name)
        figures.append(train_and_evaluate(given, tmp_path / name))
    assert figures[0]["step"] == 7
    assert figures[0]["train_loss"] == pytest.approx(figures[1]["train_loss"], rel=1e-5)
    assert figures[0]["validation_loss"] == pytest.approx(figures[1]["validation_loss"], rel=1e-5)


def test_table_has_a_row_for_each_run(swept):
    folder, rows = swept
    with (folder / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["run"] for row in table] == [row["run"] for row in rows]
    assert len(table) == 6
    for row in table[:4]:
        run = records(folder / "runs" / row["run"])
        train = [record["loss"] for record in run if record["split"] == "train"]
        validation = {record["step"]: record["loss"] for record in run if record["split"] == "validation"}
        assert float(row["train_loss"]) == train[-1]
        assert float(row["validation_loss"]) == validation[6]
        assert float(row["best_validation_loss"]) == validation[int(row["best_step"])] == min(validation.values())
        assert (row["status"], row["step"], row["together"], row["skipped"]) == ("completed", "6", "6", "0")
        config = json.loads((folder / "runs" / row["run"] / "config.json").read_text())["config"]
        assert float(row["optimizer.learning_rate"]) == config["optimizer"]["learning_rate"]
        assert int(row["seed"]) == config["seed"]
    assert len({row["train_loss"] for row in table[:4]}) == 4


def test_finished_sweep_is_not_repeated_and_prints_its_rows(swept, capsys, monkeypatch):
    folder, rows = swept

    def refuse(*arguments):
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(sweep_module, "train_together", refuse)
    assert main(["sweep", f"--workdir={folder}"]) == 0
    stdout, stderr = capsys.readouterr()
    assert [json.loads(line) for line in stdout.splitlines()] == rows
    assert "finished before: 6 of 6 runs" in stderr


@pytest.mark.slow
def test_interrupted_sweep_goes_on_to_the_same_end(swept, base, tmp_path, monkeypatch, capsys):
    folder, _ = swept
    add = SweepLog.add

    def add_and_interrupt(log, step, figures):
        add(log, step, figures)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(SweepLog, "add", add_and_interrupt)
        with pytest.raises(TrainingInterrupted) as caught:
            run_sweep(base, SWEEP, tmp_path)
    assert caught.value.step == 2
    assert f"go on with: jaxformer sweep --workdir={tmp_path}" in capsys.readouterr().err
    with (tmp_path / "sweep.csv").open() as file:
        assert {(row["status"], row["step"]) for row in csv.DictReader(file)} == {("unfinished", "2")}
    rows = run_sweep(base, SWEEP, tmp_path)
    assert {row["status"] for row in rows} == {"completed"}
    for row in rows:
        assert_equal_figures(records(tmp_path / "runs" / row["run"]), records(folder / "runs" / row["run"]))


def test_finished_run_that_the_record_does_not_know_is_completed(swept, tmp_path, monkeypatch):
    """As where the process was killed after the last checkpoint, before the record was written."""
    monkeypatch.setattr(sweep_module, "draw_sweep", lambda *arguments: "")
    shutil.copytree(swept[0], tmp_path / "sweep")
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    del record["runs"][LAST]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(record))
    assert main(["sweep", f"--workdir={tmp_path / 'sweep'}"]) == 0
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        statuses = {row["run"]: (row["status"], row["seconds"]) for row in csv.DictReader(file)}
    assert statuses[LAST] == ("completed", "")


def test_run_that_is_not_finite_stops_and_the_others_go_on(swept):
    folder, rows = swept
    assert [row["status"] for row in rows] == ["completed"] * 4 + ["stopped"] * 2
    for row in rows[4:]:
        assert row["step"] < 6
        assert find_steps(folder / "runs" / row["run"] / "checkpoints")[0] == [2]
        assert [record["step"] for record in records(folder / "runs" / row["run"])] == list(range(1, row["step"] + 1))


@pytest.fixture(scope="module")
def first_steps(base):
    """States and figures after one step: of all runs together, and of the last alone."""
    data = load_data(base.config)
    configs = [resolve(run.given.config, decided_values(run.given.config, data)) for run in plan_runs(base, SWEEP)]
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    batches = [next(training_batches(config, data, mesh)) for config in configs[:2]]  # of seeds 0 and 1
    rates = {"optimizer.learning_rate": [config.optimizer.learning_rate for config in configs]}
    seeds = [config.seed for config in configs]
    together = make_together(configs[0], make_parts(configs[0], mesh), seeds, rates, mesh)
    states, figures = together.train_step(together.init(), together.place_train(batches))
    own = make_parts(configs[-1], mesh)
    state = init_state(own.model, own.optimizer, seeds[-1], batches[-1], own.shardings)
    return states, figures, own.train_step(state, shard_batch(batches[-1], mesh))


def test_first_loss_and_gradients_are_those_of_the_run_alone(first_steps):
    """The first moment after one step is (1 - b1) times the clipped gradient, and the rate of this step is zero."""
    states, figures, (state, own) = first_steps
    for name, value in own.items():
        assert float(figures[name][-1]) == pytest.approx(float(value), rel=1e-6), name
    ours, theirs = (optax.tree_utils.tree_get(tree.opt_state, "mu") for tree in (states, state))
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(theirs))
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(left[-1], right, rtol=1e-6, atol=1e-6 * largest)
    for left, right in zip(jax.tree.leaves(states.params), jax.tree.leaves(state.params)):
        np.testing.assert_array_equal(left[-1], right)
    assert len({float(loss) for loss in figures["loss"]}) == 2  # seeds; the rate has not acted yet


def test_states_are_laid_out_as_those_of_single_runs(first_steps):
    states, _, (state, _) = first_steps
    shapes = jax.tree.map(lambda leaf: ((4, *leaf.shape), leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), states) == shapes


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["0..7", "0..2"])  # runs that eight devices share, and rows of runs
def test_eight_devices_train_as_one_does(tiny_flags, tmp_path, seeds):
    flags = [*tiny_flags, "--config.train.batch_size=8", "--config.eval.batch_size=8", "--config.train.steps=4"]
    for count in (1, 8):
        environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        command = [sys.executable, "-m", "jaxformer", "sweep", *flags, f"--sweep=seed={seeds}"]
        subprocess.run([*command, f"--workdir={tmp_path / str(count)}"], env=environment, check=True, timeout=300)
    runs = sorted((tmp_path / "1" / "runs").iterdir())
    assert len(runs) == {"0..7": 8, "0..2": 3}[seeds]
    for run in runs:
        assert_equal_figures(records(tmp_path / "8" / "runs" / run.name), records(run))


@pytest.mark.slow
def test_curves_are_those_of_single_runs_over_50_steps(text, tiny_config, tmp_path):
    config = tiny_config(text, "train.steps=50", "eval.every_steps=25", "schedule.warmup_steps=5")
    text = "optimizer.learning_rate=1e-3,3e-3; optimizer.b2=0.95,0.999; seed=0..1"
    run_sweep(config, text, tmp_path / "together")
    run_sweep(config, text, tmp_path / "separate", separate=True)
    for run in sorted((tmp_path / "separate" / "runs").iterdir()):
        ours, theirs = records(tmp_path / "together" / "runs" / run.name), records(run)
        assert len(ours) == len(theirs) == 52
        np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-3)


@pytest.mark.slow
def test_separate_runs_are_single_runs(swept, alone, base, tmp_path):
    rows = run_sweep(base, "optimizer.learning_rate=4e-3; seed=1", tmp_path, separate=True)
    assert without_speed(tmp_path / "runs" / LAST) == without_speed(alone)
    assert (rows[0]["status"], rows[0]["together"]) == ("completed", 1)


def test_runs_go_on_together_from_equal_steps_and_with_batches_of_equal_shape():
    """Rows in groups of several lengths come in an order that the seed decides, so other seeds have other shapes."""

    class OneShape:
        pass

    class InGroups:
        groups = ()

        def __len__(self):
            return 0

        def batch(self, indices, group):
            raise AssertionError("not read")

    class Standing(Member):
        step = 0

    members = [object.__new__(Standing) for _ in range(6)]
    for member, place in zip(members, itertools.product((0, 4), (0, 0, 1))):
        member.step, member.config = place[0], ConfigDict({"seed": place[1]})

    def parts(rows):
        data = SimpleNamespace(train_rows=rows)
        return [[(member.step, member.config.seed) for member in part] for part in at_same_place(members, data)]

    assert parts(OneShape()) == [[(0, 0), (0, 0), (0, 1)], [(4, 0), (4, 0), (4, 1)]]
    assert parts(InGroups()) == [[(0, 0), (0, 0)], [(0, 1)], [(4, 0), (4, 0)], [(4, 1)]]


@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg"])
def test_random_numbers_that_differ_under_vmap_are_refused(base, tmp_path, name):
    with jax.default_prng_impl(name), pytest.raises(ConfigError, match=f"jax_default_prng_impl is {name}"):
        run_sweep(base, SWEEP, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "sweep", "message"),
    [
        (["mesh.fsdp=2"], "seed=0..1", "config.mesh.fsdp is 2, must be 1"),
        ([], "optimizer.learning_rate=1e-3; optimizer.b2=0.9,1.5", "b2 is 1.5, must be"),
        ([], "train.steps=0,1", "config.train.steps is 0"),
        ([], "seed=0,4294967296", r"config.seed is 4294967296, must be in \[0, 2\*\*32\)"),
        (["optimizer.b2=0.9"], "optimizer.name=adamw,sgd", "config.optimizer: b2 = 0.9: optimizer 'sgd' has no such"),
        ([], "optimizer.learning_rate=1e-3,-1", "config.schedule: learning_rate is -1.0, must be at least 0"),
        ([], "schedule.name=cosine,polynomial; schedule.power=2", "power is 2.0, must be None for schedule 'cosine'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is_compiled(base, tmp_path, overrides, sweep, message):
    with pytest.raises(ConfigError, match=message):
        run_sweep(base.with_overrides(overrides), sweep, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_folders_of_runs_and_of_sweeps_are_told_apart(alone, base, tmp_path, capsys):
    with pytest.raises(RunDirectoryError, match="holds a run, not a sweep"):
        run_sweep(base, SWEEP, alone)
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    (tmp_path / "swept" / ".lock").write_text("")
    with pytest.raises(RunDirectoryError, match="holds a sweep, not a run"):
        train_and_evaluate(base, tmp_path / "swept")
    assert main(["sweep", f"--workdir={tmp_path}"]) == 2
    assert "holds no sweep to go on with" in capsys.readouterr().err
    assert main(["sweep", "--config=language_model:size=tiny", f"--workdir={tmp_path}"]) == 2
    assert "sweep needs --sweep=" in capsys.readouterr().err


def test_flags_of_no_meaning_are_not_passed_over_when_going_on(swept, capsys):
    for flag, message in (("--max_together=0", "max_together is 0"), ("--sweep=", "sweep is empty")):
        assert main(["sweep", f"--workdir={swept[0]}", flag]) == 2
        assert message in capsys.readouterr().err


def test_other_config_in_the_same_folder_is_refused(swept, base):
    other = RunConfig(base.config).with_overrides(["model.mlp_dim=25"])
    with pytest.raises(ConfigError, match="mlp_dim: 24 before, 25 now"):
        run_sweep(other, SWEEP, swept[0])
