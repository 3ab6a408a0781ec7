"""Rates that fall from layer to layer, and parts of a model that do not learn: by the paths of parameters."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

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


def layer_factors(shapes: Mapping[str, tuple[int, ...]], decay: float) -> dict[str, float | np.ndarray]:
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
      ValueError: a parameter is of no layer, as where layers share theirs.
    """
    depths = _depths(shapes)
    factors: dict[str, float | np.ndarray] = {}
    for path, shape in shapes.items():
        found = _LAYER.match(path)
        if is_head(path) or _HIGHEST.search(path):
            factors[path] = 1.0
        elif found:
            side = found["side"]
            depth, period = depths[side]
            if found["number"] is not None:
                factors[path] = decay ** (depth - int(found["number"]))
            else:
                layers = np.arange(shape[0]) * period + int(found["place"] or 0)
                factors[path] = (decay ** (depth - layers)).reshape(-1, *[1] * (len(shape) - 1))
        elif _LOWEST.search(path):
            own = [depth for side, (depth, _) in depths.items() if side and path.startswith(side)]
            factors[path] = decay ** (1 + max(own or [depth for depth, _ in depths.values()]))
        else:
            raise ValueError(f"layer_decay is {decay}, but parameter {path} is of no layer; it must be None here")
    return factors


def _depths(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
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
        raise ValueError("layer_decay must be None for a model whose layers have no parameters of their own")
    return depths


def scale_by_factors(factors: Any) -> optax.GradientTransformation:
    """Multiplies each update by its factor, a number or an array.

    Args:
      factors: a tree like the updates.
    """

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda factor, leaf: leaf * np.asarray(factor, leaf.dtype), factors, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
