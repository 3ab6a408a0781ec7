"""The mixture of experts as a layer: plain layers as oracle, what training changes, and what it returns by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import FeedForward, MixtureOfExperts
from jaxformer.layers.mixture_of_experts import StackedProjection

FIELDS = {"num_experts": 3, "mlp_dim": 7, "kernel_init": jax.nn.initializers.normal(1.0)}


def inputs(batch=2, length=11, width=5):
    return jax.random.normal(jax.random.key(3), (batch, length, width))


@functools.lru_cache
def params_of(**fields):
    """Parameters, whose biases are not zero and differ."""
    params = jax.jit(MixtureOfExperts(**FIELDS, **fields).init)(jax.random.key(0), inputs())["params"]
    noise = np.asarray(jax.random.normal(jax.random.key(4), (64,)))
    return jax.tree.map(lambda leaf: leaf + 0.1 * np.resize(noise, leaf.shape), params)


def layer_and_params(activation="gelu_tanh", shared_expert=False, **fields):
    """A layer and parameters that depend on these two fields alone."""
    structure = {"activation": activation, "shared_expert": shared_expert}
    return MixtureOfExperts(**FIELDS, **structure, **fields), params_of(**structure)


@functools.partial(jax.jit, static_argnames=("layer", "deterministic"))
def apply(layer, params, x, key_mask=None, deterministic=True, seed=1):
    rngs = {} if deterministic else {"dropout": jax.random.key(seed)}
    return layer.apply({"params": params}, x, key_mask=key_mask, deterministic=deterministic, rngs=rngs)


@pytest.mark.parametrize("dispatch", ["sort", pytest.param("einsum", marks=pytest.mark.slow)])
def test_each_token_gets_the_weighted_sum_of_its_experts_alone(dispatch):
    activation = "swiglu"
    layer, params = layer_and_params(
        activation=activation, dispatch=dispatch, experts_per_token=2, capacity_factor=0.5, shared_expert=True
    )
    x, plain = inputs(), FeedForward(mlp_dim=7, activation=activation)
    probabilities = np.asarray(jax.nn.softmax(jnp.einsum("btd,de->bte", x, params["router"]["kernel"])))
    each = [plain.apply({"params": jax.tree.map(lambda leaf, e=e: leaf[e], params["experts"])}, x) for e in range(3)]
    least = probabilities.argmin(-1)
    gates = np.where(np.arange(3) == least[..., None], 0.0, probabilities)
    gates /= gates.sum(-1, keepdims=True)
    expected = sum(gates[..., e, None] * each[e] for e in range(3)) + plain.apply({"params": params["shared"]}, x)
    np.testing.assert_allclose(apply(layer, params, x).output, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [0.6, pytest.param(None, marks=pytest.mark.slow)])
def test_dispatches_agree_in_training_with_dropout_and_jitter(capacity_factor):
    fields = {"experts_per_token": 2, "dropout_rate": 0.4, "router_jitter": 0.1, "capacity_factor": capacity_factor}
    sort, params = layer_and_params(**fields)
    einsum, _ = layer_and_params(**fields, dispatch="einsum")
    mask = jnp.arange(11)[None] >= jnp.array([[0], [3]])

    @functools.partial(jax.jit, static_argnums=0)
    def run(layer, params):
        def loss(params):
            out = apply(layer, params, inputs(), mask, deterministic=False)
            return (out.output**2).sum() + sum(out.losses.values()), out

        return jax.grad(loss, has_aux=True)(params)

    (gradients, out), (others, other) = run(sort, params), run(einsum, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), out, other)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-5), gradients, others)
    assert set(out.losses) == {"expert_balance", "router_z"}
    dropped, chosen = out.metrics["expert_overflow"]
    assert chosen == 2 * (11 + 8)
    assert (dropped > 0) == (capacity_factor is not None)
    assert (out.output[1, :3] == 0).all()
    assert (jnp.abs(gradients["router"]["kernel"]) > 0).all()


def test_evaluation_drops_nothing_and_draws_nothing():
    layer, params = layer_and_params(capacity_factor=0.4, dropout_rate=0.5, router_jitter=0.5)
    x = inputs()
    out = apply(layer, params, x)
    assert out.metrics["expert_overflow"] == (0, 22)
    training = [apply(layer, params, x, deterministic=False, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(training[0].output, training[1].output)
    assert (training[0].output != training[2].output).any()
    assert (training[0].losses["expert_balance"] != training[2].losses["expert_balance"]).any(), "jitter is drawn"
    assert training[0].metrics["expert_overflow"][0] > 0
    # A token alone gives what it gives among others.
    np.testing.assert_allclose(apply(layer, params, x[1:, 4:5]).output, out.output[1:, 4:5], atol=1e-5)


@pytest.mark.slow
def test_losses_carry_their_weights_and_can_be_left_out():
    x = inputs()
    layer, params = layer_and_params(balance_loss_weight=1.0, router_z_loss_weight=1.0)
    part_of, _ = layer_and_params(balance_loss_weight=0.5, router_z_loss_weight=0.25)
    whole, part = apply(layer, params, x).losses, apply(part_of, params, x).losses
    np.testing.assert_allclose(part["expert_balance"], 0.5 * whole["expert_balance"], rtol=1e-6)
    np.testing.assert_allclose(part["router_z"], 0.25 * whole["router_z"], rtol=1e-6)
    without, _ = layer_and_params(balance_loss_weight=0.0, router_z_loss_weight=0.0)
    assert apply(without, params, x).losses == {}


@pytest.mark.slow
def test_bfloat16_experts_keep_a_float32_router():
    layer, params = layer_and_params(experts_per_token=2)
    low, _ = layer_and_params(experts_per_token=2, dtype=jnp.bfloat16)
    x = inputs().astype(jnp.bfloat16)
    out, expected = apply(low, params, x), apply(layer, params, x)
    assert out.output.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.losses["router_z"], expected.losses["router_z"], rtol=1e-6)
    scale = jnp.abs(expected.output).max()
    np.testing.assert_allclose(out.output.astype(jnp.float32) / scale, expected.output / scale, atol=0.02)


def test_experts_are_drawn_apart_at_the_scale_of_one():
    init = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    layer = StackedProjection(4, 16, 48, False, jnp.float32, init)
    kernel = layer.init(jax.random.key(0))["params"]["kernel"]
    assert kernel.shape == (4, 16, 48)
    np.testing.assert_allclose(kernel.std((1, 2)), [(1 / 32) ** 0.5] * 4, rtol=0.1)
    assert len(np.unique(kernel[:, 0, 0])) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 4}, "experts_per_token is 4; it must be at most num_experts, 3"),
        ({"capacity_factor": 0.0}, "expert_capacity_factor is 0.0; it must be positive"),
        ({"dispatch": "hash"}, "dispatch='hash' must be one of sort, einsum"),
        ({"activation": "gelou"}, "activation='gelou' must be one of .*gelu_tanh"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(**{**FIELDS, **fields}).init(jax.random.key(0), inputs())
