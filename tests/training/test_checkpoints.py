import os
import shutil
import subprocess
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.training.checkpoint_reading import (
    CheckpointError,
    best_steps,
    choose_step,
    find_steps,
    read_facts,
    restore_model,
)
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.state import TrainState


def make_params(num_layers=2, width=5, dtype=np.float32, scanned=True):
    def layer(index):
        return {"kernel": np.arange(3 * width, dtype=dtype).reshape(3, width) + index, "bias": np.ones(width, dtype)}

    if scanned:
        layers = {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *map(layer, range(num_layers)))}
    else:
        layers = {f"layers_{index}": layer(index) for index in range(num_layers)}
    params = {"decoder": layers, "embedding": np.full((7, 3), 0.5, jnp.bfloat16)}
    return jax.tree.map(jnp.asarray, params)


def make_state(step=0, optimizer=None, **kwargs):
    params = make_params(**kwargs)
    return TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=(optimizer or optax.adam(1e-3)).init(params),
        model_state={"statistics": {"mean": jnp.asarray(np.full(11, step, np.float32))}},
        rng_data=jax.random.key_data(jax.random.key(step)),
    )


def make_iterator():
    return iter(grain.MapDataset.range(10).shuffle(3).repeat().batch(4).to_iter_dataset())


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def save_steps(directory, losses, keep_latest=5, keep_best=0, iterator=None):
    with Checkpoints(directory, keep_latest=keep_latest, keep_best=keep_best) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, make_state(step), iterator or make_iterator(), {"loss": loss})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save_steps(directory, {1: 0.5, 2: 0.25, 3: None})
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_restored_state_and_data_position_equal_those_saved(tmp_path):
    iterator = make_iterator()
    expected = [next(iterator) for _ in range(4)]
    iterator = make_iterator()
    for _ in range(3):
        next(iterator)
    save_steps(tmp_path, {3: 0.25}, iterator=iterator)
    fresh = make_iterator()
    with Checkpoints(tmp_path, keep_latest=1, keep_best=0) as checkpoints:
        state = checkpoints.restore(3, abstract(make_state()), fresh)
    assert_equal(state, make_state(3))
    assert jax.tree.structure(state) == jax.tree.structure(make_state(3))
    assert state.params["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(next(fresh), expected[3])
    assert read_facts(tmp_path, 3) == {"loss": 0.25, "data_position": {"next_index": 3}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 3}, r"params/decoder/layers/kernel is float32\[2, 3, 5\], must be float32\[3, 3, 5\]"),
        ({"width": 6}, r"params/decoder/layers/bias is float32\[2, 5\], must be float32\[2, 6\]"),
        ({"dtype": np.float16}, r"params/decoder/layers/bias is float32\[2, 5\], must be float16\[2, 5\]"),
        ({"scanned": False}, r"missing params/decoder/layers_0/bias.*unexpected params/decoder/layers/bias"),
        ({"optimizer": optax.sgd(0.1, momentum=0.9)}, r"missing opt_state/0/trace/.*unexpected opt_state/0/"),
    ],
    ids=["depth", "width", "dtype", "unrolled", "optimizer"],
)
def test_checkpoint_of_another_model_is_refused_with_the_differences(saved, changed, message):
    with (
        Checkpoints(saved, keep_latest=5, keep_best=0) as checkpoints,
        pytest.raises(CheckpointError, match=message),
    ):
        checkpoints.restore(3, abstract(make_state(**changed)), make_iterator())


def test_parameters_are_restored_without_the_optimizer(copied):
    shutil.rmtree(copied / "2" / "training" / "d")
    state = abstract(make_state())
    params, model_state = restore_model(copied, 2, state.params, state.model_state)
    assert_equal(params, make_params())
    assert_equal(model_state, make_state(2).model_state)
    with pytest.raises(CheckpointError, match="must be float32"):
        restore_model(copied, 2, abstract(make_params(width=6)), state.model_state)


def test_empty_and_partial_steps_are_never_chosen(copied):
    (copied / "4").mkdir()
    shutil.copytree(copied / "3", copied / "5")
    (copied / "5" / "model" / "manifest.ocdbt").unlink()
    shutil.copytree(copied / "3", copied / "6")
    shutil.rmtree(copied / "6" / "training")
    shutil.copytree(copied / "3", copied / "7.orbax-checkpoint-tmp")
    (copied / "8").write_text("")
    assert find_steps(copied) == ([1, 2, 3], ["4", "5", "6", "7.orbax-checkpoint-tmp", "8"])
    assert choose_step(copied) == 3
    with Checkpoints(copied, keep_latest=3, keep_best=0) as checkpoints:
        assert checkpoints.steps == [1, 2, 3]
        assert len(checkpoints.notes) == 5
        assert "4 is no whole checkpoint: not used" in checkpoints.notes[0]
        checkpoints.save(4, make_state(4), make_iterator(), {})
    assert find_steps(copied)[0] == [2, 3, 4]


def test_step_without_its_facts_is_set_aside_for_an_older_one(copied):
    (copied / "3" / "facts" / "metadata").unlink()
    assert find_steps(copied) == ([1, 2], ["3"])
    with Checkpoints(copied, keep_latest=5, keep_best=0) as checkpoints:
        assert checkpoints.steps == [1, 2]
        assert any("3" in note for note in checkpoints.notes)


def test_choosing_a_step(saved, tmp_path):
    assert [choose_step(saved, wanted) for wanted in ("latest", "best", "1")] == [3, 2, 1]
    with pytest.raises(CheckpointError, match="latest, best or one of 1, 2, 3, got '4'"):
        choose_step(saved, "4")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        choose_step(tmp_path)


def test_best_steps_prefer_low_loss_and_then_the_later_step():
    assert best_steps({1: 0.5, 2: 0.25, 3: None, 4: 0.25, 5: 0.75}, 3) == [4, 2, 1]
    assert best_steps({1: float("nan"), 2: 0.25, 3: float("inf")}, 2) == [2]


def test_latest_and_best_are_both_kept(tmp_path):
    save_steps(tmp_path, {1: 0.5, 2: 0.125, 3: 0.25, 4: None, 5: 0.75, 6: None, 7: 0.5}, keep_latest=2, keep_best=2)
    assert find_steps(tmp_path)[0] == [2, 3, 6, 7]
    save_steps(tmp_path, {8: 0.2, 9: None}, keep_latest=2, keep_best=2)
    assert find_steps(tmp_path)[0] == [2, 8, 9]
    with Checkpoints(tmp_path, keep_latest=2, keep_best=2) as checkpoints:
        assert checkpoints.is_best(0.15)
        assert not checkpoints.is_best(0.3)
        assert not checkpoints.is_best(float("nan"))


@pytest.mark.parametrize(("latest", "best"), [(0, 1), (1, -1)])
def test_numbers_to_keep_are_checked(tmp_path, latest, best):
    with pytest.raises(ValueError, match="must be at least 1 and 0"):
        Checkpoints(tmp_path, keep_latest=latest, keep_best=best)


def test_damaged_arrays_are_told_in_a_sentence(copied):
    for path in (copied / "3" / "model").rglob("d/*"):
        path.write_bytes(b"damaged")
    with (
        Checkpoints(copied, keep_latest=5, keep_best=0) as checkpoints,
        pytest.raises(CheckpointError, match=r"checkpoint .*3 cannot be restored"),
    ):
        checkpoints.restore(3, abstract(make_state()), make_iterator())


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep_latest=1, keep_best=0)


def run_script(body, *arguments, wait=True):
    """Runs a script that has this file's helpers, in a process of its own."""
    script = f"import sys, pathlib\nsys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_checkpoints import *\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script + body, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    return process if not wait else (*process.communicate(timeout=120), process.returncode)


def test_failed_save_in_the_background_is_told_and_leaves_the_last_good_one(tmp_path):
    save_steps(tmp_path, {1: 0.5}, keep_latest=1)
    body = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Checkpoints(pathlib.Path(sys.argv[1]), keep_latest=1, keep_best=0) as checkpoints:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    checkpoints.save(2, make_state(2, width=3001), make_iterator(), {"loss": 0.25})
"""
    _, stderr, status = run_script(body, tmp_path)
    assert status == 1
    assert "CheckpointError: the checkpoint of step 2 could not be written to" in stderr
    assert find_steps(tmp_path)[0] == [1]
    save_steps(tmp_path, {2: 0.25}, keep_latest=1)
    assert find_steps(tmp_path)[0] == [2]


def test_save_killed_in_the_middle_is_not_chosen_and_can_be_repeated(tmp_path):
    save_steps(tmp_path, {1: 0.5, 2: 0.25}, keep_latest=3)
    body = """
with Checkpoints(pathlib.Path(sys.argv[1]), keep_latest=3, keep_best=0) as checkpoints:
    checkpoints.save(3, make_state(3, width=200_003), make_iterator(), {"loss": 0.25})
"""
    process = run_script(body, tmp_path, wait=False)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("3*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    steps = find_steps(tmp_path)[0]
    assert steps[:2] == [1, 2]
    with Checkpoints(tmp_path, keep_latest=3, keep_best=0) as checkpoints:
        if 3 not in steps:
            assert "left by an interrupted save" in checkpoints.notes[0]
            assert_equal(checkpoints.restore(2, abstract(make_state()), make_iterator()), make_state(2))
            checkpoints.save(3, make_state(3), make_iterator(), {"loss": 0.25})
    assert find_steps(tmp_path) == ([1, 2, 3], [])


def test_relative_path_is_as_good_as_an_absolute_one(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    state = abstract(make_state())
    directory = saved.relative_to(saved.parent)
    assert_equal(restore_model(directory, 2, state.params, state.model_state)[0], make_params())
