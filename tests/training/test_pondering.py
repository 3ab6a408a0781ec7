"""Ponder maps: their means are the figures that are logged, and files hold them beside the tokens."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.assembly import example_batch, load_data, make_model, make_objective
from jaxformer.training.buckets import evaluate_buckets
from jaxformer.training.config import load_config, resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.finished import evaluate_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.metrics import read_metrics
from jaxformer.training.pondering import ponder_maps, write_ponder_maps
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sharding import make_mesh
from jaxformer.training.step import make_eval_step

PARITY = (
    "model.num_layers=4",
    "model.embed_dim=12",
    "model.num_heads=3",
    "model.mlp_dim=20",
    "model.halting=act",
    "model.halting_bias_init=-0.5",
    "data.max_length=5",
    "data.test_lengths=2,5",
    "data.test_examples=7",
    "data.validation_examples=6",
    "eval.batch_size=4",
    "eval.decode=False",
    "sample.prompt=1 0 0 0 0 = ",
)


@pytest.fixture(scope="module")
def parts():
    """A model with random parameters on parity, and all that evaluates it."""
    config = load_config("algorithmic:task=parity,model=universal,size=tiny", PARITY).config
    data = load_data(config)
    config = resolve(config, decided_values(config, data))
    model = make_model(config)
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(value) for name, value in example_batch(config.data.length, model).items()}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), **batch))["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)
    params["decoder"]["halting"]["bias"] = jnp.asarray(2.0)
    return SimpleNamespace(config=config, data=data, model=model, params=params, mesh=make_mesh(data=1))


def _maps(parts, name):
    return ponder_maps(parts.model, parts.params, {}, parts.data.buckets[name], parts.config, parts.mesh)


def test_maps_have_the_steps_of_each_row_by_itself(parts):
    rows = parts.data.buckets["length_5"].batch(np.arange(7))
    maps = _maps(parts, "length_5")
    alone = jax.jit(lambda tokens: parts.model.apply({"params": parts.params}, tokens).aux.maps)
    np.testing.assert_array_equal(maps["tokens"], rows["tokens"])
    np.testing.assert_array_equal(maps["targets"], rows["targets"])
    for row in (0, 3, 4, 6):
        expected, exists = alone(rows["tokens"][row : row + 1]), rows["key_mask"][row]
        for name in ("ponder_steps", "ponder_remainder"):
            np.testing.assert_allclose(maps[name][row, exists], expected[name][0, exists], atol=1e-5)
            assert not maps[name][row, ~exists].any()
    assert len(np.unique(maps["ponder_steps"][maps["ponder_steps"] > 0])) > 1


def test_means_of_maps_are_the_figures_of_each_length(parts):
    eval_step = jax.jit(make_eval_step(parts.model, make_objective(parts.config)))
    figures = evaluate_buckets(eval_step, parts.model, parts.params, {}, parts.config, parts.data, parts.mesh)
    for name in ("length_2", "length_5"):
        steps = _maps(parts, name)["ponder_steps"]
        assert figures[name]["ponder_steps"] == pytest.approx(steps[steps > 0].mean(), rel=1e-6)
        # The answer of parity is read at the sign of equality, behind five entries.
        assert figures[name]["answer_ponder_steps"] == pytest.approx(steps[:, 5].mean())


def test_files_hold_the_maps_of_all_tests_or_else_of_some_validation_rows(parts, tmp_path):
    given = (parts.model, parts.params, {}, parts.config)
    folder = write_ponder_maps(RunDirectory(tmp_path), 30, *given, parts.data, parts.mesh)
    assert folder == tmp_path / "ponder" / "step_00000030"
    assert {file.name for file in folder.iterdir()} == {"length_2.npz", "length_5.npz"}
    with np.load(folder / "length_2.npz") as found:
        expected = _maps(parts, "length_2")
        assert set(found) == {"tokens", "targets", "ponder_steps", "ponder_remainder"} == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
    untested = dataclasses.replace(parts.data, buckets={})
    folder = write_ponder_maps(RunDirectory(tmp_path), 31, *given, untested, parts.mesh)
    with np.load(folder / "validation.npz") as found:
        rows = untested.validation_rows.batch(np.arange(4))
        np.testing.assert_array_equal(found["tokens"], rows["tokens"])


def test_a_model_of_fixed_steps_has_no_maps(parts, tmp_path):
    plain = parts.model.clone(config=dataclasses.replace(parts.model.config, halting="none"))
    given = (plain, parts.params, {}, parts.config, parts.data, parts.mesh)
    assert write_ponder_maps(RunDirectory(tmp_path), 30, *given) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_and_its_evaluation_write_the_maps_whose_means_they_log(tmp_path):
    config = load_config("algorithmic:task=parity,model=universal,size=tiny", [*PARITY, "train.steps=3"])
    train_and_evaluate(config, tmp_path)
    folder = tmp_path / "ponder" / "step_00000003"
    logged = {record["split"]: record for record in read_metrics(tmp_path / "metrics.jsonl")}
    for name in ("length_2", "length_5"):
        with np.load(folder / f"{name}.npz") as maps:
            steps, targets = maps["ponder_steps"], maps["targets"]
        assert logged[name]["ponder_steps"] == pytest.approx(steps[steps > 0].mean(), rel=1e-6)
        assert logged[name]["answer_ponder_steps"] == pytest.approx(steps[targets >= 0].mean())
        (folder / f"{name}.npz").unlink()
    figures = evaluate_run(tmp_path, ["data.test_lengths=5,4"])
    assert figures["ponder_maps"] == str(folder)
    assert {file.name for file in folder.iterdir()} == {"length_4.npz", "length_5.npz"}
    (tmp_path / "ponder").rename(tmp_path / "other")
    (tmp_path / "ponder").touch()
    assert evaluate_run(tmp_path)["ponder_maps"].startswith("not written: ")
