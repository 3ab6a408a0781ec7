"""Batch norm as a layer: the batch's statistics in training, running averages otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import BatchNorm, FeedForward, make_norm_layer

MASK = jnp.asarray([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)


@pytest.fixture
def x(rng):
    return 3 * jax.random.normal(rng, (2, 5, 7)) + 2


@functools.partial(jax.jit, static_argnums=(0, 4))
def train(layer, variables, x, mask, deterministic=False):
    """Output, and the state after it."""
    return layer.apply(variables, x, mask=mask, deterministic=deterministic, mutable=["state"])


def init(layer, x):
    return jax.jit(layer.init)(jax.random.key(0), x)


def test_three_steps_and_an_evaluation_by_hand(x):
    """Against a loop in float64: batch statistics normalise, running ones follow and are used afterwards."""
    layer = BatchNorm(momentum=0.7, epsilon=1e-3)
    variables = init(layer, x)
    mean, variance = np.zeros(7), np.ones(7)
    for step in range(3):
        batch = x * (step + 1)
        y, changed = train(layer, variables, batch, MASK)
        tokens = np.float64(batch)[np.asarray(MASK)]
        wanted = (tokens - tokens.mean(0)) / np.sqrt(tokens.var(0) + 1e-3)
        np.testing.assert_allclose(y[np.asarray(MASK)], wanted, atol=1e-5)
        mean = 0.7 * mean + 0.3 * tokens.mean(0)
        variance = 0.7 * variance + 0.3 * tokens.var(0, ddof=1)
        variables = {**variables, **changed}
    np.testing.assert_allclose(variables["state"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(variables["state"]["variance"], variance, rtol=1e-5)
    y, changed = train(layer, variables, x, None, True)
    np.testing.assert_allclose(y, (np.float64(x) - mean) / np.sqrt(variance + 1e-3), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, changed["state"], variables["state"])


def test_state_that_is_not_mutable_stays(x):
    layer = BatchNorm()
    variables = init(layer, x)
    y = layer.apply(variables, x, mask=MASK, deterministic=False)
    np.testing.assert_allclose(y, train(layer, variables, x, MASK)[0], atol=1e-5)


def test_averages_are_float32_beside_narrow_parameters(x):
    layer = BatchNorm(param_dtype=jnp.bfloat16)
    variables = init(layer, x.astype(jnp.bfloat16))
    assert variables["params"]["scale"].dtype == jnp.bfloat16
    y, changed = train(layer, variables, x.astype(jnp.bfloat16), MASK)
    assert y.dtype == jnp.bfloat16
    assert changed["state"]["mean"].dtype == changed["state"]["variance"].dtype == jnp.float32


def feed_forward(**fields):
    return FeedForward(mlp_dim=11, kernel_init=jax.nn.initializers.normal(1.0), **fields)


def hidden_in_float64(params, x, activation, norm, placement, gated):
    """The formula, from numpy arrays."""
    up, gate, down = (params.get(name) for name in ("up", "gate", "down"))
    raised = x @ up["kernel"] + up["bias"]
    read = x @ gate["kernel"] + gate["bias"] if gated else raised
    hidden = activation(norm(read) if placement == "before" else read)
    hidden = hidden * raised if gated else hidden
    return (norm(hidden) if placement == "after" else hidden) @ down["kernel"] + down["bias"]


def swish(x):
    return x / (1 + np.exp(-x))


def made(norm, activation):
    """Parameters and state by hand, which takes no compilation."""
    draw = np.random.default_rng(0).normal
    shapes = {"up": (7, 11), "gate": (7, 11), "down": (11, 7)}
    if activation == "relu":
        del shapes["gate"]
    params = {name: {"kernel": draw(size=shape), "bias": draw(size=shape[1])} for name, shape in shapes.items()}
    params["norm"] = {"scale": np.linspace(0.5, 2.0, 11)} | ({} if norm == "rms" else {"bias": np.zeros(11)})
    state = {"state": {"norm": {"mean": np.zeros(11), "variance": np.ones(11)}}} if norm == "batch" else {}
    return jax.tree.map(np.float32, {"params": params, **state})


CASES = [
    ("layer", "relu", "before"),
    ("layer", "swiglu", "after"),
    ("rms", "swiglu", "before"),
    ("batch", "relu", "after"),
    ("batch", "swiglu", "before"),
    pytest.param("rms", "relu", "after", marks=pytest.mark.slow),
    pytest.param("batch", "relu", "before", marks=pytest.mark.slow),
    pytest.param("batch", "swiglu", "after", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("norm", "activation", "placement"), CASES)
def test_hidden_norm_stands_before_or_after_the_activation(x, norm, activation, placement):
    layer = feed_forward(activation=activation, norm=norm, norm_placement=placement, norm_epsilon=1e-3)
    variables = made(norm, activation)
    params = jax.tree.map(np.float64, variables["params"])
    scale = params["norm"]["scale"]

    def normalise(x):
        axes = (0, 1) if norm == "batch" else -1
        centred = x if norm == "rms" else x - x.mean(axes, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-3) * scale

    gated = activation == "swiglu"
    function = swish if gated else lambda x: np.maximum(x, 0.0)
    wanted = hidden_in_float64(params, np.float64(x), function, normalise, placement, gated)
    y, changed = train(layer, variables, x, None)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    assert set(changed) == ({"state"} if norm == "batch" else set())
    if norm == "batch":
        assert all(
            (new != old).any() for new, old in zip(*map(jax.tree.leaves, (changed, {"state": variables["state"]})))
        )


def test_initialisation_declares_what_the_norm_needs(x):
    shapes = jax.eval_shape(feed_forward(norm="batch").init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, shapes["state"]) == {"norm": {"mean": (11,), "variance": (11,)}}
    assert jax.tree.structure(shapes) == jax.tree.structure(made("batch", "relu"))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=(1, 2), has_aux=True)
def loss(layer, params, x, state, mask):
    y, changed = layer.apply({"params": params, "state": state}, x, mask=mask, deterministic=False, mutable=["state"])
    return jnp.where(mask[..., None], jnp.sin(y), 0).sum(), (y, changed)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["before", "after"])
def test_padding_changes_neither_outputs_nor_gradients_nor_state(x, placement):
    layer = feed_forward(activation="relu", norm="batch", norm_placement=placement)
    variables = made("batch", "relu")
    results = [
        loss(layer, variables["params"], values, variables["state"], jnp.pad(MASK, ((0, 0), (0, more))))
        for more, values in ((0, x), (3, jnp.pad(jnp.where(MASK[..., None], x, 50), ((0, 0), (0, 3), (0, 0)))))
    ]
    ((_, (y, state)), (gradient, input_gradient)), ((_, (more, other)), (further, input_further)) = results
    np.testing.assert_allclose(more[:, :5][MASK], y[MASK], atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), other, state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), further, gradient)
    np.testing.assert_allclose(input_further[:, :5], input_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_norms_of_single_tokens_go_by_chunks(x, placement):
    whole = feed_forward(activation="swiglu", norm="layer", norm_placement=placement)
    variables = made("layer", "swiglu")
    chunked = feed_forward(activation="swiglu", norm="layer", norm_placement=placement, chunk_size=2)
    np.testing.assert_allclose(
        train(chunked, variables, x, None)[0], train(whole, variables, x, None)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: feed_forward(norm="batch", chunk_size=2), "chunk_size=2 can't be with norm='batch'"),
        (lambda: feed_forward(norm="layer", norm_placement="beside"), "norm_placement='beside' must be one of before"),
        (lambda: feed_forward(norm="bach"), "norm='bach' must be one of layer, rms, batch"),
    ],
)
def test_bad_settings_are_refused_by_name(x, call, message):
    with pytest.raises(ValueError, match=message):
        call().init(jax.random.key(0), x)


def test_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm='group' must be one of layer, rms, batch"):
        make_norm_layer("group", epsilon=1e-5, momentum=0.9, use_bias=True, param_dtype=jnp.float32)
