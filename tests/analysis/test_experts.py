"""The cost of feed-forward layers with experts: against the parameters and the program of the layer itself."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.analysis import count_matmul_operations, feed_forward_cost
from jaxformer.layers import FeedForward, MixtureOfExperts
from jaxformer.models import TransformerConfig

SHAPE = {"vocab_size": 13, "num_layers": 1, "embed_dim": 12, "num_heads": 3, "mlp_dim": 20, "max_length": 32}


def build(config, length):
    """The layer of a config, and shapes of its variables and of a row."""
    common = {"mlp_dim": config.hidden_dim, "activation": config.activation, "use_bias": config.use_bias}
    layer = FeedForward(**common)
    if config.num_experts is not None:
        layer = MixtureOfExperts(
            **common,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            capacity_factor=config.expert_capacity_factor,
            dispatch=config.expert_dispatch,
            shared_expert=config.shared_expert,
        )
    row = jax.ShapeDtypeStruct((1, length, config.embed_dim), jnp.float32)
    return layer, jax.eval_shape(layer.init, jax.random.key(0), row), row


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "swiglu", "use_bias": False},
        {"num_experts": 4, "expert_dispatch": "einsum"},
        {"num_experts": 4, "experts_per_token": 2, "expert_capacity_factor": 1.5, "expert_dispatch": "einsum"},
        {"num_experts": 4, "expert_capacity_factor": 1.25, "shared_expert": True, "activation": "geglu"},
    ],
)
def test_formulas_equal_what_the_layer_holds_and_computes(fields):
    config = TransformerConfig(**SHAPE, **fields)
    layer, variables, row = build(config, 30)
    cost = feed_forward_cost(config, 30)
    assert cost.total_parameters == sum(leaf.size for leaf in jax.tree.leaves(variables))
    rngs = {"dropout": jax.random.key(0)}
    counted = count_matmul_operations(
        lambda *given: layer.apply(*given, deterministic=False, rngs=rngs), variables, row
    )
    assert round(30 * cost.computed_operations) == counted


def test_a_token_uses_as_much_as_a_plain_layer_of_the_active_width():
    bare = {**SHAPE, "use_bias": False}
    plain = feed_forward_cost(TransformerConfig(**{**bare, "mlp_dim": 60}))
    mixed = feed_forward_cost(TransformerConfig(**bare, num_experts=8, experts_per_token=2, shared_expert=True))
    router = 12 * 8
    assert mixed.active_parameters == plain.active_parameters + router
    assert mixed.operations == plain.operations + 2 * router
    assert mixed.total_parameters == 3 * plain.total_parameters + router
    few = feed_forward_cost(TransformerConfig(**bare, num_experts=8, expert_capacity_factor=2.0))
    assert few.operations < few.computed_operations
