"""Ponder maps: how many steps every token of some rows makes in a model whose tokens halt by themselves."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.models import Transformer
from jaxformer.training.evaluate import batches_of
from jaxformer.training.objectives import model_inputs
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sharding import shard_batch


def ponders(model: nn.Module) -> bool:
    """Whether a model's tokens halt by themselves, and this process holds its parameters whole."""
    return isinstance(model, Transformer) and model.config.halting != "none" and jax.process_count() == 1


def ponder_maps(
    model: nn.Module, params: Any, model_state: Any, rows: Any, config: ConfigDict, mesh: Mesh, limit: int | None = None
) -> dict[str, np.ndarray]:
    """The steps that every token makes when the model reads some rows.

    Graves 2016, arXiv:1603.08983, section 2: a token makes N steps, the last of which weighs the remainder R.

    Args:
      model: one that ``ponders``.
      params: its parameters.
      model_state: its other variables.
      rows: a `jaxformer.data.Rows` of E rows of L tokens.
      config: the whole config; read is `eval.batch_size`.
      mesh: the mesh.
      limit: rows at most, the first of all; None = all.

    Returns:
      tokens and targets int32 [E, L] (target -100: none); ponder_steps int32 [E, L], N, and ponder_remainder float32
      [E, L], R, both 0 where there is no token.
    """
    count = len(rows) if limit is None else min(limit, len(rows))
    variables = {"params": params, **model_state}
    pieces: list[dict[str, np.ndarray]] = []
    batches = iter(batches_of(rows, config, mesh))
    while sum(len(piece["tokens"]) for piece in pieces) < count:
        batch = next(batches)
        maps = jax.device_get(_maps(model, variables, model_inputs(shard_batch(batch, mesh))))
        pieces.append({"tokens": batch["tokens"], "targets": batch["targets"], **maps})
    return {name: np.concatenate([piece[name] for piece in pieces])[:count] for name in pieces[0]}


@functools.partial(jax.jit, static_argnames="model")
def _maps(model: nn.Module, variables: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    output: Any = model.apply(variables, **inputs, method="hidden")
    return output[1].maps


def answer_steps(maps: Mapping[str, np.ndarray]) -> float:
    """Mean steps of the tokens from which the answers are read."""
    return float(maps["ponder_steps"][maps["targets"] >= 0].mean())


def write_ponder_maps(
    directory: RunDirectory,
    step: int,
    model: nn.Module,
    params: Any,
    model_state: Any,
    config: ConfigDict,
    data: Any,
    mesh: Mesh,
) -> Path | None:
    """Writes the ponder maps of all test rows, or of the first validation rows where there are no tests.

    One file `ponder/step_<step>/<bucket>.npz` for each bucket, to be opened by ``numpy.load``; without buckets
    `validation.npz`, of `eval.batch_size` rows at most.

    Args:
      directory: the run directory.
      step: updates done.
      model: the module.
      params: its parameters.
      model_state: its other variables.
      config: the whole config.
      data: of the run.
      mesh: the mesh.

    Returns:
      The folder; None for a model that does not ponder.

    Raises:
      OSError: the run directory cannot be written.
    """
    if not ponders(model):
        return None
    folder = directory.ponder / f"step_{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    limit = None if data.buckets else config.eval.batch_size
    for name, rows in (data.buckets or {"validation": data.validation_rows}).items():
        maps: dict[str, Any] = ponder_maps(model, params, model_state, rows, config, mesh, limit)
        np.savez_compressed(folder / f"{name}.npz", **maps)
    return folder
