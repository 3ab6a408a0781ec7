"""The one stack: scanned equals unrolled, recomputation changes nothing, dropout is fresh everywhere, depth is free."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import BlockInputs, Stack, TransformerConfig, gpt, stack_layers, unstack_layers

SHAPE = {"vocab_size": 13, "embed_dim": 12, "num_heads": 3, "max_length": 32, "init_stddev": 0.3}
DROPOUT = {"dropout_rate": 0.2, "attention_dropout_rate": 0.3, "mlp_dropout_rate": 0.1}


def init_params(model, *args, **kwargs):
    return jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(1))["params"]


def _tokens(batch=2, length=5):
    return jax.random.randint(jax.random.key(0), (batch, length), 0, 13)


def _loss(model, params, tokens, seed=7):
    out = model.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": jax.random.key(seed)})
    return (jax.nn.log_softmax(out.logits) * jnp.cos(jnp.arange(out.logits.size)).reshape(out.logits.shape)).sum()


def _value_and_grad(model, params, tokens):
    return jax.jit(jax.value_and_grad(lambda params: _loss(model, params, tokens)))(params)


def test_scanned_and_unrolled_agree_with_dropout_in_values_and_gradients():
    scanned = gpt(**SHAPE, **DROPOUT, num_layers=3)
    unrolled = gpt(**SHAPE, **DROPOUT, num_layers=3, scan_layers=False)
    tokens = _tokens()
    params = init_params(scanned, tokens)
    loss, grads = _value_and_grad(scanned, params, tokens)
    other, other_grads = _value_and_grad(unrolled, unstack_layers(params), tokens)
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), stack_layers(other_grads), grads)


@pytest.mark.slow
def test_layer_ten_comes_after_layer_nine():
    unrolled = gpt(**SHAPE, num_layers=12, scan_layers=False)
    params = jax.eval_shape(lambda: unrolled.init(jax.random.key(0), _tokens()))["params"]
    numbered = {
        name: jax.tree.map(lambda leaf, name=name: jnp.full(leaf.shape, float(name.split("_")[1])), layer)
        for name, layer in params["decoder"].items()
        if name.startswith("layers_")
    }
    stacked = stack_layers({"decoder": numbered})["decoder"]["layers"]
    for leaf in jax.tree.leaves(stacked):
        np.testing.assert_array_equal(leaf.reshape(12, -1)[:, 0], np.arange(12.0))
    back = unstack_layers({"decoder": {"layers": stacked}})["decoder"]
    assert set(back) == set(numbered)
    jax.tree.map(np.testing.assert_array_equal, back, numbered)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [("full", True), ("sqrt", True), ("dots", True), ("dots_no_batch", True), ("full", False), ("sqrt", False)],
)
def test_recomputation_changes_neither_loss_nor_gradient(remat, scan_layers):
    options = {**SHAPE, **DROPOUT, "num_layers": 6 if remat == "sqrt" else 2, "scan_layers": scan_layers}
    plain, recomputed = gpt(**options), gpt(**options, remat=remat)
    tokens = _tokens()
    params = init_params(plain, tokens)
    loss, grads = _value_and_grad(plain, params, tokens)
    other, other_grads = _value_and_grad(recomputed, params, tokens)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other_grads, grads)


def _temporaries(remat, num_layers):
    model = gpt(vocab_size=13, num_layers=num_layers, embed_dim=32, num_heads=2, max_length=64, remat=remat)
    tokens = jnp.zeros((4, 64), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))["params"]
    compiled = jax.jit(jax.grad(lambda p: _loss(model, p, tokens))).lower(params).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_recomputation_saves_memory():
    assert _temporaries("full", 8) < 0.5 * _temporaries("none", 8)


@pytest.mark.slow
def test_recomputation_in_groups_grows_with_the_root_of_the_depth():
    growth = [_temporaries(remat, 64) - _temporaries(remat, 16) for remat in ("full", "sqrt")]
    # Inputs of 48 more layers; or of 4 more groups and of 4 more layers in a group, with these layers' gradients.
    assert growth[1] < 0.5 * growth[0]


def _dropout_masks(depth, seed, batch=3, width=64):
    """Sums of the masks of the first ``depth`` layers: each block adds dropout(1) to a residual stream of ones."""
    config = TransformerConfig(
        vocab_size=2, num_layers=depth, embed_dim=width, num_heads=1, dropout_rate=0.5, activation="relu"
    )
    stack = Stack(config, depth, causal=True)
    x = jnp.ones((batch, 5, width))
    params = jax.tree.map(jnp.zeros_like, init_params(stack, x, BlockInputs()))
    params["layers"]["mlp"]["down"]["bias"] += 1.0
    rngs = {"dropout": jax.random.key(seed)}
    apply = jax.jit(lambda params: stack.apply({"params": params}, x, BlockInputs(), deterministic=False, rngs=rngs))
    out, _ = apply(params)
    return np.asarray(out) - 1.0


@pytest.mark.slow
def test_dropout_masks_differ_between_layers_rows_positions_and_steps():
    total = [np.zeros((3, 5, 64)), *(_dropout_masks(depth, seed=0) for depth in (1, 2, 3))]
    masks = [after - before for before, after in itertools.pairwise(total)]
    for mask in masks:
        assert set(np.unique(mask)) <= {0.0, 2.0}
        assert abs(mask.mean() - 1.0) < 0.15
    pairs = [(masks[0], masks[1]), (masks[1], masks[2]), (masks[0], masks[2]), (masks[0], _dropout_masks(1, seed=1))]
    pairs += [(masks[0][0], masks[0][1]), (masks[0][:, 0], masks[0][:, 1])]
    for first, second in pairs:
        # Independent fair coins agree half of the time; four standard deviations of the smallest sample here is 0.15.
        assert abs((first == second).mean() - 0.5) < 0.15
    np.testing.assert_array_equal(_dropout_masks(2, seed=0), total[2])
