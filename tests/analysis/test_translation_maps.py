"""Attention maps of a translation: distributions, the model's own weights, and labels in their places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import attention_maps, token_texts
from jaxformer.data import ByteTokenizer, CharacterTokenizer
from jaxformer.models import encoder_decoder, gpt, recurrent

SOURCES, TARGETS = CharacterTokenizer(tuple("abcdefg"), ("<de>",)), CharacterTokenizer(tuple("XYZ"))
SIZES = {"vocab_size": 7, "share_embeddings": False, "source_vocab_size": 12}
SHAPE = {"num_layers": 2, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16, "num_encoder_layers": 1}
MAKERS = {
    "transformer": functools.partial(encoder_decoder, **SHAPE, **SIZES),
    "recurrent": functools.partial(recurrent, embed_dim=8, hidden_dim=8, init_stddev=1.0, **SIZES),
}
SOURCE = [*SOURCES.encode("<de>gab"), SOURCES.eos_id]
TARGET = [*TARGETS.encode("YXX"), TARGETS.eos_id]
LABELS = {"source": ("<de>", "g", "a", "b", "<eos>"), "target": ("Y", "X", "X", "<eos>")}
OPTIONS = {"start_id": TARGETS.bos_id, "tokenizer": TARGETS, "source_tokenizer": SOURCES}


@functools.cache
def made(name):
    model = MAKERS[name]()
    ids = jnp.zeros((1, 2), jnp.int32)
    return model, jax.jit(lambda key: model.init(key, ids, source=ids))(jax.random.key(0))["params"]


@pytest.mark.parametrize("name", ["transformer", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_maps_are_the_weights_of_the_model_s_own_pass_with_their_tokens(name):
    model, params = made(name)
    maps = attention_maps(model, params, SOURCE, TARGET, **OPTIONS)
    tokens, source = jnp.array([[TARGETS.bos_id, *TARGET[:-1]]]), jnp.array([SOURCE])
    own = jax.jit(lambda params: model.apply({"params": params}, tokens, source=source, return_weights=True))(params)
    weights = own.aux.weights
    if name == "recurrent":
        assert list(maps) == ["cross"]
        np.testing.assert_allclose(maps["cross"].weights, weights["cross_attention"][None, 0], atol=1e-6)
        assert maps["cross"].weights.shape == (1, 1, 4, 5)
    else:
        shapes = {part: array.weights.shape for part, array in maps.items()}
        assert shapes == {"encoder": (1, 2, 5, 5), "decoder": (2, 2, 4, 4), "cross": (2, 2, 4, 5)}
        for part, key in (("encoder", "encoder_attention"), ("decoder", "attention"), ("cross", "cross_attention")):
            np.testing.assert_allclose(maps[part].weights, weights[key][:, 0], atol=1e-6)
        assert maps["encoder"].rows == maps["encoder"].columns == LABELS["source"]
        assert maps["decoder"].rows == LABELS["target"]
        assert maps["decoder"].columns == ("<bos>", "Y", "X", "X")
        assert (maps["decoder"].weights[..., np.triu_indices(4, 1)[0], np.triu_indices(4, 1)[1]] == 0).all()
    assert maps["cross"].rows == LABELS["target"]
    assert maps["cross"].columns == LABELS["source"]
    for part in maps.values():
        np.testing.assert_allclose(part.weights.sum(-1), 1.0, atol=1e-5)
        assert part.weights.shape[2:] == (len(part.rows), len(part.columns))


def test_tokens_without_a_text_of_their_own_are_named():
    assert token_texts(SOURCES, [0, 1, 2, 3, 4, 5, 99]) == ("<pad>", "<bos>", "<eos>", "<3>", "<de>", "a", "<99>")
    assert token_texts(ByteTokenizer(), ByteTokenizer().encode("hé")) == ("h", "<195>", "<169>")


def test_what_has_no_maps_is_refused():
    model, params = made("transformer")
    with pytest.raises(ValueError, match=r"target_ids\[0\] is empty"):
        attention_maps(model, params, SOURCE, [], **OPTIONS)
    with pytest.raises(ValueError, match=r"sources\[0\] holds the id 12"):
        attention_maps(model, params, [12], TARGET, **OPTIONS)
    with pytest.raises(ValueError, match="start_id=7 must be an integer in"):
        attention_maps(model, params, SOURCE, TARGET, **{**OPTIONS, "start_id": 7})
    with pytest.raises(ValueError, match="has no separate encoder"):
        attention_maps(gpt("tiny"), {}, SOURCE, TARGET, **OPTIONS)
    silent = recurrent(embed_dim=8, hidden_dim=8, attention="none", **SIZES)
    ids = jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(lambda: silent.init(jax.random.key(0), ids, source=ids))["params"]
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with pytest.raises(ValueError, match="attention='none' has no weights to show"):
        attention_maps(silent, params, SOURCE, TARGET, **OPTIONS)
