"""Recorded attention: the weights of the model's own pass by layer and head, for kinds of every sort, with tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import (
    AttentionMap,
    attention_view,
    character_groups,
    join_tokens,
    record_attention,
    recording,
    token_texts,
)
from jaxformer.analysis.eight_bits import eight_bits
from jaxformer.analysis.map_parts import make_part
from jaxformer.data import ByteTokenizer, CharacterTokenizer
from jaxformer.models import bert, encoder_decoder, gpt

SHAPE = {"vocab_size": 259, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "dropout_rate": 0.0}
KINDS = {
    "dense": {},
    "local": {"window": 2},
    "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 3},
}
IDS = [256, *b"a \xe5\xa4\xa9!cd"]
NAMES = ("<bos>", "a", " ", "<229>", "<164>", "<169>", "!", "c", "d")


def drawn(model, **given):
    """Variables of a model, from numpy: an initialisation would have to be compiled."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), **given))
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.5, leaf.shape).astype(leaf.dtype), shapes)


@functools.cache
def decoder(*names):
    """A decoder whose layers go through kinds of attention, its variables, and its own weights."""
    args = {name: KINDS[name] for name in names}
    model = gpt("tiny", num_layers=len(names), attention=names, attention_args=args, **SHAPE)
    variables = drawn(model)
    run = jax.jit(lambda variables, ids: model.apply(variables, ids, return_weights=True).aux.weights["attention"])
    return model, variables, np.asarray(run(variables, jnp.array([IDS])))


def assert_bytes_show(shown, own):
    """The page's bytes are the model's own weights to less than a 255th, and rows sum to 255."""
    stored = eight_bits(shown)
    assert np.abs(stored.weights() - own).max() < 1 / 255
    assert (stored.values.sum(-1, dtype=int) == 255).all()
    assert (stored.values[own == 0] == 0).all()


def test_every_layer_s_own_weights_come_out_with_their_tokens():
    names = ("dense", "local", "lsh")
    model, variables, own = decoder(*names)
    state = {name: values for name, values in variables.items() if name != "params"}
    maps = record_attention(model, variables["params"], IDS, tokenizer=ByteTokenizer(), model_state=state)
    assert list(maps) == ["attention"]
    shown = maps["attention"]
    assert shown.rows == shown.columns == NAMES
    np.testing.assert_allclose(shown.weights, own[:, 0], atol=1e-6)
    np.testing.assert_allclose(shown.weights.sum(-1), 1, atol=1e-5)
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    assert (shown.weights[:, :, distance < 0] == 0).all()
    assert (shown.weights[0][:, distance >= 0] > 0).all()
    assert (shown.weights[1][:, distance > 2] == 0).all()
    assert (shown.weights[2][:, distance > 0] == 0).any(), "no two tokens were kept apart by their buckets"
    assert_bytes_show(shown.weights, own[:, 0])


def test_an_encoder_decoder_has_three_maps_of_its_own_weights():
    model = encoder_decoder(num_layers=2, num_encoder_layers=1, **{**SHAPE, "vocab_size": 11})
    ids, source = [1, 5, 6], [7, 8, 9, 10, 2]
    variables = drawn(model, source=jnp.zeros((1, 2), jnp.int32))
    tokens, across = jnp.array([ids]), jnp.array([source])
    run = jax.jit(lambda variables: model.apply(variables, tokens, source=across, return_weights=True).aux.weights)
    own = run(variables)
    maps = record_attention(model, variables["params"], ids, source_ids=source)
    assert {name: shown.weights.shape for name, shown in maps.items()} == {
        "encoder": (1, 2, 5, 5),
        "decoder": (2, 2, 3, 3),
        "cross": (2, 2, 3, 5),
    }
    for name, key in (("encoder", "encoder_attention"), ("decoder", "attention"), ("cross", "cross_attention")):
        np.testing.assert_allclose(maps[name].weights, own[key][:, 0], atol=1e-6)
        assert_bytes_show(maps[name].weights, np.asarray(own[key][:, 0]))
    assert (maps["decoder"].weights[..., np.triu_indices(3, 1)[0], np.triu_indices(3, 1)[1]] == 0).all()
    assert (maps["encoder"].weights > 0).all()
    assert (maps["cross"].rows, maps["cross"].columns[0]) == (("<1>", "<5>", "<6>"), "<7>")
    with pytest.raises(ValueError, match="the model needs source_ids"):
        record_attention(model, variables["params"], ids)


def encoder(attention, **args):
    options = {"num_layers": 1, "max_length": 8, **SHAPE, "vocab_size": 7, "attention_dropout_rate": 0.0}
    model = bert("tiny", attention=attention, attention_args=args, **options)
    return model, drawn(model)["params"]


def test_added_tokens_are_columns_of_their_own():
    shown = record_attention(*encoder("dilated", window=1, dilation=2, num_added=2), [1, 5, 6, 2])["attention"]
    assert shown.columns == ("<added 0>", "<added 1>", "<1>", "<5>", "<6>", "<2>")
    assert shown.rows == shown.columns[2:]
    np.testing.assert_allclose(shown.weights.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_linformer_has_factors_that_are_no_distribution():
    shown = record_attention(*encoder("linformer", rank=3), [1, 5, 6, 2])["attention"]
    assert shown.weights.min() < 0
    assert eight_bits(shown.weights).scales.all()


def test_layers_heads_and_a_window_are_parts_of_the_whole():
    model, variables, own = decoder("dense", "local", "lsh")
    state = {name: values for name, values in variables.items() if name != "params"}
    record = functools.partial(record_attention, model, variables["params"], IDS, tokenizer=ByteTokenizer())
    shown = record(model_state=state, layers=[2, 0], heads=[1], window=(4, 7))["attention"]
    np.testing.assert_allclose(shown.weights, own[[2, 0], 0, 1:, 4:7], atol=1e-6)
    assert (shown.rows, shown.columns) == (NAMES[4:7], NAMES)
    assert (shown.layers, shown.heads, shown.first_row, shown.total_rows) == ((2, 0), (1,), 4, 9)
    view = attention_view(shown, layers=[0])
    np.testing.assert_array_equal(view.maps["attention"].weights, shown.weights[1:])
    assert repr(view) == "AttentionView(attention: 1 layers of 1 heads, 3 tokens to 9)"
    groups = character_groups(ByteTokenizer(), IDS)
    joined = join_tokens(shown, groups, groups)
    assert (joined.rows, joined.columns[3], joined.first_row, joined.total_rows) == (("天", "!"), "天", 3, 7)
    np.testing.assert_allclose(joined.weights[..., 0, 1], shown.weights[..., :2, 1].mean(-1), atol=1e-6)


def test_parts_are_whole_numbers():
    assert make_part(np.array([1]), (0,), [np.int64(2), 5]) == ((1,), (0,), (2, 5))
    for given, message in (
        ((1, None, None), "layers=1 must be a sequence of whole numbers"),
        (([0.5], None, None), r"layers=\[0.5\] must be a sequence of whole numbers"),
        ((None, [-1], None), r"heads=\[-1\] must be numbers from 0 on"),
        ((None, "a", None), "heads='a' must be a sequence of whole numbers"),
        ((None, None, 3), "window=3 must be the first token and the one behind the last"),
        ((None, None, (1, 2, 3)), r"window=\(1, 2, 3\) must be the first token"),
        ((None, None, (3, 3)), r"window=\(3, 3\) must be the first token"),
    ):
        with pytest.raises(ValueError, match=message):
            make_part(*given)


def test_what_a_window_leaves_out_is_never_stacked(monkeypatch):
    model = gpt("tiny", num_layers=5, **SHAPE)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))

    def program(**part):
        given = {"layers": None, "heads": None, "window": None, **part}
        apply = functools.partial(recording.model_weights, model, part=make_part(**given))
        return str(jax.make_jaxpr(lambda *args: apply(*args, {}))(shapes, jnp.zeros((1, 9), jnp.int32)))

    assert "f32[5,1,2,9,9]" in program()
    assert "f32[5,1,2,9,9]" not in program(window=(2, 5))
    assert "f32[5,1,2,3,9]" in program(window=(2, 5))
    monkeypatch.setattr(recording, "_LARGEST", 4 * 5 * 2 * 3 * 9)
    program(window=(2, 5), layers=[0])
    program(heads=[1], window=(1, 7))
    with pytest.raises(ValueError, match="give fewer tokens, a window of at most 3 tokens, or fewer heads"):
        program(layers=[0])


def test_what_can_t_be_recorded_is_refused():
    model, variables, _ = decoder("dense", "local")
    for options, message in (
        ({"token_ids": []}, "token_ids.0. is empty"),
        ({"token_ids": [259]}, "holds the id 259"),
        ({"token_ids": [1], "source_ids": [1]}, "has no encoder of its own, so source_ids must be None"),
        ({"token_ids": [1, 2], "token_types": [0]}, r"token_types has shape \(1,\); must be one a token, \(2,\)"),
        ({"token_ids": [1], "layers": [2]}, r"layers=\(2,\) must be numbers in \[0, 1\] of the model's attention"),
        ({"token_ids": [1], "heads": []}, r"heads=\[\] must be numbers from 0 on, at least one"),
        ({"token_ids": [1, 2], "window": (2, 5)}, r"window=\(2, 5\) begins behind the 2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            record_attention(model, variables["params"], **options)
    long = gpt("tiny", num_layers=2, **SHAPE, max_length=50_000)
    shapes = jax.eval_shape(lambda: long.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    with pytest.raises(ValueError, match=r"take 23\.8 GiB in all layers, more than the 4 GiB that are recorded"):
        record_attention(long, shapes["params"], np.zeros(40_000, np.int32))
    args = {"dilated": {"window": 1, "dilation": 2, "num_added": 1}}
    mixed = gpt("tiny", num_layers=2, attention=("dilated", "dense"), attention_args=args, **SHAPE)
    with pytest.raises(ValueError, match=r"different numbers of tokens in different layers \(num_added=\[0, 1\]\)"):
        record_attention(mixed, {}, [1])
    for params in ({}, variables):
        with pytest.raises(ValueError, match=r"params must be the model's parameters: variables\['params'\]"):
            record_attention(model, params, [1])


def test_tokens_that_spell_a_character_together_are_one():
    tokenizer = ByteTokenizer()
    ids = [256, *"aé天😀".encode(), 0xFF, 0xE5, 0xA4, 257]
    texts, starts = character_groups(tokenizer, ids)
    assert texts == ("<bos>", "a", "é", "天", "😀", "<255>", "<229>", "<164>", "<eos>")
    assert starts.tolist() == [0, 1, 2, 4, 7, 11, 12, 13, 14]
    letters = CharacterTokenizer(tuple("abc"))
    assert character_groups(letters, letters.encode("cab"))[0] == ("c", "a", "b")
    assert token_texts(None, [3, 4]) == ("<3>", "<4>")


def test_joined_weights_are_sums_of_columns_and_means_of_rows():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5)).astype(np.float32)
    shown = AttentionMap(weights, tuple("vwxyz"), tuple("vwxyz"))
    groups = (("v", "wx", "yz"), np.array([0, 1, 3]))
    joined = join_tokens(shown, groups, groups)
    expected = np.zeros((2, 3, 3, 3))
    members = ([0], [1, 2], [3, 4])
    for i, rows in enumerate(members):
        for j, columns in enumerate(members):
            expected[:, :, i, j] = weights[:, :, rows][..., columns].sum(-1).mean(-1)
    np.testing.assert_allclose(joined.weights, expected, atol=1e-6)
    np.testing.assert_allclose(joined.weights.sum(-1), 1, atol=1e-5)
    assert joined.rows == joined.columns == ("v", "wx", "yz")
    with pytest.raises(ValueError, match="columns has 2 texts and first tokens"):
        join_tokens(shown, None, (("a", "b"), np.array([0, 5])))
