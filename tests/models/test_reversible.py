"""Reversible stacks: gradients, decoding, causality, state and memory, against the same loop differentiated by JAX.

With ``return_weights`` the two streams go through a plain loop whose gradients JAX derives: that is the oracle here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models import BlockInputs, Stack, Transformer, TransformerConfig, gpt, stack_layers, unstack_layers

SHAPE = {"vocab_size": 13, "embed_dim": 12, "num_heads": 3, "max_length": 32, "init_stddev": 0.3}
DROPOUT = {"dropout_rate": 0.2, "attention_dropout_rate": 0.3, "mlp_dropout_rate": 0.1}
RNGS = {"dropout": jax.random.key(7)}


def tokens_like(batch=2, length=7, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 13, (batch, length)))


def init(model, *args, **kwargs):
    return jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(1))


@functools.partial(jax.jit, static_argnames=("model", "return_weights"))
def gradients(model, variables, tokens, return_weights=False, **inputs):
    """(loss, what came out), gradient; in training, with dropout."""
    params, state = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}

    def loss(params):
        output, changed = model.apply(
            {"params": params, **state},
            tokens,
            **inputs,
            deterministic=False,
            return_weights=return_weights,
            rngs=RNGS,
            mutable=["state"],
        )
        weight = jnp.cos(jnp.arange(output.logits.size, dtype=jnp.float32)).reshape(output.logits.shape)
        total = (jax.nn.log_softmax(output.logits) * weight).sum()
        total = total + 3 * sum((jnp.sum(one) for one in output.aux.losses.values()), jnp.zeros(()))
        return total, (output.aux._replace(weights={}), changed)

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_close(found, wanted, tolerance):
    """Relative to the largest entry of a leaf, and at least to a thousandth of the largest of all."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert float(jnp.abs(a - b).max()) <= tolerance * max(float(jnp.abs(b).max()), 1e-3 * largest)


def assert_equal_to_the_plain_loop(model, variables, tokens, **inputs):
    (value, out), found = gradients(model, variables, tokens, **inputs)
    (wanted_value, wanted_out), wanted = gradients(model, variables, tokens, return_weights=True, **inputs)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert_close(found, wanted, 1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), out, wanted_out)
    return out, found


def small(**fields):
    # Without biases: the gradient of keys' biases is zero but for rounding, which has no relative error.
    return gpt(**{**SHAPE, **DROPOUT, "num_layers": 2, "residual": "reversible", "use_bias": False, **fields})


@pytest.mark.slow
def test_gradients_with_dropout_are_those_of_the_plain_loop():
    model, tokens = small(), tokens_like()
    variables = init(model, tokens)
    assert_equal_to_the_plain_loop(model, variables, tokens)


def test_parameters_are_those_of_the_plain_stack():
    model, tokens = small(), tokens_like()
    plain = model.clone(config=dataclasses.replace(model.config, residual="plain"))
    jax.tree.map(np.testing.assert_array_equal, init(model, tokens), init(plain, tokens))


@pytest.mark.slow
def test_scanned_and_unrolled_agree_with_dropout():
    model, tokens = small(), tokens_like()
    variables = init(model, tokens)
    unrolled = model.clone(config=dataclasses.replace(model.config, scan_layers=False))
    (value, _), found = gradients(model, variables, tokens)
    (other_value, _), other = gradients(unrolled, {"params": unstack_layers(variables["params"])}, tokens)
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    assert_close(stack_layers(other), found, 1e-5)


def test_one_layer_by_hand():
    """y1 = x + F(x) and y2 = x + G(y1), from plain stacks of which one sub-layer gives nothing."""
    config = small(num_layers=1).config
    plain = dataclasses.replace(config, residual="plain")
    x = jax.random.normal(jax.random.key(2), (2, 5, 12))
    params = init(Stack(config, 1, causal=True), x, BlockInputs())["params"]

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def run(config, x, silent=None):
        layers = {
            name: jax.tree.map(jnp.zeros_like, part) if name == silent else part
            for name, part in params["layers"].items()
        }
        return Stack(config, 1, causal=True).apply({"params": {"layers": layers}}, x, BlockInputs())[0]

    first = run(plain, x, silent="mlp")
    second = x + run(plain, first, silent="attention") - first
    np.testing.assert_allclose(run(config, x), (first + second) / 2, atol=1e-5)
    wide = dataclasses.replace(config, residual_merge="concatenate", tie_embeddings=False)
    np.testing.assert_allclose(run(wide, x), jnp.concatenate([first, second], -1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["lsh", ("lsh", "local")])
def test_lsh_hashes_alike_in_the_recomputation_with_dropout_and_padding(attention):
    args = {"num_hashes": 2, "num_buckets": 4, "chunk_size": 4}
    if attention != "lsh":
        args = {"lsh": args, "local": {"window": 2}}
    layers = 2 if attention == "lsh" else 4
    model = small(attention=attention, attention_args=args, attention_dropout_rate=0.0, num_layers=layers)
    tokens = tokens_like(length=11)
    mask = jnp.arange(11)[None] < jnp.asarray([[11], [8]])
    assert_equal_to_the_plain_loop(model, init(model, tokens), tokens, key_mask=mask)


def routing(**fields):
    args = {"num_clusters": 2, "window": 4, "commitment": 0.1, "decay": 0.5}
    return small(attention="routing", attention_args=args, attention_dropout_rate=0.0, **fields)


@pytest.mark.slow
def test_state_moves_once_and_losses_have_gradients():
    """Centroids follow the forward pass only; the commitment loss of every layer reaches the parameters."""
    model, tokens = routing(), tokens_like()
    variables = init(model, tokens)
    (aux, changed), _ = assert_equal_to_the_plain_loop(model, variables, tokens)
    assert aux.losses["routing_commitment"].shape == (2,)
    before = variables["state"]["decoder"]["layers"]["attention"]["arguments"]["centroids"]
    after = changed["state"]["decoder"]["layers"]["attention"]["arguments"]["centroids"]
    assert (jnp.abs(after - before).max((1, 2, 3)) > 0).all()
    jax.tree.map(np.testing.assert_array_equal, aux.state, changed["state"]["decoder"])


@pytest.mark.slow
def test_state_of_unrolled_layers_is_that_of_scanned_ones():
    model, tokens = routing(), tokens_like()
    variables = init(model, tokens)
    unrolled = model.clone(config=dataclasses.replace(model.config, scan_layers=False))
    (_, (_, changed)), found = gradients(model, variables, tokens)
    separate = {name: unstack_layers(tree) for name, tree in variables.items()}
    (_, (_, other_changed)), other = gradients(unrolled, separate, tokens)
    assert_close(stack_layers(other), found, 1e-5)
    assert_close(stack_layers(other_changed["state"]), changed["state"], 1e-5)


@pytest.mark.slow
def test_experts_have_their_losses_gradients_and_figures():
    model, tokens = small(num_experts=3, expert_capacity_factor=1.0, balance_loss_weight=0.1), tokens_like()
    mask = jnp.arange(7)[None] < jnp.asarray([[7], [4]])
    (aux, _), found = assert_equal_to_the_plain_loop(model, init(model, tokens), tokens, key_mask=mask)
    assert aux.losses
    assert aux.metrics
    assert all(leaf.shape == (2,) for leaf in jax.tree.leaves((aux.losses, aux.metrics)))
    router = found["decoder"]["layers"]["mlp"]["router"]
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(router))


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["mean", "concatenate"])
def test_encoder_memory_and_relative_bias_have_gradients_through_every_layer(merge):
    config = TransformerConfig(
        **SHAPE,
        **DROPOUT,
        num_layers=2,
        use_bias=False,
        architecture="encoder_decoder",
        positions="relative",
        relative_buckets=4,
        residual="reversible",
        residual_merge=merge,
        tie_embeddings=merge == "mean",
    )
    model, source, tokens = Transformer(config), tokens_like(length=5, seed=1), tokens_like()
    mask = jnp.arange(5)[None] < jnp.asarray([[5], [3]])
    variables = init(model, tokens, source=source)
    _, found = assert_equal_to_the_plain_loop(model, variables, tokens, source=source, source_mask=mask)
    for part in (found["encoder"]["layers"], found["decoder"]["relative_bias"], found["encoder"]["relative_bias"]):
        assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(part.get("mlp", part)))


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cached_decoding_is_the_full_pass(scan_layers):
    model, tokens = small(), tokens_like()
    variables = init(model, tokens)
    if not scan_layers:
        model = model.clone(config=dataclasses.replace(model.config, scan_layers=False))
        variables = {"params": unstack_layers(variables["params"])}
    apply = jax.jit(lambda tokens, cache=None: model.apply(variables, tokens, cache=cache))
    cache, pieces = model.init_cache(2, 9), []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output = apply(tokens[:, start:stop], cache)
        cache = output.aux.cache
        pieces.append(output.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), apply(tokens).logits, atol=1e-5)


@pytest.mark.slow
def test_decoding_from_an_encoded_source_is_the_full_pass():
    config = TransformerConfig(**SHAPE, num_layers=2, architecture="encoder_decoder", residual="reversible")
    model, source, tokens = Transformer(config), tokens_like(length=5, seed=1), tokens_like()
    variables = init(model, tokens, source=source)
    expected = model.apply(variables, tokens, source=source).logits
    cache = model.apply(variables, source, 8, method="start")
    first = model.apply(variables, tokens[:, :4], cache=cache)
    rest = model.apply(variables, tokens[:, 4:], cache=first.aux.cache)
    np.testing.assert_allclose(jnp.concatenate([first.logits, rest.logits], 1), expected, atol=1e-5)


def test_no_position_depends_on_later_ones():
    """By gradient of the logits of each position with respect to the vectors of the tokens."""
    model, tokens = small(), tokens_like(batch=1, length=5)
    variables = init(model, tokens)
    config = model.config
    stack = Stack(config, config.num_layers, causal=True)
    params = {"layers": variables["params"]["decoder"]["layers"]}
    x = jax.random.normal(jax.random.key(2), (1, 5, 12))

    def outputs(x):
        return stack.apply({"params": params}, x, BlockInputs())[0][0].sum(-1)

    seen = jnp.abs(jax.jit(jax.jacrev(outputs))(x)[:, 0]).max(-1) > 0
    np.testing.assert_array_equal(seen, np.tril(np.ones((5, 5), bool)))


@pytest.mark.slow
def test_a_tiny_model_learns_sequences_by_heart():
    model, tokens = small(embed_dim=24, init_stddev=0.1, mlp_dropout_rate=0.0), tokens_like(length=10)
    optimizer = optax.adam(1e-2)

    def step(carry, index):
        params, state = carry

        def loss(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(0), index)}
            out = model.apply({"params": params}, tokens[:, :-1], deterministic=False, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    params = init(model, tokens)["params"]
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(300)))
    (params, _), losses = run((params, optimizer.init(params)))
    assert losses[0] > 2
    assert losses[-20:].mean() < 0.7, "with dropout"
    logits = model.apply({"params": params}, tokens[:, :-1]).logits
    assert (logits.argmax(-1) == tokens[:, 1:]).mean() > 0.9


def temporaries(residual, depth):
    """XLA's temporary bytes of the gradient, beyond the parameters and their gradients."""
    shape = {"vocab_size": 13, "embed_dim": 32, "num_heads": 2, "max_length": 64, "dropout_rate": 0.1}
    model = gpt(**shape, num_layers=depth, residual=residual)
    tokens = jnp.zeros((4, 64), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))["params"]

    def loss(params):
        return model.apply({"params": params}, tokens, deterministic=False, rngs=RNGS).logits.sum()

    return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_depth():
    shallow = temporaries("reversible", 4)
    assert temporaries("reversible", 64) <= 1.02 * shallow
    assert temporaries("plain", 16) > 3 * shallow


@pytest.mark.slow
def test_bfloat16_streams_keep_float32():
    """Gradients agree with the plain loop's as closely as bfloat16 can: the streams lose nothing on the way back."""
    model, tokens = small(dtype="bfloat16"), tokens_like()
    variables = init(model, tokens)
    (value, _), found = gradients(model, variables, tokens)
    (wanted_value, _), wanted = gradients(model, variables, tokens, return_weights=True)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-3)
    assert_close(found, wanted, 0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual": "revers"}, "residual='revers' must be one of plain, reversible"),
        ({"norm_placement": "post"}, "needs norm_placement='pre', not 'post'"),
        ({"remat": "full"}, "remat='full' must be 'none' with residual='reversible'"),
        ({"stack": "universal"}, "needs stack='plain', not 'universal'"),
        ({"residual_merge": "sum"}, "residual_merge='sum' must be one of mean, concatenate"),
        ({"residual_merge": "concatenate"}, "needs tie_embeddings=False"),
        ({"residual": "plain", "residual_merge": "concatenate"}, "needs residual='reversible', not 'plain'"),
    ],
)
def test_what_does_not_fit_is_refused_when_configured(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SHAPE, "num_layers": 2, "residual": "reversible", **fields})
