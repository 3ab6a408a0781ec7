"""Attentions of the catalogue between decoder and encoder, and an encoder whose attention is not the decoder's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import ATTENTION
from jaxformer.inference import beam_search, generate
from jaxformer.models import Transformer, TransformerConfig

SHAPE = {
    "vocab_size": 13,
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 2,
    "max_length": 16,
    "init_stddev": 0.5,
    "architecture": "encoder_decoder",
    "positions": "sinusoidal",
}
ARGS = {"compressed": {"stride": 2}, "linformer": {"rank": 4}, "performer": {"num_features": 16}}
ACROSS = sorted(name for name, kind in ATTENTION.items() if kind.cross and not kind.mixes_queries)
SOURCE = jnp.array([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
MASK = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
TOKENS = jnp.array([[1, 9, 11, 2, 5, 3, 4], [1, 3, 3, 8, 2, 12, 7]])

# Every run tests one that learns arrays of its own; the others take a minute more.
FIRST = ("linformer",)


def each(names):
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in names]


@functools.cache
def made(**fields):
    model = Transformer(TransformerConfig(**{**SHAPE, **fields}))
    return model, jax.jit(lambda key: model.init(key, TOKENS[:, :1], source=SOURCE[:, :1]))(jax.random.key(0))


def across(name):
    return made(cross_attention=name, cross_attention_args=tuple(ARGS.get(name, {}).items()))


def test_the_kinds_between_two_sequences_are_known():
    assert {"dense", "additive", "concat", "bilinear", "linformer", "performer", "linear", "compressed"} < {*ACROSS}


@pytest.mark.slow
@pytest.mark.parametrize("name", each(ACROSS))
def test_decoding_from_a_source_read_once_is_the_full_pass_and_reads_no_padding(name):
    model, variables = across(name)

    @jax.jit
    def run(variables, source):
        full = model.apply(variables, TOKENS, source=source, source_mask=MASK, return_weights=True)
        cache = model.apply(variables, source, 8, source_mask=MASK, method="start")

        def step(cache, column):
            out = model.apply(variables, column[:, None], cache=cache)
            return out.aux.cache, out.logits[:, 0]

        first = model.apply(variables, TOKENS[:, :3], cache=cache)
        _, rest = jax.lax.scan(step, first.aux.cache, TOKENS[:, 3:].T)
        cached = jnp.concatenate([first.logits, rest.swapaxes(0, 1)], 1)
        return full.logits, cached, full.aux.weights["cross_attention"]

    full, cached, weights = run(variables, SOURCE)
    np.testing.assert_allclose(cached, full, atol=1e-5)
    assert weights.shape == (1, 2, 2, 7, 5)
    np.testing.assert_array_equal(weights[:, 1, :, :, 3:], 0.0)
    other, _, _ = run(variables, jnp.where(MASK, SOURCE, 12))
    np.testing.assert_array_equal(other, full)
    alone = jax.jit(lambda variables: model.apply(variables, TOKENS[1:], source=SOURCE[1:, :3]).logits)(variables)
    np.testing.assert_allclose(full[1:], alone, atol=1e-5)
    learned = variables["params"]["decoder"]["layers"]["cross_attention"].get("arguments", {})
    assert bool(learned) == (name in ("additive", "bilinear", "concat", "kernel", "linformer"))


@pytest.mark.parametrize("name", each(name for name in ACROSS if ATTENTION[name].cross_segments))
def test_packed_pairs_see_their_own_source_only(name):
    model, variables = across(name)
    packed = {
        "source_segments": jnp.array([[1, 1, 1, 2, 2]]),
        "source_positions": jnp.array([[0, 1, 2, 0, 1]]),
        "segments": jnp.array([[1, 1, 2, 2, 2, 2, 0]]),
        "positions": jnp.array([[0, 1, 0, 1, 2, 3, 0]]),
    }
    apply = jax.jit(lambda tokens, source, packed: model.apply(variables, tokens, source=source, **packed).logits)
    tokens, source = TOKENS[:1], SOURCE[:1]
    out = apply(tokens, source, packed)
    np.testing.assert_allclose(out[:, :2], apply(tokens[:, :2], source[:, :3], {}), atol=1e-5)
    np.testing.assert_allclose(out[:, 2:6], apply(tokens[:, 2:6], source[:, 3:], {}), atol=1e-5)


def test_kinds_that_would_mix_packed_pairs_are_refused_by_name():
    model = Transformer(TransformerConfig(**SHAPE, cross_attention="linear"))
    ones = {"source_segments": jnp.ones((2, 5), jnp.int32), "segments": jnp.ones((2, 7), jnp.int32)}
    with pytest.raises(ValueError, match="cross_attention='linear' can't keep packed pairs apart"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS, source=SOURCE, **ones))


TURNS = {
    "encoder_attention": ("local", "linformer"),
    "encoder_attention_args": (("linformer", (("rank", 4),)), ("local", (("window", 1),))),
    "num_encoder_layers": 2,
}


@pytest.mark.slow
def test_an_encoder_with_attentions_of_its_own_is_that_encoder():
    model, variables = made(**TURNS)
    config = {**SHAPE, "architecture": "encoder", "num_layers": 2}
    own = {"attention": TURNS["encoder_attention"], "attention_args": TURNS["encoder_attention_args"]}
    alone = Transformer(TransformerConfig(**config, **own))
    params = {name: variables["params"][name] for name in ("token_embedding", "encoder")}
    expected, aux = jax.jit(
        lambda params: alone.apply({"params": params}, SOURCE, key_mask=MASK, return_weights=True, method="hidden")
    )(params)
    found, output = jax.jit(
        lambda variables: (
            model.apply(variables, SOURCE, source_mask=MASK, method="encode"),
            model.apply(variables, TOKENS, source=SOURCE, source_mask=MASK, return_weights=True),
        )
    )(variables)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    weights = output.aux.weights
    np.testing.assert_allclose(weights["encoder_attention"], aux.weights["attention"], atol=1e-6)
    assert (weights["encoder_attention"][0][:, :, 3, 1] == 0).all(), "the window is one token to each side"
    assert weights["attention"].shape == (1, 2, 2, 7, 7)


@pytest.mark.slow
@pytest.mark.parametrize("search", [False, True])
def test_it_generates_what_full_passes_say(search):
    """The encoder's layers take turns in twos, the decoder's do not: both are laid out anew for single tokens."""
    model, variables = made(**TURNS)
    sources = [[3, 4, 5, 6, 7], [8, 9, 10]]
    arguments = {"sources": sources, "max_new_tokens": 5}
    if search:
        out = beam_search(model, variables["params"], [[1], [1]], **arguments, eos_id=None, num_beams=1).tokens[:, 0]
    else:
        out = generate(model, variables["params"], [[1], [1]], **arguments)
    tokens = jnp.concatenate([jnp.ones((2, 1), jnp.int32), jnp.asarray(out)], 1)
    full = jax.jit(lambda variables: model.apply(variables, tokens, source=SOURCE, source_mask=MASK).logits)(variables)
    np.testing.assert_array_equal(full[:, :-1].argmax(-1), out)


def test_sources_end_where_an_attention_ends():
    model = Transformer(TransformerConfig(**SHAPE, **TURNS))
    with pytest.raises(ValueError, match=r"sources\[0\] has 17 tokens; the model has max_length=16"):
        generate(model, {}, [[1]], sources=[[3] * 17], max_new_tokens=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cross_attention": "lsh"}, "cross_attention='lsh' can't be between two sequences"),
        ({"cross_attention": "strided"}, "cross_attention='strided' can't be between two sequences"),
        ({"cross_attention": "longformer"}, "cross_attention='longformer' can't be between two sequences"),
        ({"cross_attention": "clustered"}, "cross_attention='clustered' can't be decoded: .* the queries after it"),
        ({"cross_attention": "denser"}, "cross_attention='denser' must be one of additive, .*performer"),
        ({"cross_attention": ("dense", "linear")}, "must be one of additive"),
        (
            {"cross_attention_args": {"stride": 4}, "cross_attention": "linear"},
            "cross_attention='linear' does not know",
        ),
        ({"cross_attention_args": {"rank": 4}}, "cross_attention_args has 'rank', which cross_attention='dense'"),
        ({"cross_attention": "linear", "attention_dropout_rate": 0.1}, "cross_attention='linear' does not support"),
        ({"attention": "linformer"}, "attention='linformer' can't be causal, .*own is encoder_attention"),
        ({"encoder_attention": "local"}, "encoder_attention='local' needs window in encoder_attention_args"),
        ({"encoder_attention_args": {"window": 1}}, "encoder_attention_args needs encoder_attention"),
        ({"encoder_attention": ("dense",) * 3}, r"num_layers=1 must be a multiple of the 3 .*\(encoder_attention\)"),
        ({"encoder_attention": "linear", "positions": "alibi"}, "encoder_attention='linear' does not support posit"),
        ({"architecture": "decoder", "encoder_attention": "dense"}, "encoder_attention='dense' needs architecture="),
        ({"architecture": "encoder", "cross_attention": "linear"}, "cross_attention='linear' needs architecture="),
    ],
)
def test_what_makes_no_sense_is_refused_when_configured(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SHAPE, **fields})


def test_an_encoder_s_attention_need_not_be_causal_nor_decode():
    for name in ("linformer", "clustered", "sinkhorn", "longformer"):
        kinds = {"clustered": {"num_clusters": 2}, "longformer": {"window": 1}}
        config = TransformerConfig(**SHAPE, encoder_attention=name, encoder_attention_args=kinds.get(name, {}))
        assert Transformer(config).init_cache(1, 4).layers is not None


def test_a_decoder_s_attention_without_a_cache_is_refused_when_it_decodes():
    config = TransformerConfig(**SHAPE, attention="longformer", attention_args={"window": 1})
    with pytest.raises(ValueError, match="attention='longformer' can't decode with a cache"):
        Transformer(config).init_cache(1, 4)
