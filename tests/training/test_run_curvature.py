"""Curvature of a run: the largest eigenvalue against that of the whole Hessian."""

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxformer.data.language_model import load_language_model_data
from jaxformer.training.config import load_config, write_config
from jaxformer.training.finished import load_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.run_curvature import run_curvature

TINY = ["model.embed_dim=4", "data.length=8", "data.training_bytes=200", "data.validation_bytes=40", "train.steps=3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("curvature") / "run"
    train_and_evaluate(load_config("optimizer_grid", TINY), workdir)
    return workdir


@pytest.mark.slow
def test_largest_eigenvalue_is_that_of_the_whole_hessian(run):
    figures = run_curvature(run, num_rows=2, num_steps=30, seed=1)
    model, variables, tokenizer = load_run(run)
    data = load_language_model_data(length=8, training_bytes=200, validation_bytes=40, tokenizer=tokenizer)
    rows = np.sort(np.random.default_rng(1).permutation(len(data.validation_rows))[:2])
    batch = {name: jax.numpy.asarray(array) for name, array in data.validation_rows.batch(rows).items()}
    flat, restore = ravel_pytree(variables["params"])

    def loss(flat):
        output = model.apply(
            {"params": restore(flat)}, batch["tokens"], positions=batch["positions"], segments=batch["segments"]
        )
        logits, targets = output.logits, batch["targets"]
        likely = jax.nn.log_softmax(logits)
        chosen = jax.numpy.where(targets >= 0, targets, 0)[..., None]
        each = -jax.numpy.take_along_axis(likely, chosen, -1)[..., 0]
        return (each * (targets >= 0)).sum() / (targets >= 0).sum()

    assert figures.step == 3
    assert figures.loss == pytest.approx(float(loss(flat)), rel=1e-5)
    whole = np.linalg.eigvalsh(np.asarray(jax.jit(jax.hessian(loss))(flat), np.float64))
    np.testing.assert_allclose(figures.eigenvalues[0], whole[-1], rtol=1e-3)
    assert figures.residuals[0] < 0.05 * whole[-1]


def test_random_losses_and_no_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_rows is 0, must be at least 1"):
        run_curvature(tmp_path, num_rows=0)
    write_config(tmp_path / "config.json", load_config("optimizer_grid", ["model.dropout_rate=0.5"]), {})
    with pytest.raises(ValueError, match=r"has \{'dropout_rate': 0.5\}; its loss is random"):
        run_curvature(tmp_path)
