"""Run by tests in processes of their own: trains a tiny model on a mesh and on one device, and prints both."""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.models import MODELS
from jaxformer.training.distributed import start_distributed
from jaxformer.training.loss_scaling import loss_scaling
from jaxformer.training.objectives import OBJECTIVES
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.schedules import make_schedule
from jaxformer.training.sharding import data_shard, make_mesh, shard_batch, state_shardings
from jaxformer.training.state import abstract_params, abstract_state, init_state
from jaxformer.training.step import jit_train_step, make_train_step

ROWS, LENGTH, STEPS = 16, 6, 4
# Tests of other models change these two.
MODEL = "gpt"
FIELDS = {
    "vocab_size": 14,
    "num_layers": 3,
    "embed_dim": 12,
    "num_heads": 2,
    "max_length": 7,
    "mlp_dim": 20,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
}
# Part of the state that is compared; the scale doubles after every second step.
EXTRAS = {"average_decay": 0.5, "loss_scaling": loss_scaling("dynamic", 2)}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def make_batch(seed):
    tokens = np.random.default_rng(seed).integers(0, 14, (ROWS, LENGTH + 1), dtype=np.int32)
    supervised = np.arange(LENGTH)[None, :] <= np.arange(ROWS)[:, None] % LENGTH
    return {"tokens": tokens[:, :-1], "targets": np.where(supervised, tokens[:, 1:], -100).astype(np.int32)}


def train(mesh):
    """Trains on a mesh; returns the losses, the state before and after, and the compiled step's collectives."""
    model = MODELS[MODEL](**FIELDS)
    schedule = make_schedule("cosine", learning_rate=1e-2, decay_steps=9)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, make_batch(0)))
    shardings, replicated = state_shardings(abstract_state(model, optimizer, make_batch(0), **EXTRAS), mesh)
    state = init_state(model, optimizer, 5, make_batch(0), shardings, **EXTRAS)
    objective = OBJECTIVES["language_model"]
    step = make_train_step(model, objective, optimizer, schedule, accumulation_steps=2, **EXTRAS)
    gathered = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
    before = whole(gathered(state))
    part, parts = data_shard(mesh)
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    batches = [
        shard_batch({name: value[rows] for name, value in make_batch(seed).items()}, mesh) for seed in range(STEPS)
    ]
    step = jit_train_step(step, shardings).lower(state, batches[0]).compile()
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    after = whole(gathered(state))
    layouts = {name: str(leaf.sharding.spec) for name, leaf in flat(state).items()}
    kinds = [kind for kind in COLLECTIVES if f" {kind}" in step.as_text()]
    return {"losses": losses, "before": before, "after": after, "layouts": layouts, "kinds": kinds, "list": replicated}


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def whole(tree):
    """Every array by its path, of a tree that is whole in every process."""
    return {name: np.asarray(leaf) for name, leaf in flat(tree).items()}


def largest_difference(left, right):
    return max(float(np.abs(left[name].astype(np.float64) - right[name]).max()) for name in left)


def report(single, sizes):
    mesh = make_mesh(**{name: int(size) for name, size in (size.split("=") for size in sizes.split(","))})
    result = train(mesh)
    kept = {name: result[name] for name in ("losses", "layouts", "kinds", "list")}
    kept |= {
        "data_shard": data_shard(mesh),
        "whole_model_shard": data_shard(make_mesh(data=1, tensor=len(jax.devices()))),
    }
    if single:
        kept["single_losses"] = single["losses"]
        kept["difference_before"] = largest_difference(single["before"], result["before"])
        kept["difference_after"] = largest_difference(single["after"], result["after"])
    return kept


def main(*meshes):
    start_distributed(timeout=120)
    single = train(make_mesh(devices=jax.local_devices()[:1])) if jax.process_index() == 0 else None
    reports = {sizes: report(single, sizes) for sizes in meshes}
    print(json.dumps({"processes": jax.process_count(), "reports": reports}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
