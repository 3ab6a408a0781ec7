"""The curvature of a run's training loss at its parameters: the largest eigenvalues of the Hessian."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.analysis.curvature import hessian_eigenvalues
from jaxformer.training.assembly import load_data, make_objective
from jaxformer.training.finished import load_model, read_run
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sharding import make_mesh


class RunCurvature(NamedTuple):
    """The curvature of one batch's loss.

    Attributes:
      step: updates that the parameters have had.
      loss: nats per supervised token of the batch.
      eigenvalues: float64 [k], from the largest down.
      residuals: float64 [k], how far each may be from a true eigenvalue.
    """

    step: int
    loss: float
    eigenvalues: np.ndarray
    residuals: np.ndarray


def run_curvature(
    workdir: str | Path, *, k: int = 1, num_rows: int = 64, num_steps: int = 40, step: str = "latest", seed: int = 0
) -> RunCurvature:
    """Measures the curvature of a run's training loss on some rows of its validation data.

    The loss is that of training, auxiliary terms included: batch norm normalises by the batch's own statistics. So it
    tells how far a step of gradient descent may go: it diverges along eigenvectors whose eigenvalue is above 2 / rate
    (Cohen et al. 2021, arXiv:2103.00065, section 2).

    Args:
      workdir: the run directory.
      k: eigenvalues.
      num_rows: rows of the batch; drawn by the seed, at most as many as there are.
      num_steps: products with the Hessian, at least k.
      step: which checkpoint: "latest", "best" or a number.
      seed: of the rows and of the vector to begin with.

    Returns:
      The figures.

    Raises:
      ConfigError: no run was started there.
      CheckpointError: there is no such checkpoint.
      ValueError: k, num_rows or num_steps is out of range, or the run has dropout.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}, must be at least 1")
    config = read_run(Path(workdir))
    rates = {name: rate for name, rate in config.model.items() if name.endswith("dropout_rate") and rate}
    if rates:
        raise ValueError(f"the run in {workdir} has {rates}; its loss is random, so that it has no one curvature")
    model, params, model_state, number = load_model(Path(workdir), config, make_mesh(**config.mesh), step)
    rows: Any = load_data(config, RunDirectory(Path(workdir))).validation_rows
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num_rows]
    batch = jax.tree.map(jnp.asarray, dict(rows.batch(np.sort(chosen))))
    objective = make_objective(config)

    @jax.jit
    def measure(params: Any, rng: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def loss(params: Any) -> jax.Array:
            output = objective(model, params, model_state, batch, rng=rng, deterministic=False, step=number)
            return output.loss_sum / output.weight_sum

        found = hessian_eigenvalues(loss, params, k, num_steps=num_steps, rng=rng)
        return loss(params), found.values, found.residuals

    loss, values, residuals = jax.device_get(measure(params, jax.random.key(seed)))
    return RunCurvature(number, float(loss), values.astype(np.float64), residuals.astype(np.float64))
