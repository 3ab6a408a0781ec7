"""The Linen modules inside Flax NNX, through Flax's own bridge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.layers import MultiHeadAttention
from jaxformer.models import gpt


class Classifier(nnx.Module):
    """A user's NNX module around one of ours."""

    def __init__(self, rngs: nnx.Rngs):
        attention = MultiHeadAttention(num_heads=3)
        self.attention = nnx.bridge.ToNNX(attention, rngs=rngs).lazy_init(jnp.zeros((1, 5, 12)))
        self.head = nnx.Linear(12, 7, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(x, causal=True).output.mean(1))


def test_a_module_trains_inside_nnx():
    model = nnx.jit(lambda: Classifier(nnx.Rngs(0)))()
    x = jax.random.normal(jax.random.key(1), (2, 5, 12))

    def loss(model):
        return jnp.square(model(x) - 1.0).mean()

    before, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.state(grads, nnx.Param)))
    assert nnx.jit(loss)(model) < before
    moved = jax.tree.leaves(nnx.state(grads, nnx.Param))
    assert sum(float(jnp.abs(leaf).sum()) > 0 for leaf in moved) >= 8


@pytest.mark.slow
def test_a_whole_model_gives_the_same_logits_inside_nnx():
    model = gpt(vocab_size=13, num_layers=2, embed_dim=12, num_heads=3, max_length=8)
    tokens = jnp.array([[1, 2, 3, 4, 5]])
    bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(tokens)
    params = bridged.to_linen_variables()["params"] if hasattr(bridged, "to_linen_variables") else None
    if params is None:
        graph = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))
        params = {name: graph[name] for name in ("decoder", "token_embedding")}
    expected = model.apply({"params": params}, tokens).logits
    np.testing.assert_allclose(bridged(tokens).logits, expected, atol=1e-6)
