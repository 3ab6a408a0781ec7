"""What learns and at what factor of the rate, from all that a config says of it; the rest is frozen.

Frozen parameters have no update and no decay; their gradients count in no norm, and they have no moments, except those
of layers in a stack whose others learn.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxformer.training.layer_rates import (
    HEAD_PARTS,
    Factors,
    Shapes,
    frozen_factors,
    is_head,
    layer_factors,
    pattern_factors,
    scale_by_factors,
)
from jaxformer.training.parameter_paths import by_path
from jaxformer.training.weight_decay import DecayReport


def all_factors(
    shapes: Shapes,
    layer_decay: float | None,
    head_only: bool,
    rate_factors: Sequence[tuple[str, float]],
    frozen_layers: int | None,
) -> Factors:
    """The product of all factors of the learning rate, by path.

    Raises:
      ValueError: one of them is refused, or nothing is left to learn.
    """
    parts = [pattern_factors(shapes, rate_factors)]
    if layer_decay is not None:
        parts.append(layer_factors(shapes, layer_decay))
    if frozen_layers is not None:
        parts.append(frozen_factors(shapes, frozen_layers))
    if head_only:
        if not any(map(is_head, shapes)):
            raise ValueError(f"head_only is True, but the model has none of the parts {', '.join(HEAD_PARTS)}")
        parts.append({path: float(is_head(path)) for path in shapes})
    factors = {path: np.prod(np.broadcast_arrays(*(part[path] for part in parts)), axis=0) for path in shapes}
    if not any(map(np.any, factors.values())):
        raise ValueError("head_only, rate_factors and frozen_layers leave no parameter that learns")
    return factors


def of_learning(report: DecayReport, factors: Factors) -> DecayReport:
    """The same, where what does not learn does not decay."""
    shapes = {**report.decayed, **report.excluded}
    frozen = {
        path: (int(np.sum(np.equal(factor, 0))), *shapes[path][1:]) if np.any(factor) else shapes[path]
        for path, factor in factors.items()
        if not np.all(factor)
    }
    decayed = {path: shape for path, shape in report.decayed.items() if np.any(factors[path])}
    excluded = {path: shape for path, shape in shapes.items() if path not in decayed}
    return DecayReport(decayed, excluded, frozen)


def frozen_within(params: Any, factors: Factors) -> list[optax.GradientTransformation]:
    """Takes the gradients of frozen layers out of stacks whose others learn, before they count in a norm."""
    partly = {path: np.not_equal(factor, 0) for path, factor in factors.items() if not np.all(factor)}
    partly = {path: learns for path, learns in partly.items() if np.any(learns)}
    if not partly:
        return []
    return [scale_by_factors(by_path(params, lambda path: partly.get(path, 1.0)))]


def only(params: Any, learning: set[str], links: list[optax.GradientTransformation]) -> list[Any]:
    """An update rule for the parameters that learn."""
    mask = by_path(params, learning.__contains__)
    return links if all(jax.tree.leaves(mask)) else [optax.masked(optax.chain(*links), mask)]
