"""Encoder and encoder-decoder: source padding, cross-attention caches, post-norm against a plain numpy encoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import Transformer, TransformerConfig

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "max_length": 16, "init_stddev": 0.3}


def init_params(model, *args, **kwargs):
    return jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(1))["params"]


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, variables, tokens, kwargs):
    return model.apply(variables, tokens, **kwargs)


def _ids(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 13)


def _encoder_decoder(**fields):
    model = Transformer(TransformerConfig(**{**SHAPE, "architecture": "encoder_decoder", **fields}))
    variables = {"params": init_params(model, _ids(1, 3), source=_ids(1, 4))}
    return model, variables


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "relative", "norm": "rms"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_kv_heads": 1, "num_encoder_layers": 1}, marks=pytest.mark.slow),
    ],
)
def test_source_padding_changes_nothing(fields):
    model, variables = _encoder_decoder(**fields)
    source, tokens = _ids(2, 5), _ids(2, 7, seed=1)
    expected = _apply(model, variables, tokens, {"source": source}).logits
    for filler in (0, 9):
        padded = jnp.pad(source, ((0, 0), (0, 3)), constant_values=filler)
        mask = jnp.broadcast_to(jnp.arange(8)[None] < 5, (2, 8))
        out = _apply(model, variables, tokens, {"source": padded, "source_mask": mask}).logits
        np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "relative"},
        pytest.param({"positions": "rotary", "scan_layers": False}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_cached_decoding_from_an_encoded_source_equals_the_full_pass(fields):
    model, variables = _encoder_decoder(**fields)
    source, tokens = _ids(2, 5), _ids(2, 7, seed=1)
    mask = jnp.arange(5)[None] < jnp.array([[5], [3]])
    expected = _apply(model, variables, tokens, {"source": source, "source_mask": mask}).logits
    cache = jax.jit(lambda *xs: model.apply(*xs, 8, source_mask=mask, method="start"))(variables, source)
    pieces = []
    for first, last in [(0, 3), (3, 4), (4, 5), (5, 7)]:
        out = _apply(model, variables, tokens[:, first:last], {"cache": cache})
        cache = out.aux.cache
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


@pytest.mark.slow
def test_packed_pairs_see_their_own_source_only():
    model, variables = _encoder_decoder()
    source, tokens = _ids(1, 5), _ids(1, 6, seed=1)
    out = model.apply(
        variables,
        tokens,
        source=source,
        source_segments=jnp.array([[1, 1, 1, 2, 2]]),
        source_positions=jnp.array([[0, 1, 2, 0, 1]]),
        segments=jnp.array([[1, 1, 2, 2, 2, 2]]),
        positions=jnp.array([[0, 1, 0, 1, 2, 3]]),
    ).logits
    first = _apply(model, variables, tokens[:, :2], {"source": source[:, :3]}).logits
    second = _apply(model, variables, tokens[:, 2:], {"source": source[:, 3:]}).logits
    np.testing.assert_allclose(out, jnp.concatenate([first, second], 1), atol=1e-5)


def test_an_encoder_sees_both_directions():
    model = Transformer(TransformerConfig(**SHAPE, architecture="encoder"))
    tokens = _ids(1, 6)
    variables = {"params": init_params(model, tokens)}
    base = _apply(model, variables, tokens, {}).logits
    for changed in (0, 5):
        other = _apply(model, variables, tokens.at[0, changed].add(1) % 13, {}).logits
        assert (np.abs(other - base).max(-1) > 1e-6).all()


def _numpy_post_norm_encoder(params, x, heads):
    """Vaswani et al. 2017, section 3.1, written plainly in float64."""

    def norm(p, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    for layer in range(2):
        p = jax.tree.map(lambda leaf, layer=layer: np.float64(leaf[layer]), params["layers"])
        query, key, value = (np.split(dense(p["attention"][n], x), heads, -1) for n in ("query", "key", "value"))
        outs = []
        for q, k, v in zip(query, key, value):
            weights = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
            outs.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = norm(p["attention_norm"], x + dense(p["attention"]["out"], np.concatenate(outs, -1)))
        x = norm(p["mlp_norm"], x + dense(p["mlp"]["down"], np.maximum(dense(p["mlp"]["up"], x), 0.0)))
    return x


def test_post_norm_encoder_equals_the_paper_written_plainly():
    config = TransformerConfig(
        **SHAPE,
        architecture="encoder",
        norm_placement="post",
        activation="relu",
        positions="sinusoidal",
        scale_embedding=True,
    )
    model = Transformer(config)
    tokens = _ids(2, 7)
    params = init_params(model, tokens)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params)
    positions, features = np.arange(7)[:, None], np.arange(0, 12, 2)
    angles = positions / 10_000 ** (features / 12)
    table = np.zeros((7, 12))
    table[:, 0::2], table[:, 1::2] = np.sin(angles), np.cos(angles)
    embedding = np.float64(params["token_embedding"]["embedding"])
    expected = _numpy_post_norm_encoder(params["encoder"], embedding[tokens] * np.sqrt(12) + table, heads=3)
    hidden, _ = jax.jit(lambda params: model.apply({"params": params}, tokens, method="hidden"))(params)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)


def test_arguments_that_do_not_fit_the_architecture_are_refused():
    decoder = Transformer(TransformerConfig(**SHAPE))
    encoder = Transformer(TransformerConfig(**SHAPE, architecture="encoder"))
    both, variables = _encoder_decoder()
    with pytest.raises(ValueError, match="source was given, but architecture='decoder'"):
        decoder.init(jax.random.key(0), _ids(1, 3), source=_ids(1, 3))
    with pytest.raises(ValueError, match="needs source, or a cache made by start"):
        both.apply(variables, _ids(1, 3))
    with pytest.raises(ValueError, match="source_segments were given without segments"):
        both.apply(variables, _ids(1, 3), source=_ids(1, 3), source_segments=jnp.ones((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="architecture='encoder' has no decoder"):
        encoder.init_cache(1, 4)
