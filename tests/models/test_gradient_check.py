"""Every kind of block and stack: the gradient of its training loss is the function's, by differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import check_gradients
from jaxformer.layers import NORMS
from jaxformer.models import Transformer, TransformerConfig

SHAPE = {"vocab_size": 11, "num_layers": 2, "embed_dim": 6, "num_heads": 2, "mlp_dim": 7, "max_length": 8}
UNIVERSAL = {"positions": "sinusoidal", "stack": "universal", "step_embedding": "sinusoidal"}
EXPERTS = {"num_experts": 3, "experts_per_token": 2, "expert_capacity_factor": 1.0}
CASES = {
    "reversible": {"residual": "reversible", "positions": "rotary", "head_dim": 4},
    "plain": {},
    "encoder": {"architecture": "encoder", "positions": "relative", "activation": "geglu"},
    "encoder_decoder": {"architecture": "encoder_decoder", "num_kv_heads": 1, "positions": "alibi"},
    "reversible_encoder_decoder": {"architecture": "encoder_decoder", "residual": "reversible"},
    "experts": {**EXPERTS, "shared_expert": True},
    "experts_einsum": {**EXPERTS, "expert_dispatch": "einsum", "expert_period": 2},
    "reversible_experts": {**EXPERTS, "residual": "reversible"},
    "universal": UNIVERSAL,
    "universal_act": {**UNIVERSAL, "num_layers": 3, "halting": "act", "halting_bias_init": -0.5},
    "convolution": {"convolution_width": 3},
    "chunked": {"mlp_chunk_size": 2},
    "recomputed": {"remat": "full"},
    "period": {"attention": ("local", "dense"), "attention_args": {"local": {"window": 2}}},
    "untied_head": {"tie_embeddings": False, "head_transform": True, "head_bias": True},
    **{
        f"{norm}_norm_{placement}": {"norm": norm, "norm_placement": placement}
        for norm in NORMS
        for placement in ("pre", "post")
        if (norm, placement) != ("layer", "pre")
    },
    "no_norm": {"norm": "none", "norm_placement": "none"},
    "batch_norm_of_hidden": {"mlp_norm": "batch"},
    "layer_norm_of_hidden_after": {"mlp_norm": "layer", "mlp_norm_placement": "after"},
}


def float64_model(fields):
    """The model, its other variables, and parameters drawn so that every part counts."""
    model = Transformer(TransformerConfig(**{**SHAPE, **fields}, dtype="float64", param_dtype="float64"))
    inputs = model_inputs(model)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), **inputs))
    random = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: random.normal(0.0, 0.4, leaf.shape), shapes)
    return model, inputs, variables.pop("params"), jax.tree.map(np.abs, variables)


def model_inputs(model):
    random = np.random.default_rng(1)
    inputs = {
        "tokens": random.integers(0, 11, (2, 7)),
        "key_mask": np.arange(7)[None, :] < np.array([[7], [5]]),
    }
    if model.config.architecture == "encoder_decoder":
        inputs |= {
            "source": random.integers(0, 11, (2, 5)),
            "source_mask": np.arange(5)[None, :] < np.array([[3], [5]]),
        }
    return jax.tree.map(jnp.asarray, inputs)


@pytest.mark.parametrize(
    "name", [name if name == "reversible" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_gradients_of_every_block_are_those_of_the_function(name):
    with jax.enable_x64(True):
        model, inputs, params, state = float64_model(CASES[name])

        def loss(params):
            output, _ = model.apply({"params": params, **state}, **inputs, deterministic=False, mutable=["state"])
            weights = jnp.cos(jnp.arange(output.logits.size, dtype=output.logits.dtype)).reshape(output.logits.shape)
            total = (jax.nn.log_softmax(output.logits) * weights).sum()
            return total + sum(jnp.sum(one).astype(total.dtype) for one in output.aux.losses.values())

        report = check_gradients(loss, params, num_directions=1, num_coordinates=2)
    assert report.ok(), report.summary()
