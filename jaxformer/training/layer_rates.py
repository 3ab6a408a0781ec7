"""Rates that fall from layer to layer, and parts of a model that do not learn: by the paths of parameters."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.training.parameter_paths import compile_pattern

Shapes = Mapping[str, tuple[int, ...]]
Factors = dict[str, Any]
"""By path a number, or an array that multiplies the parameter."""

HEAD_PARTS = (
    "classifier",
    "head_bias",
    "head_norm",
    "head_transform",
    "next_sentence_head",
    "output_head",
    "pooler",
)
"""What stands above the body, under these names at the root of the parameters."""

_LAYER = re.compile(r"^(?P<side>.*?)layers(_(?P<number>\d+))?/(period_(?P<place>\d+)/)?")
_LOWEST = re.compile(r"(^|/)(\w*embedding|embedding_norm|relative_bias)(/|$)")
_HIGHEST = re.compile(r"(^|/)final_norm/")


def is_head(path: str) -> bool:
    """Whether a parameter is above the body."""
    root = path.partition("/")[0]
    return root in HEAD_PARTS or (root.startswith("future_") and root.endswith("_head"))


def layer_factors(shapes: Shapes, decay: float) -> Factors:
    """Factors of the learning rate by depth: decay^k of what is k steps below the head.

    The head and the final norm have 1, layer l of L (from 1) decay^(L + 1 - l), and all embeddings, those of positions
    and the norm behind them among them, decay^(L + 1). Encoder and decoder are each counted by themselves, from their
    own top; embeddings of both lie below the deeper. Howard and Ruder 2018, "ULMFiT", arXiv:1801.06146, section 3.2;
    for Transformers Clark et al. 2020, "ELECTRA", arXiv:2003.10555, appendix B.

    Args:
      shapes: shape of each parameter by path.
      decay: factor from one layer to that below it, in (0, 1].

    Returns:
      By path a number, or for the stacked parameters of several layers an array that multiplies them [layers, 1, …].

    Raises:
      ValueError: the decay is out of range, or a parameter is of no layer, as where layers share theirs.
    """
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"layer_decay is {decay}, must be above 0 and at most 1, or None")
    return {path: decay ** (depth - layer) for path, (layer, depth) in _places(shapes, "layer_decay").items()}


def frozen_factors(shapes: Shapes, frozen_layers: int) -> Factors:
    """Factors 0 of the lowest layers and of all that ``layer_factors`` counts as embeddings, 1 of the others.

    Encoder and decoder are each counted by themselves, from the bottom. Embeddings that are also the head are frozen
    with the rest. The gradients of layers in a stack are still computed.

    Args:
      shapes: shape of each parameter by path.
      frozen_layers: how many layers; with 0 the embeddings alone.

    Returns:
      As of ``layer_factors``.

    Raises:
      ValueError: there are fewer layers, or a parameter is of no layer.
    """
    places = _places(shapes, "frozen_layers")
    most = max(depth for _, depth in places.values())
    if not 0 <= frozen_layers <= most:
        raise ValueError(f"frozen_layers is {frozen_layers}, must be in [0, {most}], the model's layers, or None")
    return {
        path: 1.0 if depth == 0 else np.where(np.asarray(layer) < frozen_layers, 0.0, 1.0)[()]
        for path, (layer, depth) in places.items()
    }


def pattern_factors(shapes: Shapes, rate_factors: Sequence[tuple[str, float]]) -> Factors:
    """Factors of the learning rate by pattern: that of the first that finds the path, 1 where none does.

    Args:
      shapes: shape of each parameter by path.
      rate_factors: (regular expression on paths, factor of at least 0; 0 = frozen).

    Raises:
      ValueError: something else is given, or a pattern is malformed or matches nothing.
    """
    patterns = []
    for pair in rate_factors:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not _is_number(pair[1]):
            raise ValueError(f"rate_factors has {pair!r}, must be pairs (pattern, factor)")
        pattern, factor = pair
        if not 0.0 <= factor < math.inf:
            raise ValueError(f"rate_factors has factor {factor} for {pattern!r}, must be at least 0")
        patterns.append((compile_pattern("rate_factors", pattern, shapes), factor))
    return {path: next((factor for pattern, factor in patterns if pattern.search(path)), 1.0) for path in shapes}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _places(shapes: Shapes, field: str) -> dict[str, tuple[Any, int]]:
    """Of each parameter its layer from the bottom, and how many layers its side has.

    Embeddings have layer -1, stacked layers an array [layers, 1, …]; what is above the layers has (0, 0).
    """
    depths = _depths(shapes, field)
    places: dict[str, tuple[Any, int]] = {}
    for path, shape in shapes.items():
        found = _LAYER.match(path)
        if is_head(path) or _HIGHEST.search(path):
            places[path] = (0, 0)
        elif found:
            depth, period = depths[found["side"]]
            if found["number"] is not None:
                places[path] = (int(found["number"]), depth)
            else:
                layers = np.arange(shape[0]) * period + int(found["place"] or 0)
                places[path] = (layers.reshape(-1, *[1] * (len(shape) - 1)), depth)
        elif _LOWEST.search(path):
            own = [depth for side, (depth, _) in depths.items() if side and path.startswith(side)]
            places[path] = (-1, max(own or [depth for depth, _ in depths.values()]))
        else:
            raise ValueError(f"parameter {path} is of no layer, so {field} must be None here")
    return places


def _depths(shapes: Shapes, field: str) -> dict[str, tuple[int, int]]:
    """By what stands in front of ``layers`` in paths, how many layers there are, and how many a period has."""
    depths: dict[str, tuple[int, int]] = {}
    for path, shape in shapes.items():
        found = _LAYER.match(path)
        if found is None:
            continue
        layers, period = depths.get(found["side"], (0, 1))
        if found["number"] is not None:
            layers = max(layers, int(found["number"]) + 1)
        else:
            period = max(period, int(found["place"] or 0) + 1)
            layers = shape[0] * period
        depths[found["side"]] = (layers, period)
    if not depths:
        raise ValueError(f"{field} must be None for a model whose layers have no parameters of their own")
    return depths


def scale_by_factors(factors: Any) -> optax.GradientTransformation:
    """Multiplies each update by its factor, a number or an array; where the factor is 0, so is the update.

    Args:
      factors: a tree like the updates.
    """

    def scale(factor: Any, leaf: jax.Array) -> jax.Array:
        scaled = leaf * np.asarray(factor, leaf.dtype)
        # Not 0 times the update, which may be 0 / 0 where no gradient ever came.
        return scaled if np.all(factor) else jnp.where(np.equal(factor, 0), jnp.zeros_like(leaf), scaled)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(scale, factors, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
