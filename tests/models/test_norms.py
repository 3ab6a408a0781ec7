"""Normalisation of a whole model: batch norm with padding, decoding and state, no norm, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import BlockInputs, Stack, Transformer, TransformerConfig, stack_layers, unstack_layers

SHAPE = {
    "vocab_size": 13,
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 11,
    "max_length": 16,
    "init_stddev": 0.3,
    "norm": "batch",
}
LENGTHS = np.array([[7], [4], [0]])


def make(**fields):
    return Transformer(TransformerConfig(**{**SHAPE, **fields}))


def tokens_like(length=7, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 13, (3, length)))


def init(model, tokens, **inputs):
    return jax.jit(model.init)(jax.random.key(1), tokens, **inputs)


@functools.partial(jax.jit, static_argnames=("model", "deterministic"))
def run(model, variables, tokens, deterministic=False, **inputs):
    """(logits, state), as in training unless deterministic."""
    output, changed = model.apply(variables, tokens, **inputs, deterministic=deterministic, mutable=["state"])
    return output.logits, changed["state"]


@functools.partial(jax.jit, static_argnames=("model", "return_weights"))
def gradients(model, variables, tokens, real, return_weights=False, **inputs):
    """((loss, state), gradient) in training, of the real tokens' logits."""

    def loss(params):
        output, changed = model.apply(
            {**variables, "params": params},
            tokens,
            **inputs,
            deterministic=False,
            mutable=["state"],
            return_weights=return_weights,
        )
        weight = jnp.cos(jnp.arange(13.0))[None, None] * real[..., None]
        return (jax.nn.log_softmax(output.logits) * weight).sum(), changed["state"]

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


def assert_close(found, wanted, tolerance=1e-4):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, wanted)


@pytest.fixture(scope="module")
def settled():
    """A decoder, tokens, its variables after a batch of training and the logits of that."""
    model, tokens = make(mlp_norm="batch", positions="none"), tokens_like()
    variables = init(model, tokens)
    logits, state = run(model, variables, tokens)
    return model, tokens, {**variables, "state": state}, logits


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "encoder", "mlp_norm": "batch", "embedding_norm": True, "positions": "sinusoidal"},
        pytest.param({"norm_placement": "post"}, marks=pytest.mark.slow),
        pytest.param({"norm": "layer", "mlp_norm": "batch", "mlp_norm_placement": "after"}, marks=pytest.mark.slow),
    ],
)
def test_padding_changes_nothing(fields):
    """Neither loss nor gradients nor averages, whatever stands in columns of padding, named by mask or by segments."""
    model, tokens = make(**fields), tokens_like()
    real = jnp.asarray(np.arange(7)[None] < LENGTHS)
    variables = init(model, tokens)
    (loss, state), wanted = gradients(model, variables, tokens, real, key_mask=real)
    more, more_real = jnp.pad(jnp.where(real, tokens, 5), ((0, 0), (0, 2))), jnp.pad(real, ((0, 0), (0, 2)))
    named = {"key_mask": more_real} if "architecture" in fields else {"segments": more_real.astype(jnp.int32)}
    (other_loss, other_state), found = gradients(model, variables, more, more_real, **named)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-4)
    assert_close(other_state, state)
    assert_close(found, wanted, 1e-3)
    moved = jax.tree.map(lambda old, new: bool((old != new).any()), variables["state"], state)
    assert all(jax.tree.leaves(moved))


def test_the_first_averages_are_those_of_the_embeddings(settled):
    """The first norm of a pre-norm stack reads the embeddings alone: token by token by hand."""
    _, tokens, variables, _ = settled
    read = np.float64(variables["params"]["token_embedding"]["embedding"])[np.asarray(tokens).ravel()]
    found = jax.tree.map(lambda leaf: leaf[0], variables["state"]["decoder"]["layers"]["attention_norm"])
    np.testing.assert_allclose(found["mean"], 0.1 * read.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["variance"], 0.9 + 0.1 * read.var(0, ddof=1), rtol=1e-5)


def test_evaluation_has_the_averages_so_that_no_token_depends_on_others(settled):
    model, tokens, variables, in_training = settled
    logits, state = run(model, variables, tokens, deterministic=True)
    jax.tree.map(np.testing.assert_array_equal, state, variables["state"])
    alone, _ = run(model, variables, tokens[1:2, :5], deterministic=True)
    np.testing.assert_allclose(alone, logits[1:2, :5], rtol=1e-4, atol=1e-5)
    # In training the first tokens do, even on later ones: batch norm is not causal there.
    changed, _ = run(model, variables, tokens.at[:, 6].set((tokens[:, 6] + 1) % 13))
    assert jnp.abs(changed - in_training)[:, :5].max() > 1e-3


def test_decoding_equals_the_full_pass(settled):
    model, tokens, variables, _ = settled
    full, _ = run(model, variables, tokens, deterministic=True)

    @jax.jit
    def step(cache, token):
        output = model.apply(variables, token, cache=cache)
        return output.logits, output.aux.cache

    cache, logits = model.init_cache(3, 7), []
    for place in range(7):
        one, cache = step(cache, tokens[:, place : place + 1])
        logits.append(one)
    np.testing.assert_allclose(jnp.concatenate(logits, 1), full, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"scan_layers": False}, {"remat": "full"}, {"residual": "reversible"}],
)
def test_averages_come_from_the_forward_pass_in_every_stack(fields):
    """Scanned and plain is the oracle; of a reversible stack its own plain loop, whose gradients JAX derives."""
    model, tokens = make(mlp_norm="batch"), tokens_like()
    real = jnp.asarray(np.arange(7)[None] < LENGTHS)
    variables = init(model, tokens)
    other = make(mlp_norm="batch", **fields)
    reversible = "residual" in fields
    (loss, state), wanted = gradients(
        other if reversible else model, variables, tokens, real, return_weights=reversible, key_mask=real
    )
    own = {name: unstack_layers(tree) for name, tree in variables.items()} if "scan_layers" in fields else variables
    (other_loss, other_state), found = gradients(other, own, tokens, real, key_mask=real)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    assert_close(stack_layers(other_state), state)
    assert_close(stack_layers(found), wanted, 1e-3)


@pytest.mark.slow
def test_both_sides_of_an_encoder_decoder_have_their_own_averages():
    model, tokens = make(architecture="encoder_decoder"), tokens_like()
    source = tokens_like(5, seed=1)
    mask = jnp.asarray(np.arange(5)[None] < np.array([[5], [3], [2]]))
    variables = init(model, tokens, source=source)
    logits, state = run(model, variables, tokens, source=source, source_mask=mask)
    longer = jnp.pad(source, ((0, 0), (0, 3)), constant_values=9)
    found, other = run(model, variables, tokens, source=longer, source_mask=jnp.pad(mask, ((0, 0), (0, 3))))
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    assert_close(other, state)
    assert set(state) == {"encoder", "decoder"}
    assert set(state["decoder"]["layers"]) == {"attention_norm", "cross_attention_norm", "mlp_norm"}


@pytest.mark.slow
def test_bfloat16_keeps_float32_averages(settled):
    model, tokens, variables, wanted = settled
    narrow = make(mlp_norm="batch", positions="none", dtype="bfloat16")
    logits, state = run(narrow, variables, tokens)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    assert_close(state, run(model, variables, tokens)[1], 0.05)
    assert jnp.abs(logits - wanted).max() < 0.1 * jnp.abs(wanted).max()


@pytest.mark.parametrize(
    "fields", [{"norm": "none"}, pytest.param({"norm": "layer", "norm_placement": "none"}, marks=pytest.mark.slow)]
)
def test_without_norms_a_layer_adds_what_its_sub_layers_make_of_the_stream(fields):
    """x + FFN(x) by hand, where the attention gives nothing; and no parameter is a norm's."""
    model = make(**fields, num_layers=1, positions="none")
    names = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: model.init(jax.random.key(0), tokens_like())))
    assert not any("norm" in jax.tree_util.keystr(path) for path, _ in names)
    stack, x = Stack(model.config, 1, causal=True), jax.random.normal(jax.random.key(2), (3, 5, 8))
    layer = jax.jit(lambda key: stack.init(key, x, BlockInputs())["params"]["layers"])(jax.random.key(0))
    assert set(layer) == {"attention", "mlp"}
    layer["attention"] = jax.tree.map(jnp.zeros_like, layer["attention"])
    y, _ = jax.jit(lambda layer: stack.apply({"params": {"layers": layer}}, x, BlockInputs()))(layer)
    mlp = jax.tree.map(lambda leaf: np.float64(leaf[0]), layer["mlp"])
    raised = np.float64(x) @ mlp["up"]["kernel"]
    hidden = 0.5 * raised * (1 + np.tanh(np.sqrt(2 / np.pi) * (raised + 0.044715 * raised**3)))
    np.testing.assert_allclose(y, np.float64(x) + hidden @ mlp["down"]["kernel"], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "bach"}, "norm='bach' must be one of layer, rms, batch, none"),
        ({"norm_placement": "mid"}, "norm_placement='mid' must be one of pre, post, none"),
        ({"mlp_norm": "none"}, "mlp_norm='none' must be one of None, layer, rms, batch"),
        (
            {"mlp_norm": "rms", "mlp_norm_placement": "post"},
            "mlp_norm_placement='post' must be one of None, before, after",
        ),
        ({"mlp_norm_placement": "after"}, "mlp_norm_placement='after' needs mlp_norm, which is None"),
        ({"norm_momentum": 1.5}, r"norm_momentum=1.5 must be a number in \[0, 1\]"),
        ({"norm": "layer", "norm_momentum": 0.5}, "norm_momentum=0.5 needs norm='batch' or mlp_norm='batch'"),
        ({"norm": "none", "embedding_norm": True}, "embedding_norm=True needs a norm, not norm='none'"),
        ({"mlp_norm": "layer", "num_experts": 2}, "mlp_norm='layer' can't be given with num_experts=2"),
        ({"stack": "universal"}, "norm='batch' needs stack='plain', not 'universal'"),
        ({"norm": "rms", "mlp_norm": "batch", "stack": "universal"}, "mlp_norm='batch' needs stack='plain'"),
        ({"head_transform": True}, "head_transform=True can't be given with norm='batch'"),
        ({"mlp_norm": "batch", "mlp_chunk_size": 2}, "mlp_chunk_size=2 can't be given with mlp_norm='batch'"),
        ({"residual": "reversible", "norm_placement": "post"}, "needs norm_placement='pre', not 'post'"),
    ],
)
def test_what_does_not_fit_is_refused_when_configured(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)
