"""Reformer: the published size, causality, decoding by its rule, positions, the loss in chunks, and learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models import Transformer, TransformerConfig, reformer
from jaxformer.training.objectives import OBJECTIVES

# Where a chunk holds the row, and only tokens of one bucket see each other, LSH attention chooses causally.
EXACT = {"num_hashes": 2, "num_buckets": 4, "chunk_size": 16, "within_bucket": True}
SHAPE = {
    "vocab_size": 13,
    "num_layers": 2,
    "embed_dim": 12,
    "num_heads": 2,
    "max_length": 12,
    "init_stddev": 0.4,
    "attention": ("local", "lsh"),
    "axial_shape": (4, 3),
    "axial_dims": (4, 8),
    "mlp_chunk_size": 4,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 9)))


def args_of(chunk_size=16):
    return {"local": {"window": 2}, "lsh": {**EXACT, "chunk_size": chunk_size}}


@functools.cache
def made(chunk_size=16):
    model = reformer(**SHAPE, attention_args=args_of(chunk_size))
    return model, jax.jit(lambda key: model.init(key, TOKENS))(jax.random.key(1))


@functools.partial(jax.jit, static_argnums=0)
def apply(model, variables, tokens, kwargs):
    return model.apply(variables, tokens, **kwargs)


def test_the_large_size_is_the_published_one():
    model = reformer("large")
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32)))["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    # google/reformer-enwik8 by hand: 9 local layers with four projections, 3 LSH layers with three, feed-forward layers
    # of width 4096, two norms a layer and one of both streams, embeddings, positions and head; it has no biases in
    # attention, but one in its head.
    width, hidden = 1024, 4096
    attention = (9 * 4 + 3 * 3) * width * width
    rest = 12 * (2 * width * hidden + hidden + width + 4 * width) + 4 * width
    ends = 258 * width + 128 * 256 + 512 * 768 + (2 * width + 1) * 258
    biases = (9 * 4 + 3 * 3) * width
    assert count == attention + rest + ends - 258 + biases
    assert abs(count / 149.2e6 - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 2])
def test_no_logit_depends_on_a_later_token(chunk_size):
    """By gradient, also where several chunks make the choice of keys, which has no gradient, depend on later tokens."""
    model, variables = made(chunk_size)
    params = variables["params"]
    table = params["token_embedding"]["embedding"]

    @jax.jit
    @jax.grad
    def gradient(delta, query):
        # One private row per position makes the embedding of a position an independent input.
        private = {**params, "token_embedding": {"embedding": jnp.concatenate([table[TOKENS[0]] + delta, table[9:]])}}
        hidden, _ = model.apply({**variables, "params": private}, jnp.arange(9)[None], method="hidden")
        return (hidden[0, query] * jnp.arange(24.0)).sum()

    influence = np.stack([np.abs(gradient(jnp.zeros((9, 12)), query)).sum(1) for query in range(9)])
    np.testing.assert_array_equal(influence[np.triu_indices(9, 1)], 0.0)
    assert (np.diag(influence) > 0).all()
    assert (influence[np.tril_indices(9)] > 0).mean() > 0.4, "two tokens back, and those of one's bucket"


@pytest.mark.slow
def test_cached_decoding_equals_the_full_pass_where_a_chunk_holds_the_row():
    model, variables = made()
    expected = apply(model, variables, TOKENS, {}).logits
    cache, start, pieces = model.init_cache(2, 12), 0, []
    for size in (3, 3, 3):
        out = apply(model, variables, TOKENS[:, start : start + size], {"cache": cache})
        cache, start = out.aux.cache, start + size
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


def test_positions_end_at_max_length():
    model, variables = made()
    with pytest.raises(ValueError, match="tokens has 13 positions, more than max_length=12"):
        jax.eval_shape(lambda: model.apply(variables, jnp.zeros((1, 13), jnp.int32)))
    params = variables["params"]["decoder"]["position_embedding"]
    assert {name: leaf["embedding"].shape for name, leaf in params.items()} == {"axis_0": (4, 4), "axis_1": (3, 8)}


def test_the_head_is_a_product_with_its_kernel():
    model, variables = made()
    hidden = jnp.linspace(-1.0, 1.0, 48).reshape(1, 2, 24)
    kernel = np.asarray(model.apply(variables, method="head_kernel"))
    np.testing.assert_allclose(model.apply(variables, hidden, method="head"), np.asarray(hidden) @ kernel, atol=1e-5)


def step_of(model, rest, batch, optimizer):
    def loss(params):
        out = OBJECTIVES["language_model"](model, params, rest, batch, rng=jax.random.key(0), chunk_size=8)
        return out.loss_sum / out.weight_sum

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return step


def test_whole_logits_are_in_no_program_of_a_training_step():
    model = reformer("tiny", vocab_size=997)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 192), jnp.int32)))
    params, rest = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
    batch = {name: jax.ShapeDtypeStruct((1, 192), jnp.int32) for name in ("tokens", "targets")}

    def step(params, rest, batch):
        return jax.grad(lambda params: OBJECTIVES["language_model"](model, params, rest, batch, chunk_size=8).loss_sum)(
            params
        )

    program = str(jax.make_jaxpr(step)(params, rest, batch))
    assert "8,997]" in program
    assert "192,997]" not in program


@pytest.mark.slow
def test_a_tiny_model_learns_a_sentence_by_heart():
    fields = {**SHAPE, "embed_dim": 24, "axial_dims": (8, 16), "init_stddev": 0.02}
    model = reformer(**fields, attention_args=args_of())
    variables = dict(jax.jit(lambda: model.init(jax.random.key(0), TOKENS))())
    params = variables.pop("params")
    batch = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    optimizer = optax.adam(1e-2)
    step = step_of(model, variables, batch, optimizer)
    _, losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=150))((params, optimizer.init(params)))
    assert losses[0] > 2
    assert losses[-1] < 0.3


@pytest.mark.slow
def test_encoder_and_decoder_reach_each_other():
    model = reformer(**SHAPE, attention_args=args_of(), architecture="encoder_decoder")
    variables = jax.jit(lambda key: model.init(key, TOKENS, source=TOKENS))(jax.random.key(0))
    source = TOKENS.at[0, 0].set((TOKENS[0, 0] + 1) % 13)
    one = apply(model, variables, TOKENS, {"source": TOKENS}).logits
    other = apply(model, variables, TOKENS, {"source": source}).logits
    assert np.abs(one[0] - other[0]).max() > 1e-4
    np.testing.assert_array_equal(one[1], other[1])


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="size='huge' must be one of tiny, small, base, large"):
        reformer("huge")
    assert isinstance(reformer("base"), Transformer)
    assert isinstance(reformer("base").config, TransformerConfig)
