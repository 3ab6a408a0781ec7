"""T5: published counts, its formulas in plain numpy, cached decoding, the scale of its logits and how it begins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import Transformer, TransformerConfig, t5, t5_v1_1

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "head_dim": 5, "mlp_dim": 20}
# Few buckets and a small distance, so that a row of six tokens meets all kinds of them.
SHAPE |= {"relative_buckets": 8, "relative_max_distance": 5}


def random_params(model):
    """Parameters drawn without compiling, the scales of norms around one."""
    tokens = jnp.zeros((1, 3), jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, source=tokens))["params"]
    draws = np.random.default_rng(0)

    def draw(path, leaf):
        values = draws.normal(0.0, 0.4, leaf.shape).astype(np.float32)
        return jnp.asarray(values + (path[-1].key == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


@pytest.mark.parametrize(
    ("preset", "size", "count"),
    [
        (t5, "small", 60_506_624),
        (t5, "base", 222_903_552),
        (t5, "large", 737_668_096),
        (t5, "3b", 2_851_598_336),
        (t5_v1_1, "small", 76_961_152),
        (t5_v1_1, "base", 247_577_856),
        (t5_v1_1, "large", 783_150_080),
        (t5_v1_1, "xl", 2_849_757_184),
        pytest.param(t5_v1_1, "xxl", 11_135_332_352, marks=pytest.mark.slow),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, size, count):
    model, tokens = preset(size), jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, source=tokens))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


SOURCE = jax.random.randint(jax.random.key(3), (2, 5), 0, 13)
SOURCE_MASK = jnp.arange(5)[None] < jnp.array([[5], [3]])
TOKENS = jax.random.randint(jax.random.key(4), (2, 6), 0, 13)


@pytest.fixture(scope="module", params=[t5, t5_v1_1])
def model_and_params(request):
    model = request.param(**SHAPE)
    return model, random_params(model)


def _bucket(distance, two_way, buckets=8, longest=5):
    """Raffel et al. 2020, section 2.1, for key position minus query position."""
    start = 0
    if two_way:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    share = np.log(distance / exact) / np.log(longest / exact)
    return start + min(exact + int(share * (buckets - exact)), buckets - 1)


def _rms(p, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def _attend(p, x, memory, visible, bias):
    """No factor on the products; ``bias`` [heads, queries, keys]."""
    query, key, value = (
        np.split(source @ p[name]["kernel"], 3, -1)
        for name, source in {"query": x, "key": memory, "value": memory}.items()
    )
    outs = []
    for q, k, v, own in zip(query, key, value, bias):
        weights = np.where(visible, np.exp(q @ k.T + own), 0.0)
        outs.append(weights / weights.sum(-1, keepdims=True) @ v)
    return np.concatenate(outs, -1) @ p["out"]["kernel"]


def _feed(p, x):
    up = x @ p["up"]["kernel"]
    if "gate" in p:
        gate = x @ p["gate"]["kernel"]
        hidden = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    else:
        hidden = np.maximum(up, 0.0)
    return hidden @ p["down"]["kernel"]


def _side(params, x, visible, two_way, memory=None, memory_visible=None):
    length = len(x)
    table = params["relative_bias"]["embedding"]
    buckets = [[_bucket(key - query, two_way) for key in range(length)] for query in range(length)]
    bias = np.moveaxis(table[np.array(buckets)], -1, 0)
    for layer in range(2):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        normed = _rms(p["attention_norm"], x)
        x = x + _attend(p["attention"], normed, normed, visible, bias)
        if memory is not None:
            none = np.zeros((3, length, len(memory)))
            x = x + _attend(p["cross_attention"], _rms(p["cross_attention_norm"], x), memory, memory_visible, none)
        x = x + _feed(p["mlp"], _rms(p["mlp_norm"], x))
    return _rms(params["final_norm"], x)


def _t5_by_hand(params, tokens, source, source_mask):
    """One row at a time in float64: logits."""
    params = jax.tree.map(np.float64, params)
    table, rows = params["token_embedding"]["embedding"], []
    for target, given, real in zip(np.asarray(tokens), np.asarray(source), np.asarray(source_mask)):
        memory = _side(params["encoder"], table[given], real[None], True)
        causal = np.tri(len(target), dtype=bool)
        hidden = _side(params["decoder"], table[target], causal, False, memory, real[None])
        if "output_head" in params:
            rows.append(hidden @ params["output_head"]["kernel"])
        else:
            rows.append(hidden / np.sqrt(12) @ table.T)
    return np.stack(rows)


def test_logits_are_the_papers_formulas(model_and_params):
    model, params = model_and_params
    out = _apply(model, params, TOKENS, {"source": SOURCE, "source_mask": SOURCE_MASK})
    np.testing.assert_allclose(out.logits, _t5_by_hand(params, TOKENS, SOURCE, SOURCE_MASK), atol=3e-5)


def test_one_token_at_a_time_equals_the_full_pass(model_and_params):
    model, params = model_and_params
    expected = _apply(model, params, TOKENS, {"source": SOURCE, "source_mask": SOURCE_MASK}).logits
    start = jax.jit(lambda params: model.apply({"params": params}, SOURCE, 8, source_mask=SOURCE_MASK, method="start"))
    cache, pieces = start(params), []
    for column in range(6):
        out = _apply(model, params, TOKENS[:, column : column + 1], {"cache": cache})
        cache = out.aux.cache
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


def test_the_head_is_its_kernel(model_and_params):
    model, params = model_and_params
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 12))
    kernel = model.apply({"params": params}, method="head_kernel")
    np.testing.assert_allclose(hidden @ kernel, model.apply({"params": params}, hidden, method="head"), atol=1e-5)


@pytest.mark.slow
def test_parameters_begin_as_in_mesh_tensorflow():
    model = t5(**{**SHAPE, "num_layers": 1, "embed_dim": 96, "head_dim": 64, "mlp_dim": 400, "vocab_size": 500})
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(lambda key: model.init(key, tokens, source=tokens))(jax.random.key(1))["params"]
    layer = params["decoder"]["layers"]
    expected = {
        "query": (layer["attention"]["query"]["kernel"], (96 * 64) ** -0.5),
        "cross query": (layer["cross_attention"]["query"]["kernel"], (96 * 64) ** -0.5),
        "key": (layer["attention"]["key"]["kernel"], 96**-0.5),
        "value": (layer["cross_attention"]["value"]["kernel"], 96**-0.5),
        "out": (layer["attention"]["out"]["kernel"], (3 * 64) ** -0.5),
        "up": (layer["mlp"]["up"]["kernel"], 96**-0.5),
        "down": (layer["mlp"]["down"]["kernel"], 400**-0.5),
        "embedding": (params["token_embedding"]["embedding"], 1.0),
    }
    for name, (leaf, stddev) in expected.items():
        np.testing.assert_allclose(leaf.std(), stddev, rtol=0.03, err_msg=name)


@pytest.mark.slow
def test_the_last_dropout_drops_of_both_sides():
    fields = {**SHAPE, "num_layers": 1, "dropout_rate": 0.0, "attention_dropout_rate": 0.0, "mlp_dropout_rate": 0.0}
    model = t5(**fields, final_dropout_rate=0.5)
    params = random_params(model)
    source, tokens = jnp.tile(SOURCE, (20, 1)), jnp.tile(TOKENS, (20, 1))
    run = functools.partial(model.apply, {"params": params}, rngs={"dropout": jax.random.key(0)}, deterministic=False)
    hidden, _ = run(tokens, source=source, method="hidden")
    memory = run(source, method="encode")
    for states in (hidden, memory):
        np.testing.assert_allclose((states == 0).mean(), 0.5, atol=0.05)
    kept = model.apply({"params": params}, source, method="encode")
    np.testing.assert_allclose(memory, jnp.where(memory == 0, 0.0, 2.0 * kept), rtol=1e-4)
    assert model.config.is_random


def test_scaled_logits_need_a_tied_head():
    with pytest.raises(ValueError, match="scale_logits=True needs tie_embeddings=True"):
        t5(**SHAPE, tie_embeddings=False)
    untied = Transformer(TransformerConfig(vocab_size=13, num_layers=1, embed_dim=8, num_heads=2, tie_embeddings=False))
    assert not untied.config.scale_logits
