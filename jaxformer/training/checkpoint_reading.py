"""Reading checkpoints: which steps are whole, what they hold, and a comparison before anything is restored.

A step's folder holds three items: `model` (parameters and model state, and the average of the parameters where the run
keeps one: what evaluation needs), `training` (optimizer state, step, randomness, and the loss scale where there is one)
and `facts` (a JSON object: the data iterator's position, the validation loss, and more).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.training.averaging import average_dtype, averaged_params

ITEMS = ("model", "training", "facts")
_METADATA = "_CHECKPOINT_METADATA"
_TREE_FILES = ("_METADATA", "manifest.ocdbt")
UNFINISHED = ".orbax-checkpoint-tmp"
_LISTED = 12


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or restored; the message says why in one sentence."""


# --- finding -----------------------------------------------------------------------------------------------------


def find_steps(directory: Path) -> tuple[list[int], list[str]]:
    """Looks through a checkpoint folder.

    Args:
      directory: the folder; it need not exist.

    Returns:
      The steps whose checkpoint is whole, ascending, and the names of what an interrupted save or copy left.
    """
    whole, broken = [], []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name.isdecimal() and entry.is_dir() and _is_whole(entry):
            whole.append(int(entry.name))
        elif entry.name.isdecimal() or entry.name.endswith(UNFINISHED):
            broken.append(entry.name)
    return sorted(whole), broken


def _is_whole(folder: Path) -> bool:
    try:
        committed = json.loads((folder / _METADATA).read_text())["commit_timestamp_nsecs"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    trees = all((folder / item / name).is_file() for item in ("model", "training") for name in _TREE_FILES)
    return bool(committed) and trees and _facts_file(folder).is_file()


def _facts_file(folder: Path) -> Path:
    return folder / "facts" / "metadata"


def read_facts(directory: Path, step: int) -> dict[str, Any]:
    """Reads the JSON object saved with a step."""
    return json.loads(_facts_file(directory / str(step)).read_text())


def best_steps(losses: Mapping[int, float | None], count: int) -> list[int]:
    """The `count` steps of lowest loss, best first; steps without a finite one are not among them."""
    known = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-step for _, step in sorted(known)[:count]]


def choose_step(directory: Path, wanted: str = "latest") -> int:
    """The step that `wanted` means: "latest", "best" (lowest validation loss) or a number.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    steps, _ = find_steps(directory)
    if not steps:
        raise CheckpointError(f"{directory} holds no checkpoint")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        best = best_steps({step: read_facts(directory, step).get("loss") for step in steps}, 1)
        return best[0] if best else steps[-1]
    if not wanted.isdecimal() or int(wanted) not in steps:
        raise CheckpointError(f"step must be latest, best or one of {', '.join(map(str, steps))}, got {wanted!r}")
    return int(wanted)


# --- trees -------------------------------------------------------------------------------------------------------


def _name(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))


def to_dicts(tree: Any) -> dict[str, Any]:
    """A tree as nested dictionaries by name, whatever its nodes are; nodes without leaves vanish."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        node = nested
        for key in path[:-1]:
            node = node.setdefault(_name(key), {})
        node[_name(path[-1])] = leaf
    return nested


def from_dicts(nested: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `to_dicts`: the leaves of `nested` in the structure of `like`."""

    def look_up(path, _):
        node: Any = nested
        for key in path:
            node = node[_name(key)]
        return node

    return jax.tree_util.tree_map_with_path(look_up, like)


def signature(tree: Any) -> dict[str, str]:
    """Shape and dtype of every leaf by path, to read and to compare."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(map(_name, path)): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def stored_tree(directory: Path, step: int, item: str) -> dict[str, Any]:
    """Shape and dtype of every array of an item on disk, as nested dictionaries, reading no array."""
    import orbax.checkpoint as ocp
    from etils import epath

    return ocp.StandardCheckpointHandler().metadata(epath.Path((directory / str(step) / item).absolute())).tree


def stored_signature(directory: Path, step: int, item: str) -> dict[str, str]:
    """Shape and dtype of every array of an item on disk by path, reading no array."""
    return signature(stored_tree(directory, step, item))


def check_signature(stored: Mapping[str, str], wanted: Mapping[str, str], where: str) -> None:
    """Refuses a checkpoint that does not have exactly the arrays wanted.

    Orbax converts dtypes without a word and would fill in what it can; so this comes before any restore.

    Raises:
      CheckpointError: names, shapes or dtypes differ; the message lists them.
    """
    lines = [f"missing {path} {kind}" for path, kind in wanted.items() if path not in stored]
    lines += [f"unexpected {path} {kind}" for path, kind in stored.items() if path not in wanted]
    lines += [
        f"{path} is {stored[path]}, must be {kind}"
        for path, kind in wanted.items()
        if path in stored and stored[path] != kind
    ]
    if lines:
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(lines[:_LISTED] + more)}")


# --- restoring ---------------------------------------------------------------------------------------------------


def restore_model(directory: Path, step: int, params: Any, model_state: Any) -> tuple[Any, Any]:
    """Restores parameters and model state alone, without the optimizer.

    The parameters are those that evaluation uses: the average, where the checkpoint holds one.

    Args:
      directory: the checkpoint folder.
      step: which checkpoint.
      params: tree of `jax.ShapeDtypeStruct` (with a sharding, where arrays belong).
      model_state: the same.

    Returns:
      Parameters and model state.

    Raises:
      CheckpointError: the checkpoint does not have exactly these arrays.
    """
    like = {"params": params, "model_state": model_state}
    if "average" in stored_tree(directory, step, "model"):
        like["average"] = _abstract_average(params)
    restored = restore_items(directory, step, {"model": to_dicts(like)})
    tree = from_dicts(restored["model"], like)
    if "average" in tree:
        return averaged_params(tree["average"]["params"], params), tree["model_state"]
    return tree["params"], tree["model_state"]


def _abstract_average(params: Any) -> dict[str, Any]:
    """What stands on disk of the average of parameters, laid out as they are."""
    sharding = jax.tree.leaves(params)[0].sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return {
        "updates": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        "params": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, average_dtype(leaf.dtype), sharding=leaf.sharding), params
        ),
    }


def restore_items(directory: Path, step: int, trees: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Restores the items that have a tree (of abstract arrays), after comparing all of them."""
    import orbax.checkpoint as ocp

    where = f"checkpoint {directory / str(step)}"
    arguments: dict[str, Any] = {item: ocp.args.StandardRestore(tree) for item, tree in trees.items()}
    try:
        for item, tree in trees.items():
            check_signature(stored_signature(directory, step, item), signature(tree), where)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore((directory / str(step)).absolute(), ocp.args.Composite(**arguments))
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
        raise CheckpointError(f"{where} cannot be restored: {first_line(error)}") from error
    return {item: restored[item] for item in trees}


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says; tensorstore adds whole specifications in brackets."""
    line = (str(error).strip().splitlines() or [""])[0].partition(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {line[:300]}"
