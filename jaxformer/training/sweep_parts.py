"""Many runs as one program: `vmap` of init, train step and evaluation step over runs that differ in numbers alone.

Every array of the state has a leading axis [R] of runs. Numbers that differ come as arrays [R]; all others are compiled
in, as in a single run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxformer.training.assembly import Parts, example_batch, extras, make_updates
from jaxformer.training.overrides import ConfigError
from jaxformer.training.sharding import BATCH_AXES
from jaxformer.training.startup import check_batches
from jaxformer.training.state import TrainState, state_maker
from jaxformer.training.step import make_eval_step

_INEXACT = ("rbg", "unsafe_rbg")


@dataclasses.dataclass(frozen=True)
class TogetherParts:
    """The compiled-on-first-call functions of runs trained together.

    Attributes:
      init: draws the states of step 0.
      train_step: from states and the seeds' batches [S, B, …] to states and metrics [R]; donates the states.
      eval_step: from params, model_state and one batch to sums [R].
      take: the state of one run, by its index.
      stack: states of single runs in one.
      place: a batch of numpy arrays with its layout; `stacked` says whether it is of several seeds.
    """

    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Any, Mapping[str, Any]], dict[str, jax.Array]]
    take: Callable[[TrainState, int], TrainState]
    stack: Callable[[Sequence[TrainState]], TrainState]
    place_train: Callable[[Sequence[Mapping[str, Any]]], dict[str, jax.Array]]
    place_eval: Callable[[Mapping[str, Any]], dict[str, jax.Array]]


def check_randomness() -> None:
    """Refuses random numbers that are others under `vmap` than alone.

    Raises:
      ConfigError: JAX's default generator is such a one.
    """
    name = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    if name in _INEXACT:
        raise ConfigError(
            f"jax_default_prng_impl is {name}, whose numbers differ between runs trained together and alone; it must "
            "be threefry2x32 in a sweep, or the runs separate"
        )


def check_mesh(config: ConfigDict) -> None:
    """Refuses layouts that split the parameters.

    Raises:
      ConfigError: as said.
    """
    for name in ("fsdp", "tensor", "expert"):
        if config.mesh.get(name, 1) != 1:
            raise ConfigError(
                f"config.mesh.{name} is {config.mesh[name]}, must be 1 where runs are trained together; train them "
                "separately instead"
            )


def make_together(
    config: ConfigDict, parts: Parts, seeds: Sequence[int], numbers: Mapping[str, Sequence[float]], mesh: Mesh
) -> TogetherParts:
    """Builds the functions of R runs.

    Several devices share the runs, where their number divides by that of the devices; else each run's rows.

    Args:
      config: of any of the runs, with all values decided.
      parts: of that config.
      seeds: of each run.
      numbers: by path, the value of each run.
      mesh: with all devices along the axis ``data``.

    Raises:
      ConfigError: the devices can split neither runs nor rows.
    """
    by_runs = len(seeds) % mesh.size == 0
    if not by_runs:
        check_batches(config, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_runs = NamedSharding(mesh, PartitionSpec(BATCH_AXES)) if by_runs else everywhere
    distinct = list(dict.fromkeys(seeds))
    example = example_batch(config.data.length, parts.model)
    updates = functools.partial(make_updates, config, parts.model, parts.objective, parts.state.params)
    placed = jax.device_put({path: _weak(values) for path, values in numbers.items()}, of_runs)
    which = jax.device_put(jnp.asarray([distinct.index(seed) for seed in seeds], jnp.int32), of_runs)

    def init(own: Mapping[str, jax.Array], seed: jax.Array) -> TrainState:
        return state_maker(parts.model, updates(own).optimizer, example, **extras(config))(seed)

    def train_step(state: TrainState, own: Mapping[str, jax.Array], index: jax.Array, batches: Mapping[str, Any]):
        batch = batches if len(distinct) == 1 else {name: rows[index] for name, rows in batches.items()}
        return updates(own).train_step(state, batch)

    all_init = jax.jit(jax.vmap(init), out_shardings=of_runs)
    all_train = jax.jit(
        jax.vmap(train_step, in_axes=(0, 0, 0, None)), donate_argnums=0, out_shardings=(of_runs, everywhere)
    )
    eval_step = make_eval_step(parts.model, parts.objective)
    take = jax.jit(lambda states, index: jax.tree.map(lambda leaf: leaf[index], states), out_shardings=everywhere)
    stack = jax.jit(lambda states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), out_shardings=of_runs)
    rows = PartitionSpec(None if by_runs else BATCH_AXES)
    stacked_rows = PartitionSpec(None, *rows) if len(distinct) > 1 else rows
    return TogetherParts(
        init=lambda: all_init(placed, jnp.asarray(np.asarray(seeds, np.uint32))),
        train_step=lambda states, batches: all_train(states, placed, which, batches),
        eval_step=jax.jit(jax.vmap(eval_step, in_axes=(0, 0, None)), out_shardings=everywhere),
        take=take,
        stack=lambda states: stack(tuple(states)),
        place_train=lambda batches: _put(_stacked(batches), NamedSharding(mesh, stacked_rows)),
        place_eval=lambda batch: _put(batch, NamedSharding(mesh, rows)),
    )


def _weak(values: Sequence[float]) -> jax.Array:
    """Numbers [R] that take the dtype of what they meet, as Python's do."""
    return jnp.stack([jnp.asarray(float(value)) for value in values])


def _stacked(batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(batches) == 1:
        return batches[0]
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def _put(batch: Mapping[str, Any], sharding: NamedSharding) -> dict[str, jax.Array]:
    return {name: jax.device_put(np.asarray(rows), sharding) for name, rows in batch.items()}
