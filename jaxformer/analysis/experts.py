"""What a block's feed-forward layer holds and what a token uses of it: mixtures of experts beside plain layers."""

from dataclasses import dataclass

from jaxformer.functional import expert_capacities
from jaxformer.layers import ACTIVATIONS
from jaxformer.models import TransformerConfig


@dataclass(frozen=True)
class FeedForwardCost:
    """Of one block's feed-forward layer.

    Attributes:
      total_parameters: all that it holds, the router included.
      active_parameters: those that one token uses; the same for a plain layer.
      operations: of matrix products for one token, forward, a multiplication and an addition being two: of the experts
        that it chooses, the shared one and the router. The gradient costs twice as much again.
      computed_operations: the same in training with rows of the given length: places of experts that stay empty are
        computed too, and with ``expert_dispatch="einsum"`` the products that bring tokens there and back. Without a
        capacity, ``einsum`` computes every expert; ``sort`` is counted without the empty places of part-filled blocks.
    """

    total_parameters: int
    active_parameters: int
    operations: float
    computed_operations: float


def feed_forward_cost(config: TransformerConfig, length: int | None = None) -> FeedForwardCost:
    """Parameters and operations of a block's feed-forward layer (of one that has experts, where some do), by formula.

    With E experts of P parameters, K a token, R = embed_dim * E of the router and S shared experts (0 or 1):
    (E + S) P + R in all, of which a token uses (K + S) P + R. A plain layer of the same active size is one of
    K + S times the width.

    Args:
      config: the model's.
      length: tokens of a row (None = max_length).
    """
    length = config.max_length if length is None else length
    width, hidden = config.embed_dim, config.hidden_dim
    projections = 3 if ACTIVATIONS[config.activation][1] else 2
    kernels = projections * width * hidden
    one = kernels + (((projections - 1) * hidden + width) if config.use_bias else 0)
    if config.num_experts is None:
        return FeedForwardCost(one, one, 2.0 * kernels, 2.0 * kernels)
    experts, chosen, shared = config.num_experts, config.experts_per_token, int(config.shared_expert)
    router = width * experts
    places: float = chosen
    moving = 0.0
    if config.expert_capacity_factor is not None:
        capacity = int(expert_capacities(length, experts, chosen, config.expert_capacity_factor).max())
        places = experts * capacity / length
        if config.expert_dispatch == "einsum":
            moving = 4.0 * experts * capacity * width
    elif config.expert_dispatch == "einsum":
        places, moving = experts, 2.0 * experts * width
    return FeedForwardCost(
        total_parameters=(experts + shared) * one + router,
        active_parameters=(chosen + shared) * one + router,
        operations=2.0 * ((chosen + shared) * kernels + router),
        computed_operations=2.0 * ((places + shared) * kernels + router) + moving,
    )
