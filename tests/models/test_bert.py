"""BERT, RoBERTa and DistilBERT: published counts, the papers' formulas in plain numpy, padding, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from jaxformer.models import TransformerConfig, bert, distilbert, gpt, roberta

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "max_length": 16, "init_stddev": 0.3}


def random_params(model):
    """Parameters drawn without compiling: biases and scales too, so that no part can be left out unseen."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32)))["params"]
    draws = np.random.default_rng(0)

    def draw(path, leaf):
        values = draws.normal(0.0, 0.3, leaf.shape).astype(np.float32)
        return jnp.asarray(values + (path[-1].key == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


def _count(model, **kwargs):
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), **kwargs))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("preset", "size", "method", "count"),
    [
        (bert, "base", "pooled", 109_482_240),
        (bert, "base", "__call__", 110_106_428),
        (bert, "large", "pooled", 335_141_888),
        (bert, "tiny", "pooled", 4_385_920),
        pytest.param(bert, "mini", "pooled", 11_170_560, marks=pytest.mark.slow),
        pytest.param(bert, "small", "pooled", 28_763_648, marks=pytest.mark.slow),
        pytest.param(bert, "medium", "pooled", 41_373_184, marks=pytest.mark.slow),
        (roberta, "base", "__call__", 124_697_433),
        (roberta, "large", "__call__", 355_412_057),
        (distilbert, "base", "hidden", 66_362_880),
        (distilbert, "base", "__call__", 66_985_530),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, size, method, count):
    assert _count(preset(size), method=method) == count


def _norm(p, x, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def _dense(p, x):
    return x @ p["kernel"] + p["bias"]


def _gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def _bert_by_hand(params, tokens, types, mask, epsilon=1e-12, heads=3):
    """Devlin et al. 2019 written out in float64, one row and one head at a time: (hidden, token logits, next)."""
    params = jax.tree.map(np.float64, params)
    encoder, hidden = params["encoder"], []
    for row, kinds, real in zip(np.asarray(tokens), np.asarray(types), np.asarray(mask)):
        x = params["token_embedding"]["embedding"][row]
        x = x + params["token_type_embedding"]["embedding"][kinds]
        x = x + encoder["position_embedding"]["embedding"][: len(row)]
        x = _norm(encoder["embedding_norm"], x, epsilon)
        for layer in range(2):
            p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], encoder["layers"])
            query, key, value = (np.split(_dense(p["attention"][n], x), heads, -1) for n in ("query", "key", "value"))
            outs = []
            for q, k, v in zip(query, key, value):
                weights = np.where(real[None], np.exp(q @ k.T / np.sqrt(q.shape[-1])), 0.0)
                outs.append(weights / weights.sum(-1, keepdims=True) @ v)
            x = _norm(p["attention_norm"], x + _dense(p["attention"]["out"], np.concatenate(outs, -1)), epsilon)
            x = _norm(p["mlp_norm"], x + _dense(p["mlp"]["down"], _gelu(_dense(p["mlp"]["up"], x))), epsilon)
        hidden.append(x)
    hidden = np.stack(hidden)
    transformed = _norm(params["head_norm"], _gelu(_dense(params["head_transform"], hidden)), epsilon)
    logits = transformed @ params["token_embedding"]["embedding"].T + params["head_bias"]["bias"]
    follows = _dense(params["next_sentence_head"], np.tanh(_dense(params["pooler"], hidden[:, 0])))
    return hidden, logits, follows


TOKENS = jax.random.randint(jax.random.key(3), (3, 6), 0, 13)
TYPES = jnp.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]])
MASK = jnp.arange(6)[None] < jnp.array([[6], [4], [5]])


@pytest.fixture(scope="module")
def tiny_bert():
    model = bert(**SHAPE)
    return model, random_params(model)


def test_both_heads_are_the_papers_formulas(tiny_bert):
    model, params = tiny_bert
    out = _apply(model, params, TOKENS, {"token_types": TYPES, "key_mask": MASK})
    _, logits, follows = _bert_by_hand(params, TOKENS, TYPES, MASK)
    real = np.asarray(MASK)
    np.testing.assert_allclose(np.asarray(out.logits)[real], logits[real], atol=2e-5)
    np.testing.assert_allclose(out.next_sentence, follows, atol=2e-5)
    assert out.logits.dtype == out.next_sentence.dtype == jnp.float32


def test_types_are_zero_by_default_and_each_counts(tiny_bert):
    model, params = tiny_bert
    plain = _apply(model, params, TOKENS, {"key_mask": MASK})
    zero = _apply(model, params, TOKENS, {"token_types": jnp.zeros_like(TYPES), "key_mask": MASK})
    other = _apply(model, params, TOKENS, {"token_types": TYPES, "key_mask": MASK})
    np.testing.assert_array_equal(plain.logits, zero.logits)
    assert np.abs(plain.logits - other.logits).max() > 1e-2


def test_selected_positions_go_through_the_whole_head(tiny_bert):
    model, params = tiny_bert
    select = jnp.array([[5, 0], [3, 3], [1, 2]])
    inputs = {"token_types": TYPES, "key_mask": MASK}
    whole, some = _apply(model, params, TOKENS, inputs), _apply(model, params, TOKENS, {**inputs, "select": select})
    expected = jnp.take_along_axis(whole.logits, select[..., None], axis=1)
    np.testing.assert_allclose(some.logits, expected, atol=1e-5)
    np.testing.assert_allclose(some.next_sentence, whole.next_sentence, atol=1e-5)


def test_the_pooler_reads_the_first_real_token(tiny_bert):
    model, params = tiny_bert
    pooled = jax.jit(functools.partial(model.apply, method="pooled"))
    alone = pooled({"params": params}, TOKENS[:, :4])
    padded = jnp.pad(TOKENS[:, :4], ((0, 0), (2, 0)), constant_values=7)
    positions = jnp.broadcast_to(jnp.maximum(jnp.arange(6) - 2, 0)[None], (3, 6))
    mask = jnp.broadcast_to(jnp.arange(6)[None] >= 2, (3, 6))
    left = pooled({"params": params}, padded, positions=positions, key_mask=mask)
    np.testing.assert_allclose(left, alone, atol=1e-5)


def test_rows_added_to_the_vocabulary_are_never_seen(tiny_bert):
    exact, params = tiny_bert
    padded = bert(**SHAPE, vocab_multiple=8)
    wide = {
        **params,
        "token_embedding": {"embedding": jnp.pad(params["token_embedding"]["embedding"], ((0, 3), (0, 0)))},
        "head_bias": {"bias": jnp.pad(params["head_bias"]["bias"], (0, 3), constant_values=9.0)},
    }
    shapes = jax.eval_shape(lambda: padded.init(jax.random.key(0), TOKENS))["params"]
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, shapes)
    inputs = {"key_mask": MASK}
    expected = _apply(exact, params, TOKENS, inputs).logits
    np.testing.assert_allclose(_apply(padded, wide, TOKENS, inputs).logits, expected, atol=1e-6)


@pytest.mark.slow
def test_low_precision_stays_close():
    exact, low = bert(**SHAPE), bert(**SHAPE, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf * 0.5, random_params(exact))
    expected, out = _apply(exact, params, TOKENS, {}), _apply(low, params, TOKENS, {})
    assert out.logits.dtype == out.next_sentence.dtype == jnp.float32
    np.testing.assert_allclose(out.logits, expected.logits, atol=0.1)
    np.testing.assert_allclose(out.next_sentence, expected.next_sentence, atol=0.1)


@pytest.fixture(scope="module")
def tiny_roberta():
    model = roberta(**SHAPE)
    return model, random_params(model)


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [2, 3, 4, 5], [0, 2, 3, 5]], ids=["right", "left", "between"])
def test_padding_gives_the_row_alone_wherever_it_is(tiny_roberta, places):
    model, params = tiny_roberta
    row = TOKENS[:1, :4]
    padded = jnp.ones((1, 6), jnp.int32).at[0, jnp.array(places)].set(row[0])
    mask = jnp.zeros((1, 6), bool).at[0, jnp.array(places)].set(True)
    out = _apply(model, params, padded, {"key_mask": mask}).logits[:, jnp.array(places)]
    np.testing.assert_allclose(out, _apply(model, params, row, {}).logits, atol=1e-5)


def test_positions_begin_at_the_offset(tiny_roberta):
    model, params = tiny_roberta
    table = params["encoder"]["position_embedding"]["embedding"]
    assert table.shape == (18, 12)
    # The rows before the offset are read by nothing.
    spoilt = {**params, "encoder": {**params["encoder"], "position_embedding": {"embedding": table.at[:2].set(99.0)}}}
    out = _apply(model, spoilt, TOKENS, {"key_mask": MASK}).logits
    np.testing.assert_array_equal(out, _apply(model, params, TOKENS, {"key_mask": MASK}).logits)
    rows = {**params, "encoder": {**params["encoder"], "position_embedding": {"embedding": table[2:]}}}
    plain = roberta(**SHAPE, position_offset=0)
    given = {"key_mask": MASK, "positions": jnp.broadcast_to(jnp.arange(6)[None], (3, 6))}
    np.testing.assert_allclose(_apply(plain, rows, TOKENS, given).logits[0], out[0], atol=1e-5)


def test_a_whole_row_fits_the_table():
    model = roberta(**SHAPE)
    jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32)))
    with pytest.raises(ValueError, match="tokens has 17 positions, more than max_length=16"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_token_types": -1}, "num_token_types=-1 must be an integer of at least 0"),
        ({"num_token_types": 2, "architecture": "encoder_decoder"}, "num_token_types=2 needs architecture="),
        ({"next_sentence": True}, "next_sentence=True needs architecture='encoder', not 'decoder'"),
        ({"position_offset": 2, "positions": "rotary"}, "position_offset=2 needs positions='learned'"),
        ({"position_offset": -1}, "position_offset=-1 must be an integer of at least 0"),
        ({"positions_skip_padding": True}, "positions_skip_padding=True needs architecture='encoder'"),
        (
            {"positions_skip_padding": True, "architecture": "encoder", "positions": "alibi"},
            "positions_skip_padding=True needs positions of learned, axial, sinusoidal",
        ),
        ({"embedding_norm": True, "stack": "universal"}, "embedding_norm=True needs stack='plain'"),
        ({"scale_logits": True, "tie_embeddings": False}, "scale_logits=True needs tie_embeddings=True"),
        ({"head_bias": True, "num_future_tokens": 2}, "head_bias=True can't be with num_future_tokens=2"),
        ({"final_dropout_rate": 1.0}, "final_dropout_rate=1.0 must be a number in"),
        ({"kernel_init": "fan_out"}, "kernel_init='fan_out' must be one of normal, xavier_uniform, fan_in"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SHAPE, **change})


def test_calls_that_do_not_fit_are_refused(tiny_bert):
    model, params = tiny_bert
    with pytest.raises(ValueError, match="head_transform=True: the output head is not a kernel alone"):
        model.apply({"params": params}, method="head_kernel")
    plain = gpt(**SHAPE)
    with pytest.raises(ValueError, match="token_types were given, but num_token_types=0"):
        jax.eval_shape(lambda: plain.init(jax.random.key(0), TOKENS, token_types=TYPES))
    with pytest.raises(ValueError, match="pooled needs next_sentence=True"):
        jax.eval_shape(lambda: plain.init(jax.random.key(0), TOKENS, method="pooled"))
    tied = bert(**SHAPE, head_transform=False)
    with pytest.raises(ValueError, match="head_bias=True: the output head is not a kernel alone"):
        tied.apply({"params": params}, method="head_kernel")
