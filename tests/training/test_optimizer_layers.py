"""Optimizers and layers: stacked as unrolled, frozen ones, rates of their own, and what the state looks like."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

from jaxformer.models.stack_layout import stack_layers
from jaxformer.training.checkpoint_reading import from_dicts, to_dicts
from jaxformer.training.layer_rates import frozen_factors, pattern_factors
from jaxformer.training.optimizers import OPTIMIZERS, hyperparameters, is_matrix, make_optimizer
from jaxformer.training.parameter_paths import shapes_by_path, stack_axes
from jaxformer.training.sharding import MESH_AXES, state_shardings

NAMES = sorted(OPTIMIZERS)
LAYERS = 4
PERIOD = 2


def quick(*names):
    """All optimizers, of which only some in every run of the tests: each costs the compilation of its updates."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def drawn(seed):
    """Parameters, or gradients, of an unrolled stack whose every second layer has experts; layers differ in size."""
    draw = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.float32(draw.normal(size=shape))

    def layer(i):
        kernel = leaf(3, 4, 6) if i % PERIOD else leaf(4, 6)
        mlp = {"experts": {"up": {"kernel": kernel, "bias": leaf(3, 6)}}} if i % PERIOD else {"up": {"kernel": kernel}}
        return jax.tree.map(lambda x: x * 4.0**i, {"mlp": mlp, "norm": {"scale": leaf(4)}})

    decoder = {f"layers_{i}": layer(i) for i in range(LAYERS)}
    return {
        "decoder": {**decoder, "final_norm": {"scale": leaf(4)}},
        "output_head": {"kernel": leaf(4, 7)},
        "token_embedding": {"embedding": leaf(7, 4)},
    }


def options(name):
    """Makes small matrices large enough to be factored."""
    return {"smallest_factored": 2} if "smallest_factored" in hyperparameters(name) else {}


def trained(name, params, gradients, **given):
    optimizer, report = make_optimizer(name, learning_rate=0.25, params=params, **options(name), **given)

    def one(carry, step_and_gradient):
        (params, state), (step, gradient) = carry, step_and_gradient
        updates, state = optimizer.update(gradient, state, params, step=step)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, gradients):
        steps = jnp.arange(len(jax.tree.leaves(gradients)[0]))
        return jax.lax.scan(one, (params, optimizer.init(params)), (steps, gradients))[0]

    if not gradients:
        return params, optimizer.init(params), report
    params, state = run(params, jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients))
    return params, state, report


@pytest.mark.parametrize("name", quick("adafactor", "adamw", "muon"))
def test_stacked_layers_are_updated_as_unrolled_ones(name):
    given = {"clip_value": 2.0, "clip_adaptive": 0.3, "clip_norm": 5.0, "layer_decay": 0.5, "frozen_layers": 1}
    given |= {"rate_factors": (("norm", 0.5), ("head", 2.0))}
    trees = [drawn(seed) for seed in range(3)]
    unrolled, _, _ = trained(name, trees[0], trees[1:], **given)
    stacks = [stack_layers(tree, PERIOD) for tree in trees]
    assert "period_1" in stacks[0]["decoder"]["layers"]
    stacked, _, _ = trained(name, stacks[0], stacks[1:], **given)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6),
        stack_layers(unrolled, PERIOD),
        stacked,
    )


def test_layers_and_experts_are_told_from_the_parameters_own_axes():
    assert [stack_axes(path) for path in ("a/layers/k", "a/layers_3/k", "a/layers/period_1/experts/k", "k")] == [
        1,
        0,
        2,
        0,
    ]
    assert stack_axes("decoder/layers_1/mlp/experts/up/kernel") == 1


def test_muon_takes_the_bodys_matrices():
    params = stack_layers(drawn(0), PERIOD)
    shapes = shapes_by_path(params)
    assert [path for path in shapes if is_matrix(path, shapes[path])] == [
        "decoder/layers/period_0/mlp/up/kernel",
        "decoder/layers/period_1/mlp/experts/up/kernel",
    ]
    _, state, _ = trained("muon", params, [])
    # One moment of each matrix, two of every other parameter.
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 3)
    matrices = sum(int(np.prod(shapes[path])) for path in shapes if is_matrix(path, shapes[path]))
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    assert numbers == matrices + 2 * (total - matrices)


@pytest.mark.parametrize("name", quick("adamw"))
def test_frozen_layers_keep_every_bit(name):
    """Neither gradient nor decay moves them, and their gradients count in no norm."""
    params = stack_layers(drawn(0), PERIOD)
    gradients = [stack_layers(drawn(seed), PERIOD) for seed in (1, 2)]
    after, state, report = trained(name, params, gradients, frozen_layers=3)
    layers, learned = params["decoder"]["layers"], after["decoder"]["layers"]
    np.testing.assert_array_equal(params["token_embedding"]["embedding"], after["token_embedding"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, layers["period_0"], learned["period_0"])
    for before, now in zip(jax.tree.leaves(layers["period_1"]), jax.tree.leaves(learned["period_1"])):
        np.testing.assert_array_equal(before[0], now[0])
        assert np.any(before[1] != now[1])
    assert report.frozen["decoder/layers/period_1/norm/scale"] == (1, 4)
    assert report.frozen["token_embedding/embedding"] == (7, 4)
    assert "decoder/layers/period_0/mlp/up/kernel" not in report.decayed
    # What is frozen as a whole has no moments.
    assert not any("period_0" in path or "embedding" in path for path in shapes_by_path(state))
    scaled = [jax.tree.map(lambda leaf: leaf, gradient) for gradient in gradients]
    for gradient in scaled:
        gradient["token_embedding"]["embedding"] *= 100.0
        gradient["decoder"]["layers"]["period_1"]["norm"]["scale"] *= jnp.float32([[100.0], [1.0]])
    again, _, _ = trained(name, params, scaled, frozen_layers=3)
    jax.tree.map(np.testing.assert_array_equal, after, again)


def test_frozen_layers_survive_an_epsilon_of_0():
    params = stack_layers(drawn(0), PERIOD)
    after, _, _ = trained("adamw", params, [stack_layers(drawn(1), PERIOD)], frozen_layers=1, epsilon=0.0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))


SHAPES = {
    "classifier/kernel": (4, 2),
    "decoder/final_norm/scale": (4,),
    "decoder/layers/norm/scale": (3, 4),
    "decoder/relative_bias/embedding": (5, 4),
    "encoder/layers_0/norm/scale": (4,),
    "encoder/layers_1/norm/scale": (4,),
    "token_embedding/embedding": (7, 4),
}


def test_frozen_layers_are_counted_from_the_bottom_of_each_side():
    def factors(count):
        return [np.ravel(factor).tolist() for factor in frozen_factors(SHAPES, count).values()]

    assert factors(0) == [[1], [1], [1, 1, 1], [0], [1], [1], [0]]
    assert factors(1) == [[1], [1], [0, 1, 1], [0], [0], [1], [0]]
    assert factors(3) == [[1], [1], [0, 0, 0], [0], [0], [0], [0]]
    with pytest.raises(ValueError, match=r"frozen_layers is 4, must be in \[0, 3\]"):
        frozen_factors(SHAPES, 4)
    with pytest.raises(ValueError, match="frozen_layers must be None for a model whose layers have no parameters"):
        frozen_factors({"decoder/block/norm/scale": (4,)}, 1)


def test_the_first_pattern_that_finds_a_path_gives_its_rate():
    factors = pattern_factors(SHAPES, (("encoder", 0.5), ("scale$", 0.1), ("token", 0.0)))
    assert list(factors.values()) == [1.0, 0.1, 0.1, 1.0, 0.5, 0.5, 0.0]
    for bad, message in (
        ((("nothing", 0.5),), "rate_factors pattern 'nothing' matches no parameter"),
        ((("scale", -0.5),), "rate_factors has factor -0.5 for 'scale', must be at least 0"),
        (("scale", 0.5), "rate_factors has 'scale', must be pairs"),
        ((("scale", None),), r"rate_factors has \('scale', None\), must be pairs"),
        ((("(", 0.5),), r"rate_factors pattern '\(' is not a regular expression"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(pattern_factors)(SHAPES, bad)  # without the tests' check of types


def test_rates_by_pattern_multiply_direction_and_decay():
    params = {"a": {"kernel": jnp.full((2, 2), 2.0)}, "b": {"kernel": jnp.full((2, 2), 2.0)}}
    gradient = jax.tree.map(jnp.ones_like, params)
    given = {"no_decay": (), "clip_norm": None, "weight_decay": 0.5, "rate_factors": (("b/", 0.5),)}
    after, _, _ = trained("sgd", params, [gradient], **given)
    np.testing.assert_allclose(after["a"]["kernel"], 2 - 0.25 * (1 + 1))
    np.testing.assert_allclose(after["b"]["kernel"], 2 - 0.125 * (1 + 1))
    with pytest.raises(ValueError, match="leave no parameter that learns"):
        trained("sgd", params, [], no_decay=(), rate_factors=((".", 0.0),))


@pytest.mark.parametrize("name", NAMES)
def test_states_are_laid_out_like_their_parameters_and_survive_a_checkpoint(name):
    params = stack_layers(drawn(0), PERIOD)
    _, state, _ = trained(name, params, [])
    back = from_dicts(to_dicts(state), state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    mesh = AbstractMesh((1, 2, 2, 1), MESH_AXES)
    shardings, _ = state_shardings({"params": params, "opt_state": state}, mesh)
    of_params, of_moments = _by_path(shardings["params"]), _by_path(shardings["opt_state"])
    for path, leaf in _by_path(state).items():
        owner = next((name for name in of_params if path.endswith(name)), None)
        if owner is None:  # a count, or a factored moment
            assert of_moments[path].is_fully_replicated
        else:
            assert leaf.shape == shapes_by_path(params)[owner]
            assert of_moments[path].spec == of_params[owner].spec


def _by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_may_be_traced(name):
    """Runs that differ in them alone are one program; whether they are 0 changes no structure."""
    params = {"layers_0": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    numbers = {key: value for key, value in hyperparameters(name).items() if isinstance(value, float)}

    def run(numbers, clip):
        clips = dict.fromkeys(("clip_norm", "clip_value", "clip_adaptive"), clip)
        after, state, _ = trained(name, params, [params], no_decay=("bias",), **numbers, **clips)
        return after, state

    together = jax.tree.map(lambda value: jnp.full(2, value), (numbers, 1.0))
    after, state = jax.eval_shape(jax.vmap(run), *together)
    assert jax.tree.map(lambda leaf: leaf.shape[1:], after) == jax.tree.map(jnp.shape, params)
    zeros = dict.fromkeys(numbers, 0.0) | {
        key: 1.0 for key in ("clip_update", "decay_exponent", "smallest_scale") if key in numbers
    }
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(lambda: run(zeros, 1.0))[1])
