"""How the parameters of a stack's layers are laid out: stacked on a leading axis, or one tree a layer; and back."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_PLACE = "period_"


def join_places(trees: list[Any]) -> Any:
    """The trees of the places of a period as one: the tree itself where there is one place."""
    if len(trees) == 1:
        return trees[0]
    return {f"{_PLACE}{place}": tree for place, tree in enumerate(trees) if jax.tree.leaves(tree)}


def split_places(tree: Any, period: int) -> list[Any]:
    """The way back from ``join_places``."""
    return [tree] if period == 1 else [tree.get(f"{_PLACE}{place}", {}) for place in range(period)]


def stack_layers(params: Any, period: int = 1) -> Any:
    """Turn an unrolled stack's ``layers_0``, ``layers_1``, … into one ``layers`` tree with a leading layer axis.

    Args:
      params: parameters (or optimizer moments, or state) of any tree that holds unrolled stacks, nested dicts.
      period: how many attentions the layers go through in turn.

    Returns:
      The same tree with each run of ``layers_i`` stacked in numerical order (10 after 9), one tree a place of the
      period.
    """
    if not isinstance(params, dict):
        return params
    numbered = sorted((name for name in params if is_layer(name)), key=lambda name: int(name.removeprefix("layers_")))
    rest = {name: stack_layers(value, period) for name, value in params.items() if name not in numbered}
    if not numbered:
        return rest
    places = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in numbered[place::period]))
        for place in range(period)
    ]
    return {**rest, "layers": join_places(places)}


def unstack_layers(params: Any, period: int = 1) -> Any:
    """The inverse of ``stack_layers``: split each ``layers`` tree along its leading axis."""
    if not isinstance(params, dict):
        return params
    rest = {name: unstack_layers(value, period) for name, value in params.items() if name != "layers"}
    if "layers" not in params:
        return rest
    split = {}
    for place, tree in enumerate(split_places(params["layers"], period)):
        for i in range(jax.tree.leaves(tree)[0].shape[0] if jax.tree.leaves(tree) else 0):
            split[f"layers_{i * period + place}"] = jax.tree.map(lambda leaf, i=i: leaf[i], tree)
    return {**rest, **split}


def is_layer(name: str) -> bool:
    """Whether it is the name of one layer of an unrolled stack."""
    return name.startswith("layers_") and name.removeprefix("layers_").isdigit()


def interleave(*leaves: Array) -> Array:
    """Leaves of the places of a period, each stacked over periods, as one over all layers in order."""
    return jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])
