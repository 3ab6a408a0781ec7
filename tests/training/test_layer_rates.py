"""Rates by layer against factors by hand, stacked or not; heads that learn alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.training.layer_rates import layer_factors
from jaxformer.training.optimizers import make_optimizer

SHAPES = {
    "classifier/kernel": (4, 2),
    "encoder/embedding_norm/scale": (4,),
    "encoder/final_norm/scale": (4,),
    "encoder/layers/mlp/up/kernel": (3, 4, 8),
    "encoder/layers/norm/scale": (3, 4),
    "encoder/position_embedding/embedding": (5, 4),
    "encoder/relative_bias/embedding": (5, 4),
    "pooler/bias": (4,),
    "token_embedding/embedding": (7, 4),
    "token_type_embedding/embedding": (2, 4),
}
ABOVE = ("classifier/kernel", "encoder/final_norm/scale", "pooler/bias")


def tree_of(shapes, make):
    tree = {}
    for path, shape in shapes.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = make(shape)
    return tree


def test_factors_fall_from_the_head_to_the_embeddings():
    factors = layer_factors(SHAPES, 0.5)
    for path, factor in factors.items():
        if path in ABOVE:
            assert factor == 1.0
        elif "layers" in path:
            assert factor.shape == (3, *[1] * (len(SHAPES[path]) - 1))
            assert factor.ravel().tolist() == [0.125, 0.25, 0.5]
        else:
            assert factor == 0.0625


def test_unrolled_layers_and_those_of_a_period_have_the_factors_of_stacked_ones():
    unrolled = layer_factors({f"decoder/layers_{i}/norm/scale": (4,) for i in range(12)}, 0.5)
    assert [unrolled[f"decoder/layers_{i}/norm/scale"] for i in (0, 9, 10, 11)] == [2**-12, 0.125, 0.25, 0.5]
    period = layer_factors({f"decoder/layers/period_{i}/norm/scale": (3, 4) for i in range(2)}, 0.5)
    assert period["decoder/layers/period_0/norm/scale"].ravel().tolist() == [2**-6, 2**-4, 2**-2]
    assert period["decoder/layers/period_1/norm/scale"].ravel().tolist() == [2**-5, 2**-3, 2**-1]


def test_encoder_and_decoder_are_counted_from_their_own_tops():
    shapes = {
        "decoder/layers/norm/scale": (1, 4),
        "decoder/relative_bias/embedding": (3, 2),
        "encoder/layers/norm/scale": (2, 4),
        "encoder/relative_bias/embedding": (3, 2),
        "output_head/kernel": (4, 7),
        "token_embedding/embedding": (7, 4),
    }
    factors = layer_factors(shapes, 0.5)
    assert [np.ravel(factor).tolist() for factor in factors.values()] == [
        [0.5],
        [0.25],
        [0.25, 0.5],
        [0.125],
        [1.0],
        [0.125],
    ]


def test_layers_that_share_their_parameters_have_no_rates_of_their_own():
    with pytest.raises(ValueError, match="layer_decay must be None"):
        layer_factors({"decoder/block/norm/scale": (4,)}, 0.5)
    with pytest.raises(ValueError, match="parameter decoder/other/kernel is of no layer"):
        layer_factors({"decoder/layers/norm/scale": (2, 4), "decoder/other/kernel": (4, 4)}, 0.5)


def updated(steps=2, **options):
    """Parameters before and after some updates with gradients that are all 1."""
    params = tree_of(SHAPES, lambda shape: jnp.ones(shape))
    optimizer, report = make_optimizer(
        learning_rate=0.25, params=params, weight_decay=0.5, clip_norm=None, b1=0.0, b2=0.0, epsilon=0.0, **options
    )
    state, after = optimizer.init(params), params
    for step in range(steps):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, after, step=jnp.int32(step))
        after = optax.apply_updates(after, updates)
    return params, after, report, state


def test_layer_decay_multiplies_the_rate_of_direction_and_weight_decay():
    _, after, _, _ = updated(steps=1, layer_decay=0.5)
    # direction 1, and of kernels half of the parameter more, at the rate 0.25 times the layer's factor.
    np.testing.assert_allclose(after["classifier"]["kernel"], 1 - 0.25 * 1.5, rtol=1e-6)
    kernel = after["encoder"]["layers"]["mlp"]["up"]["kernel"]
    for layer, factor in enumerate((0.125, 0.25, 0.5)):
        np.testing.assert_allclose(kernel[layer], 1 - 0.25 * factor * 1.5, rtol=1e-6)
    np.testing.assert_allclose(after["token_embedding"]["embedding"], 1 - 0.25 * 0.0625, rtol=1e-6)
    with pytest.raises(ValueError, match=r"layer_decay is 1\.5, must be above 0 and at most 1"):
        updated(layer_decay=1.5)


def test_head_only_leaves_every_bit_of_the_body_and_keeps_no_moments_of_it():
    before, after, report, state = updated(head_only=True)
    for name in ("encoder", "token_embedding", "token_type_embedding"):
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
    assert not np.any(after["classifier"]["kernel"] == 1.0)
    assert not np.any(after["pooler"]["bias"] == 1.0)
    assert list(report.decayed) == ["classifier/kernel"]
    moments = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sorted(moments) == [(4,), (4,), (4, 2), (4, 2)]


def test_head_only_clips_the_heads_gradient_alone():
    params = tree_of({"classifier/kernel": (2, 2), "token_embedding/embedding": (9, 2)}, lambda shape: jnp.ones(shape))
    optimizer, _ = make_optimizer(
        learning_rate=1.0,
        params=params,
        weight_decay=0.0,
        no_decay=(),
        clip_norm=1.0,
        b1=0.0,
        b2=0.0,
        epsilon=1.0,
        head_only=True,
    )
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params, step=0)
    # Four ones have norm 2: each is clipped to 1/2, and Adam makes 0.5 / (0.5 + 1) of it.
    np.testing.assert_allclose(updates["classifier"]["kernel"], -1 / 3, rtol=1e-6)


def test_a_model_without_a_head_cannot_learn_by_its_head_only():
    params = {"token_embedding": {"embedding": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match="head_only is True, but the model has none of the parts classifier"):
        make_optimizer(learning_rate=1.0, params=params, no_decay=(), head_only=True)
