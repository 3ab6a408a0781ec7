"""The compiled train step of a deep model is no longer than that of a shallow one."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.models import Transformer, TransformerConfig
from jaxformer.training.objectives import language_model_objective
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import abstract_params, abstract_state
from jaxformer.training.step import jit_train_step, make_train_step

BATCH = {name: jax.ShapeDtypeStruct((2, 5), jnp.int32) for name in ("tokens", "targets")}


def _lowered(num_layers, architecture):
    fields = {"vocab_size": 13, "embed_dim": 12, "num_heads": 3, "max_length": 32}
    model = Transformer(TransformerConfig(**fields, num_layers=num_layers, architecture=architecture))
    batch = {**BATCH, "source": BATCH["tokens"]} if architecture == "encoder_decoder" else BATCH
    schedule = make_schedule("cosine", learning_rate=1e-3, warmup_steps=2, decay_steps=7)
    example = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    params = abstract_params(model, example)
    optimizer, _ = make_optimizer("adamw", learning_rate=schedule, params=params)
    state = abstract_state(model, optimizer, example)
    return jit_train_step(make_train_step(model, language_model_objective, optimizer, schedule)).lower(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_compiled_size_does_not_grow_with_depth(architecture):
    few, many = (_lowered(depth, architecture).compile().as_text().count(" = ") for depth in (4, 24))
    assert few > 500
    assert abs(many - few) <= 0.05 * few
