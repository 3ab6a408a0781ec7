"""Models with experts: what equals the plain model, what padding and the future may not do, decoding, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.functional import cross_entropy
from jaxformer.models import SWITCH_SIZES, BlockInputs, Stack, TransformerConfig, gpt, switch, unstack_layers

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "max_length": 32, "init_stddev": 0.4}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_capacity_factor": 0.6}
OTHERS = ({"expert_dispatch": "einsum"}, {"expert_period": 2})


def tokens_of(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 1, SHAPE["vocab_size"])


@functools.lru_cache
def params_of(num_experts, activation="gelu_tanh", expert_period=1):
    """Parameters, which depend on these fields alone."""
    model = gpt(**SHAPE, num_experts=num_experts, activation=activation, expert_period=expert_period)
    return jax.jit(model.init)(jax.random.key(1), tokens_of(1, 4))["params"]


@functools.partial(jax.jit, static_argnums=0, static_argnames="deterministic")
def apply(model, params, tokens, deterministic=True, **kwargs):
    rngs = {} if deterministic else {"dropout": jax.random.key(2)}
    return model.apply({"params": params}, tokens, deterministic=deterministic, rngs=rngs, **kwargs)


def as_experts(mlp):
    """A plain layer's parameters (stacked over layers) as those of one expert, with a router."""
    experts = jax.tree.map(lambda leaf: leaf[:, None], mlp)
    return {"experts": experts, "router": {"kernel": jnp.ones((2, SHAPE["embed_dim"], 1))}}


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["sort", pytest.param("einsum", marks=pytest.mark.slow)])
def test_one_expert_is_the_plain_block(dispatch):
    plain = gpt(**SHAPE, activation="swiglu")
    single = gpt(**SHAPE, activation="swiglu", num_experts=1, expert_dispatch=dispatch, expert_capacity_factor=1.0)
    params, tokens = params_of(None, "swiglu"), tokens_of(2, 9)

    def rename(params):
        layers = params["decoder"]["layers"]
        layers = {**layers, "mlp": as_experts(layers["mlp"])}
        return {**params, "decoder": {**params["decoder"], "layers": layers}}

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params):
        def loss(params):
            logits = model.apply({"params": params}, tokens, deterministic=False).logits
            return cross_entropy(logits[:, :-1], tokens[:, 1:]).loss_sum, logits

        return jax.grad(loss, has_aux=True)(params)

    expected_gradients, expected = run(plain, params)
    gradients, logits = run(single, rename(params))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    expected_gradients = rename(expected_gradients)
    expected_gradients["decoder"]["layers"]["mlp"]["router"]["kernel"] *= 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-4), gradients, expected_gradients)


def test_padding_changes_neither_logits_nor_losses_nor_counts():
    """In training with a capacity that drops tokens; padding before them by mask, behind them by segment 0."""
    model, params, tokens = gpt(**SHAPE, **EXPERTS), params_of(4), tokens_of(2, 7)
    alone = apply(model, params, tokens, deterministic=False)
    assert (alone.aux.metrics["expert_overflow"][0] > 0).all()
    filled = jnp.pad(tokens, ((0, 0), (3, 2)), constant_values=5)
    place = jnp.broadcast_to(jnp.arange(12), (2, 12))
    given = {"key_mask": place >= 3, "segments": (place < 10).astype(jnp.int32), "positions": jnp.maximum(place - 3, 0)}
    padded = apply(model, params, filled, deterministic=False, **given)
    np.testing.assert_allclose(padded.logits[:, 3:10], alone.logits, atol=1e-4)
    for name, loss in alone.aux.losses.items():
        np.testing.assert_allclose(padded.aux.losses[name], loss, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, padded.aux.metrics, alone.aux.metrics)


def test_no_logit_depends_on_a_later_token_where_nothing_is_dropped():
    model, params, tokens = gpt(**SHAPE, **EXPERTS), params_of(4), tokens_of(1, 6)

    def third_token(delta):
        table = params["token_embedding"]["embedding"]
        # One private row per position makes the embedding of a position an independent input.
        rows = table[tokens[0]] + delta
        private = {**params, "token_embedding": {"embedding": jnp.concatenate([rows, table[6:]])}}
        hidden, _ = model.apply({"params": private}, jnp.arange(6)[None], method="hidden")
        return (hidden[0, 2] * jnp.arange(1.0, 13.0)).sum()

    influence = np.abs(jax.jit(jax.grad(third_token))(jnp.zeros((6, SHAPE["embed_dim"])))).sum(1)
    np.testing.assert_array_equal(influence[3:], 0.0)
    assert (influence[:3] > 0).all()


@pytest.mark.slow
def test_capacity_leaks_the_future_in_training_with_two_choices_and_only_there():
    """A later token's first choice takes the place of an earlier token's second."""
    params, tokens = params_of(4), tokens_of(1, 9)
    others = jnp.concatenate([tokens.at[:, -1].set(last) for last in range(13)])

    def leaks(**fields):
        model = gpt(**SHAPE, **{**EXPERTS, **fields})
        logits = apply(model, params, others, deterministic=False).logits[:, :-1]
        return bool(jnp.abs(logits - logits[:1]).max() > 1e-4)

    assert leaks()
    assert not leaks(experts_per_token=1)


@pytest.mark.parametrize("fields", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_cached_decoding_equals_the_full_pass(fields):
    model, tokens = gpt(**SHAPE, **EXPERTS, **fields), tokens_of(3, 7)
    params = params_of(4, expert_period=fields.get("expert_period", 1))
    cache, outputs = model.init_cache(3, 9), []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
        output = apply(model, params, tokens[:, start:stop], cache=cache)
        cache = output.aux.cache
        outputs.append(output.logits)
    decoded = jnp.concatenate(outputs, 1)
    np.testing.assert_allclose(decoded, apply(model, params, tokens).logits, atol=1e-4)


def test_experts_in_every_other_block_are_blocks_without_and_with_them_in_turn():
    """In training with a capacity, against stacks of one block."""
    config = gpt(**SHAPE, **EXPERTS, expert_period=2).config
    stacked = params_of(4, expert_period=2)["decoder"]["layers"]
    x = jax.random.normal(jax.random.key(2), (2, 9, SHAPE["embed_dim"]))

    def run(config, num_layers, params, x):
        stack = Stack(config, num_layers, causal=True)
        return stack.apply({"params": params}, x, BlockInputs(), deterministic=False)

    @jax.jit
    def compute(stacked, x):
        first, _ = run(gpt(**SHAPE).config, 1, {"layers": stacked["period_0"]}, x)
        second = run(gpt(**SHAPE, **EXPERTS).config, 1, {"layers": stacked["period_1"]}, first)
        return run(config, 2, {"layers": stacked}, x), second

    (out, aux), (expected, expected_aux) = compute(stacked, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert aux.losses["expert_balance"].shape == (1,), "of the one block that has experts"
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), aux, expected_aux)


def test_experts_and_attentions_take_turns_of_their_own():
    attentions = {"attention": ("local", "local", "dense"), "attention_args": {"local": {"window": 2}}}
    config = TransformerConfig(**{**SHAPE, "num_layers": 12}, **attentions, num_experts=2, expert_period=2)
    assert [choice.name for choice in config.attentions] == ["local", "local", "dense"] * 2
    assert config.mixtures == (False, True) * 3
    assert TransformerConfig(**SHAPE, num_experts=2).mixtures == (True,)
    assert TransformerConfig(**SHAPE).mixtures == (False,)


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 2])
def test_scanned_and_unrolled_stacks_agree_on_losses_counts_and_jitter(period):
    fields = {**EXPERTS, "router_jitter": 0.2, "expert_period": period}
    params, tokens = params_of(4, expert_period=period), tokens_of(2, 9)
    scanned = apply(gpt(**SHAPE, **fields), params, tokens, deterministic=False)
    separate = unstack_layers(params, period)
    unrolled = apply(gpt(**SHAPE, **fields, scan_layers=False), separate, tokens, deterministic=False)
    np.testing.assert_allclose(scanned.logits, unrolled.logits, atol=1e-4)
    for name in ("expert_balance", "router_z"):
        assert scanned.aux.losses[name].shape == (2 // period,)
        np.testing.assert_allclose(scanned.aux.losses[name], unrolled.aux.losses[name], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, scanned.aux.metrics, unrolled.aux.metrics)
    np.testing.assert_array_equal(scanned.aux.metrics["expert_overflow"][1], [36, 36][period - 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 2])
def test_a_reversible_stack_has_the_gradient_of_the_same_layers_kept(period):
    """Attention weights are returned by layers that are kept, so asking for them gives the plain gradient."""
    fields = {**EXPERTS, "router_jitter": 0.2, "mlp_dropout_rate": 0.2, "residual": "reversible"}
    model, tokens = gpt(**SHAPE, **fields, expert_period=period), tokens_of(2, 9)
    params = params_of(4, expert_period=period)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, return_weights):
        def loss(params):
            output = model.apply(
                {"params": params},
                tokens,
                deterministic=False,
                return_weights=return_weights,
                rngs={"dropout": jax.random.key(2)},
            )
            sums = cross_entropy(output.logits[:, :-1], tokens[:, 1:])
            return sums.loss_sum + sum(loss.sum() for loss in output.aux.losses.values()), output.aux

        return jax.grad(loss, has_aux=True)(params)

    (gradients, aux), (expected, expected_aux) = gradient(params, False), gradient(params, True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3, rtol=1e-4), gradients, expected)
    assert set(aux.losses) == {"expert_balance", "router_z"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), aux.losses, expected_aux.losses)
    jax.tree.map(np.testing.assert_array_equal, aux.metrics, expected_aux.metrics)


@pytest.mark.slow
def test_a_switch_model_learns_and_keeps_its_experts_busy():
    model = switch(**{**SHAPE, "num_layers": 1, "init_stddev": 0.1}, num_experts=4, expert_period=1)
    tokens = jnp.tile(tokens_of(4, 8), 3)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, index):
        def loss(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(3), index)}
            output = model.apply({"params": params}, tokens[:, :-1], deterministic=False, rngs=rngs)
            sums = cross_entropy(output.logits, tokens[:, 1:])
            mean = sums.loss_sum / sums.weight_sum
            return mean + sum(loss.sum() for loss in output.aux.losses.values()), (mean, output.aux)

        gradients, (mean, aux) = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, mean, aux

    state, means = optimizer.init(params), []
    for index in range(50):
        params, state, mean, aux = step(params, state, jnp.asarray(index))
        means.append(float(mean))
    assert means[-1] < means[0] / 2
    # Four experts' balance loss is between 1 (even) and 4 (one takes all).
    assert aux.losses["expert_balance"][0] / 0.01 < 1.6


def test_sizes_hold_what_their_names_say():
    def count(model):
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    expert = 2 * 768 * 3072 + 3072 + 768
    for period in (1, 2):
        assert count(switch("small_8", expert_period=period)) == 124_439_808 + 12 // period * (7 * expert + 768 * 8)
    assert switch("small_8").config.expert_period == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 2}, "experts_per_token=2 needs num_experts, which is None"),
        ({"router_jitter": 0.1}, "router_jitter=0.1 needs num_experts, which is None"),
        ({"expert_period": 2}, "expert_period=2 needs num_experts, which is None"),
        ({"num_experts": 2, "expert_period": 0}, "expert_period=0 must be an integer of at least 1"),
        ({"num_experts": 2, "expert_period": 3}, "num_layers=2 must be a multiple of expert_period=3"),
        ({"num_experts": 2, "expert_period": 2, "stack": "universal"}, "expert_period=2 needs stack='plain'"),
        ({"num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token is 3; it must be at most num_experts, 2"),
        ({"num_experts": 2, "expert_capacity_factor": -1.0}, "expert_capacity_factor is -1.0; it must be positive"),
        ({"num_experts": 2, "router_jitter": 1.0}, r"router_jitter=1.0 must be in \[0, 1\)"),
        ({"num_experts": 2, "balance_loss_weight": -0.1}, "balance_loss_weight=-0.1 must be finite and at least 0"),
        ({"num_experts": 2, "expert_dispatch": "hash"}, "expert_dispatch='hash' must be one of sort, einsum"),
        ({"num_experts": 2, "mlp_chunk_size": 4}, "mlp_chunk_size=4 can't be given with num_experts=2"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SHAPE, **fields)


def test_a_switch_model_needs_a_known_size_or_a_number_of_experts():
    with pytest.raises(ValueError, match=f"size='huge' must be one of {', '.join(SWITCH_SIZES)}"):
        switch("huge")
    with pytest.raises(ValueError, match="num_experts is None"):
        switch(**SHAPE)
