"""The settings of a mixture of experts in a block, refused where they do not fit each other."""

import math
from typing import Any

from jaxformer.functional import check_experts

NEUTRAL = {
    "expert_period": 1,
    "experts_per_token": 1,
    "expert_capacity_factor": None,
    "shared_expert": False,
    "router_jitter": 0.0,
}
"""What the fields are where there are no experts."""


def check_mixture(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Raises:
      ValueError: a number out of range, or a setting that a model without experts would not read.
    """
    for name in ("balance_loss_weight", "router_z_loss_weight"):
        value = getattr(config, name)
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and at least 0")
    if not 0.0 <= config.router_jitter < 1.0:
        raise ValueError(f"router_jitter={config.router_jitter} must be in [0, 1)")
    if config.num_experts is None:
        for name, neutral in NEUTRAL.items():
            if getattr(config, name) != neutral:
                raise ValueError(f"{name}={getattr(config, name)!r} needs num_experts, which is None")
        return
    check_experts(config.num_experts, config.experts_per_token, config.expert_capacity_factor)
    _check_period(config)
    if config.mlp_chunk_size is not None:
        raise ValueError(
            f"mlp_chunk_size={config.mlp_chunk_size} can't be given with num_experts={config.num_experts}: experts "
            "take their tokens from whole rows"
        )


def _check_period(config: Any) -> None:
    """Refuse a period that is no number of blocks, or that the stack cannot have."""
    period = config.expert_period
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"expert_period={period!r} must be an integer of at least 1")
    if period > 1 and config.stack != "plain":
        raise ValueError(f"expert_period={period} needs stack='plain', not {config.stack!r}, which has one block")
    for field in ("num_layers", "num_encoder_layers"):
        depth = getattr(config, field)
        if isinstance(depth, int) and depth % period:
            raise ValueError(f"{field}={depth} must be a multiple of expert_period={period}")
