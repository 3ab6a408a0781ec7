"""Optimizers: updates against the papers' formulas in float64, and what weight decay touches."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models import MODELS
from jaxformer.training.optimizers import DecayReport, decay_report, make_optimizer, scale_by_rate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import abstract_params

UNROLLED = {
    "token_embedding": {"embedding": jnp.ones((7, 3))},
    "layers_0": {"norm": {"scale": jnp.ones(3)}, "up": {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)}},
    "relative_bias_embedding": jnp.ones((4, 2)),
}
STACKED = UNROLLED | {
    "layers": {"norm": {"scale": jnp.ones((2, 3))}, "up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))}}
}


def reference_adamw(params, gradients, *, rate, b1, b2, epsilon, weight_decay, clip_norm):
    """AdamW of the papers in float64, one list of arrays a step; returns the parameters after every step."""
    params = [np.asarray(leaf, np.float64) for leaf in params]
    first, second = [np.zeros_like(leaf) for leaf in params], [np.zeros_like(leaf) for leaf in params]
    history = []
    for count, step_gradients in enumerate(gradients, start=1):
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in step_gradients))
        for i, gradient in enumerate(step_gradients):
            gradient = gradient * min(1.0, clip_norm / norm)
            first[i] = b1 * first[i] + (1 - b1) * gradient
            second[i] = b2 * second[i] + (1 - b2) * gradient**2
            direction = first[i] / (1 - b1**count) / (np.sqrt(second[i] / (1 - b2**count)) + epsilon)
            params[i] = params[i] - rate(count - 1) * (direction + weight_decay[i] * params[i])
        history.append([leaf.copy() for leaf in params])
    return history


def test_adamw_equals_the_paper_for_three_updates():
    draw = np.random.default_rng(0)
    params = {"a": {"bias": draw.normal(size=5)}, "b": {"kernel": draw.normal(size=(5, 3))}}
    gradients = [[draw.normal(size=5), draw.normal(size=(5, 3))] for _ in range(3)]
    schedule = make_schedule("linear", learning_rate=0.3, decay_steps=4)
    constants = {"b1": 0.8, "b2": 0.9, "epsilon": 1e-2, "clip_norm": 2.5}
    expected = reference_adamw(
        jax.tree.leaves(params), gradients, rate=lambda step: 0.3 * (1 - step / 4), weight_decay=[0.0, 0.2], **constants
    )
    optimizer, _ = make_optimizer(
        "adamw", learning_rate=schedule, params=params, weight_decay=0.2, no_decay=("bias",), **constants
    )
    params = jax.tree.map(jnp.float32, params)
    state = optimizer.init(params)
    for step in range(3):
        tree = jax.tree.unflatten(jax.tree.structure(params), [jnp.float32(leaf) for leaf in gradients[step]])
        updates, state = optimizer.update(tree, state, params, step=jnp.int32(step))
        params = optax.apply_updates(params, updates)
        for leaf, reference in zip(jax.tree.leaves(params), expected[step]):
            np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-6)


def test_without_decay_and_clipping_it_is_adam_as_the_transformer_was_trained():
    """Vaswani et al. 2017, section 5.3."""
    draw = np.random.default_rng(1)
    constants = {"b1": 0.9, "b2": 0.98, "epsilon": 1e-9}
    start = draw.normal(size=5)
    gradients = [[draw.normal(size=5)] for _ in range(3)]
    schedule = make_schedule("inverse_sqrt", learning_rate=1.0, warmup_steps=2, embed_dim=16)
    rates = [0.0, 2**-1.5 / 4, 2**-0.5 / 4]
    expected = reference_adamw(
        [start], gradients, rate=rates.__getitem__, weight_decay=[0.0], clip_norm=math.inf, **constants
    )
    params = {"kernel": jnp.float32(start)}
    optimizer, _ = make_optimizer(
        learning_rate=schedule, params=params, weight_decay=0.0, no_decay=(), clip_norm=None, **constants
    )
    state = optimizer.init(params)
    for step, (gradient,) in enumerate(gradients):
        updates, state = optimizer.update({"kernel": jnp.float32(gradient)}, state, params, step=jnp.int32(step))
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["kernel"], expected[step][0], rtol=1e-5)


@pytest.mark.parametrize("tree", [pytest.param(UNROLLED, marks=pytest.mark.slow), STACKED], ids=["unrolled", "stacked"])
def test_zero_gradient_step_shrinks_kernels_alone(tree):
    optimizer, report = make_optimizer(learning_rate=0.01, params=tree, weight_decay=0.1)
    gradients = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = optimizer.update(gradients, optimizer.init(tree), tree, step=jnp.int32(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(optax.apply_updates(tree, updates)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("kernel"):
            np.testing.assert_allclose(leaf, 0.999, rtol=1e-6)
            assert name in report.decayed
        else:
            np.testing.assert_array_equal(leaf, 1.0)
            assert name in report.excluded


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"positions": "relative", "norm": "rms", "use_bias": False},
        {"positions": "rotary", "activation": "swiglu", "tie_embeddings": False, "num_kv_heads": 1},
        {"scan_layers": False, "norm_placement": "post"},
    ],
    ids=lambda fields: ",".join(fields) or "gpt2",
)
def test_models_decay_their_kernels_and_nothing_else(fields):
    params = abstract_params(MODELS["gpt"]("tiny", **fields), {"tokens": jnp.zeros((2, 5), jnp.int32)})
    report = make_optimizer(learning_rate=0.1, params=params)[1]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert set(report.decayed) == {name for name in names if name.rsplit("/", 1)[-1] == "kernel"}
    assert set(report.excluded) == set(names) - set(report.decayed)
    assert any("embedding" in name for name in report.excluded)


def test_without_decay_or_clipping_nothing_else_moves_parameters():
    optimizer, _ = make_optimizer(learning_rate=0.01, params=UNROLLED, weight_decay=0.0, clip_norm=None)
    gradients = jax.tree.map(jnp.zeros_like, UNROLLED)
    updates, _ = optimizer.update(gradients, optimizer.init(UNROLLED), UNROLLED, step=jnp.int32(0))
    assert all(not leaf.any() for leaf in jax.tree.leaves(updates))


def test_report_lists_every_parameter_once_with_its_shape():
    report = decay_report(UNROLLED)
    assert report.decayed == {"layers_0/up/kernel": (3, 5)}
    assert report.excluded == {
        "layers_0/norm/scale": (3,),
        "layers_0/up/bias": (5,),
        "relative_bias_embedding": (4, 2),
        "token_embedding/embedding": (7, 3),
    }
    assert report.summary().splitlines() == [
        "weight decay (15 parameters): layers_0/up/kernel",
        "no weight decay (37 parameters): "
        "layers_0/norm/scale, layers_0/up/bias, relative_bias_embedding, token_embedding/embedding",
    ]


def test_empty_pattern_list_decays_everything():
    report = decay_report(UNROLLED, ())
    assert isinstance(report, DecayReport)
    assert len(report.decayed) == 5
    assert report.summary().endswith("none")


def test_pattern_that_matches_nothing_is_refused_with_the_paths():
    with pytest.raises(ValueError, match=r"'weight\$' matches no parameter; there are: layers_0/norm/scale, "):
        make_optimizer(learning_rate=0.1, params=UNROLLED, no_decay=("bias$", "weight$"))


def test_rate_of_a_step_is_the_schedules_value_there():
    schedule = make_schedule("constant", learning_rate=1e-3, warmup_steps=10)
    optimizer = scale_by_rate(schedule)
    for step in range(12):
        updates, _ = optimizer.update({"w": jnp.ones(())}, optimizer.init({}), step=jnp.int32(step))
        assert float(updates["w"]) == -float(schedule(step))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"name": "adamv"}, "optimizer name is 'adamv', must be one of"),
        ({"b1": 1.0}, "b1 is 1.0"),
        ({"b2": -0.1}, "b2 is -0.1"),
        ({"epsilon": -1e-8}, "epsilon is -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"weight_decay": float("inf")}, "weight_decay is inf, must be at least 0 and finite"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
    ],
)
def test_bad_values_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**({"learning_rate": 0.1, "params": UNROLLED} | bad))


@pytest.mark.parametrize("pattern", ["(", "*bias", 3])
def test_malformed_pattern_is_refused_as_a_config_error(pattern):
    with pytest.raises(ConfigError, match=r"no_decay pattern .* is not a regular expression"):
        inspect.unwrap(decay_report)(UNROLLED, ["bias", pattern])  # without the tests' check of types
