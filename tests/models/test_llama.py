"""Llama and the first GPT: published counts, Llama's formulas in plain numpy, cached decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import gpt_2018, llama

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 24}
SHAPE |= {"max_length": 32, "rotary_base": 100.0}
TOKENS = jax.random.randint(jax.random.key(4), (2, 6), 0, 13)


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


@pytest.fixture(scope="module")
def model_and_params():
    model = llama(**SHAPE)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))["params"]
    draws = np.random.default_rng(0)

    def draw(path, leaf):
        values = draws.normal(0.0, 0.4, leaf.shape).astype(np.float32)
        return jnp.asarray(values + (path[-1].key == "scale"))

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize(
    ("preset", "size", "count"),
    [
        (gpt_2018, "base", 116_534_784),
        (llama, "1b", 1_235_814_400),
        (llama, "3b", 3_212_749_824),
        (llama, "7b", 6_738_415_616),
        (llama, "8b", 8_030_261_248),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, size, count):
    model = preset(size)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def _rms(p, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def _turned(x, base=100.0):
    """Su et al. 2021, equation 34, as complex numbers: feature i with feature i + width / 2."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)[None]
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def _llama_by_hand(params, tokens):
    """Touvron et al. 2023, section 2.2, one row in float64: logits."""
    params = jax.tree.map(np.float64, params)
    x = params["token_embedding"]["embedding"][np.asarray(tokens)]
    for layer in range(2):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["decoder"]["layers"])
        normed, outs = _rms(p["attention_norm"], x), []
        query = np.split(normed @ p["attention"]["query"]["kernel"], 4, -1)
        key, value = (np.split(normed @ p["attention"][name]["kernel"], 2, -1) for name in ("key", "value"))
        for head in range(4):
            logits = _turned(query[head]) @ _turned(key[head // 2]).T / np.sqrt(4)
            weights = np.where(np.tri(len(x), dtype=bool), np.exp(logits), 0.0)
            outs.append(weights / weights.sum(-1, keepdims=True) @ value[head // 2])
        x = x + np.concatenate(outs, -1) @ p["attention"]["out"]["kernel"]
        normed = _rms(p["mlp_norm"], x)
        gate = normed @ p["mlp"]["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ p["mlp"]["up"]["kernel"])) @ p["mlp"]["down"]["kernel"]
    return _rms(params["decoder"]["final_norm"], x) @ params["output_head"]["kernel"]


def test_logits_are_the_papers_formulas(model_and_params):
    model, params = model_and_params
    expected = np.stack([_llama_by_hand(params, row) for row in TOKENS])
    np.testing.assert_allclose(_apply(model, params, TOKENS, {}).logits, expected, atol=3e-5)


def test_one_token_at_a_time_equals_the_full_pass(model_and_params):
    model, params = model_and_params
    expected = _apply(model, params, TOKENS, {}).logits
    cache, pieces = model.init_cache(2, 8), []
    for column in range(6):
        out = _apply(model, params, TOKENS[:, column : column + 1], {"cache": cache})
        cache = out.aux.cache
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


def test_the_first_gpt_is_post_norm_without_a_final_one():
    model = gpt_2018("tiny")
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))["params"]
    assert set(shapes["decoder"]) == {"layers", "position_embedding"}
    assert set(shapes) == {"token_embedding", "decoder"}


@pytest.mark.parametrize("preset", [llama, gpt_2018])
def test_an_unknown_size_is_refused(preset):
    with pytest.raises(ValueError, match="size='huge' must be one of tiny"):
        preset("huge")
