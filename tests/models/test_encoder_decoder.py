"""The encoder-decoder presets: published sizes, initial scales, tables of their own for source tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import generate, has_encoder
from jaxformer.inference.sources import pad_sources
from jaxformer.models import encoder_decoder, gpt, recurrent, transformer_base, transformer_big, transformer_tiny

SHAPE = {"vocab_size": 13, "num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16, "init_stddev": 0.5}
IDS = jnp.zeros((1, 2), jnp.int32)


def _shapes(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), IDS, source=IDS))["params"]


def _count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("make", "width", "published"), [(transformer_base, 512, 65_000_000), (transformer_big, 1024, 213_000_000)]
)
def test_parameter_counts_are_the_published_ones(make, width, published):
    """The paper rounds, and gives its vocabulary as about 37,000."""
    model = make()
    attention, norm = 4 * (width**2 + width), 2 * width
    feed_forward = 2 * 4 * width**2 + 5 * width
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    count = _count(_shapes(model))
    assert count == 6 * (encoder + decoder) + 37_000 * width
    assert count == pytest.approx(published, rel=0.03)
    config = model.config
    assert (config.num_heads, config.hidden_dim) == (width // 64, 4 * width)
    assert config.dropout_rate == (0.1 if width == 512 else 0.3)


def test_embeddings_times_the_square_root_of_the_width_have_unit_variance():
    params = jax.jit(lambda key: transformer_tiny().init(key, IDS, source=IDS))(jax.random.key(0))["params"]
    table = params["token_embedding"]["embedding"]
    np.testing.assert_allclose(np.std(table) * np.sqrt(128), 1.0, atol=0.02)
    kernel = params["encoder"]["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(np.abs(kernel).max(), np.sqrt(6 / (128 + 512)), rtol=0.01)


MAKERS = {
    "encoder_decoder": functools.partial(encoder_decoder, **SHAPE),
    "recurrent": functools.partial(recurrent, vocab_size=13, embed_dim=8, hidden_dim=8, init_stddev=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_sources_with_a_table_of_their_own_have_their_own_vocabulary(name):
    model = MAKERS[name](share_embeddings=False, source_vocab_size=29)
    shapes = _shapes(model)
    assert shapes["source_embedding"]["embedding"].shape == (29, 8)
    assert shapes["token_embedding"]["embedding"].shape == (13, 8)
    assert _shapes(MAKERS[name](share_embeddings=False))["source_embedding"]["embedding"].shape == (13, 8)
    assert "source_embedding" not in _shapes(MAKERS[name]())
    params = jax.jit(lambda key: model.init(key, IDS, source=IDS))(jax.random.key(0))["params"]
    shown = jax.jit(lambda params, source: model.apply({"params": params}, IDS, source=source).logits)
    logits, other = (shown(params, jnp.array([[5, last]])) for last in (27, 28))
    assert logits.shape == (1, 2, 13)
    assert (logits != other).any()
    # Equal tables are a shared one.
    shared = {name: tree for name, tree in params.items() if name != "source_embedding"}
    both = {
        **params,
        "source_embedding": {"embedding": jnp.pad(params["token_embedding"]["embedding"], ((0, 16), (0, 0)))},
    }
    source = jnp.array([[5, 12]])
    expected = jax.jit(lambda params: MAKERS[name]().apply({"params": params}, IDS, source=source).logits)(shared)
    np.testing.assert_allclose(shown(both, source), expected, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_generation_checks_source_ids_against_the_source_vocabulary(name):
    model = MAKERS[name](share_embeddings=False, source_vocab_size=29)
    assert pad_sources([[28, 3]], model, 1).tokens[0, :2].tolist() == [28, 3]
    with pytest.raises(ValueError, match=r"sources\[0\] holds the id 29; ids must be in \[0, 29\)"):
        generate(model, {}, [[1]], sources=[[29]], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompts\[0\] holds the id 13; ids must be in \[0, 13\)"):
        generate(model, {}, [[13]], sources=[[1]], max_new_tokens=2)


def test_models_with_an_encoder_are_known():
    assert has_encoder(MAKERS["encoder_decoder"]())
    assert has_encoder(MAKERS["recurrent"]())
    assert not has_encoder(gpt("tiny"))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_vocab_size": 29}, "source_vocab_size=29 needs share_embeddings=False"),
        ({"share_embeddings": False, "source_vocab_size": 0}, "source_vocab_size=0 must be an integer of at least 1"),
    ],
)
def test_source_vocabularies_that_do_not_fit_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        MAKERS[name](**fields)


def test_tables_and_sizes_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="share_embeddings=False needs architecture='encoder_decoder'"):
        gpt("tiny", share_embeddings=False)
    with pytest.raises(ValueError, match="size='huge' must be one of tiny, base, big"):
        encoder_decoder("huge")
