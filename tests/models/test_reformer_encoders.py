"""Reformer as an encoder and as encoder and decoder: padding, gradients through both reversible stacks, decoding.

The oracle of gradients are the same layers as a plain loop, which JAX differentiates (see ``plainly``).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import BlockInputs, reformer

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
    # Without biases: the gradient of keys' biases is zero but for rounding, which has no relative error.
    "use_bias": False,
}
SEVERAL_CHUNKS = {"local": {"window": 2}, "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 4}}
# Where a chunk holds the row, and only tokens of one bucket see each other, LSH attention chooses causally.
ONE_CHUNK = {
    "local": {"window": 2},
    "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 16, "within_bucket": True},
}
SOURCE = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 11)))
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 13, (2, 7)))
MASK = jnp.arange(11)[None] < jnp.asarray([[11], [8]])


@functools.cache
def made(architecture, one_chunk=False):
    args = ONE_CHUNK if one_chunk else SEVERAL_CHUNKS
    model = reformer(**SHAPE, architecture=architecture, attention_args=args)
    given = {} if architecture == "encoder" else {"source": SOURCE}
    # Random values for all variables, norms' scales included, without compiling an initialisation.
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS, **given))
    variables = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    return model, jax.tree.map_with_path(lambda path, leaf: leaf + float("scale" in str(path[-1])), variables)


@functools.partial(jax.jit, static_argnums=0)
def logits(model, variables, tokens, kwargs):
    return model.apply(variables, tokens, **kwargs).logits


def plainly(model, tokens, source, mask):
    """Logits of both sides' layers in a plain loop: asking for attention weights leaves the reversible one."""
    inputs = BlockInputs(key_mask=mask)
    memory, _ = model.encoder(model.token_embedding(source), inputs, return_weights=True)
    if model.config.architecture == "encoder":
        return model.head(memory)
    inputs = BlockInputs(memory=memory, memory_mask=mask)
    return model.head(model.decoder(model.token_embedding(tokens), inputs, return_weights=True)[0])


@pytest.mark.slow
def test_an_encoder_reads_no_padding():
    model, variables = made("encoder")
    alone = logits(model, variables, SOURCE[1:, :8], {})
    padded = logits(model, variables, SOURCE, {"key_mask": MASK})[1:, :8]
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    other = logits(model, variables, jnp.where(MASK, SOURCE, 12 - SOURCE), {"key_mask": MASK})
    np.testing.assert_allclose(other[1:, :8], alone, atol=1e-5)


def test_an_encoder_sees_both_sides():
    model, variables = made("encoder")
    everything = {"key_mask": jnp.ones((2, 11), bool)}
    before = logits(model, variables, SOURCE, everything)
    for place, neighbour in ((0, 1), (10, 9)):
        changed = SOURCE.at[:, place].set((SOURCE[:, place] + 1) % 13)
        difference = logits(model, variables, changed, everything) - before
        assert (jnp.abs(difference[:, neighbour]).max(-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["encoder", "encoder_decoder"])
def test_gradients_are_those_of_the_plain_loop(architecture):
    model, variables = made(architecture)
    rest = {name: tree for name, tree in variables.items() if name != "params"}
    weights = jnp.cos(jnp.arange(13.0))[None, None]

    def reversibly(params):
        if architecture == "encoder":
            out = model.apply({"params": params, **rest}, SOURCE, key_mask=MASK).logits
            return jnp.where(MASK[..., None], jax.nn.log_softmax(out) * weights, 0.0).sum()
        out = model.apply({"params": params, **rest}, TOKENS, source=SOURCE, source_mask=MASK).logits
        return (jax.nn.log_softmax(out) * weights).sum()

    def by_loop(params):
        out = model.apply({"params": params, **rest}, TOKENS, SOURCE, MASK, method=plainly)
        real = MASK[..., None] if architecture == "encoder" else True
        return jnp.where(real, jax.nn.log_softmax(out) * weights, 0.0).sum()

    value, found = jax.jit(jax.value_and_grad(reversibly))(variables["params"])
    expected_value, expected = jax.jit(jax.value_and_grad(by_loop))(variables["params"])
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected)):
        name = jax.tree_util.keystr(path)
        assert float(jnp.abs(b).max()) > 0, name
        assert float(jnp.abs(a - b).max()) <= 1e-5 * max(float(jnp.abs(b).max()), 1e-2 * largest), name


@pytest.mark.slow
def test_what_is_decoded_from_a_source_is_the_full_pass_and_reads_no_padding():
    model, variables = made("encoder_decoder", one_chunk=True)
    expected = logits(model, variables, TOKENS, {"source": SOURCE, "source_mask": MASK})
    start = jax.jit(lambda source, mask: model.apply(variables, source, 8, source_mask=mask, method="start"))
    step = jax.jit(lambda tokens, cache: model.apply(variables, tokens, cache=cache))
    cache, pieces = start(SOURCE, MASK), []
    for place in range(7):
        out = step(TOKENS[:, place : place + 1], cache)
        cache = out.aux.cache
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)
    other = jnp.where(MASK, SOURCE, 12 - SOURCE)
    changed = logits(model, variables, TOKENS, {"source": other, "source_mask": MASK})
    np.testing.assert_allclose(changed, expected, atol=1e-5)
    alone = logits(model, variables, TOKENS[1:], {"source": SOURCE[1:, :8]})
    np.testing.assert_allclose(expected[1:], alone, atol=1e-5)


@pytest.mark.slow
def test_greedy_decoding_from_a_source_is_that_of_full_passes():
    model, variables = made("encoder_decoder", one_chunk=True)
    cache = model.apply(variables, SOURCE, 7, source_mask=MASK, method="start")
    step = jax.jit(lambda tokens, cache: model.apply(variables, tokens, cache=cache))
    token = tokens = TOKENS[:, :1]
    for _ in range(6):
        out = step(token, cache)
        cache, token = out.aux.cache, out.logits[:, -1:].argmax(-1)
        full = logits(
            model,
            variables,
            jnp.pad(tokens, ((0, 0), (0, 7 - tokens.shape[1]))),
            {"source": SOURCE, "source_mask": MASK},
        )
        np.testing.assert_array_equal(token, full[:, tokens.shape[1] - 1 : tokens.shape[1]].argmax(-1))
        tokens = jnp.concatenate([tokens, token], 1)
