"""GPT: published sizes, causality, packing, padding, decoding, precision and the ability to learn."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.functional import cross_entropy
from jaxformer.models import gpt

SHAPE = {"vocab_size": 13, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "max_length": 32, "init_stddev": 0.4}
MODERN = {
    **SHAPE,
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "num_kv_heads": 1,
    "use_bias": False,
    "tie_embeddings": False,
}
VARIANTS = {
    "gpt2": SHAPE,
    "modern": MODERN,
    "alibi": {**SHAPE, "positions": "alibi"},
    "relative": {**SHAPE, "positions": "relative"},
    "sinusoidal": {**SHAPE, "positions": "sinusoidal"},
}


def init_params(model, *args, **kwargs):
    return jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(1))["params"]


def _tokens(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, SHAPE["vocab_size"])


# Every run tests two of them; the others differ from these in their positions alone.
FIRST = ("gpt2", "modern")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in sorted(VARIANTS)],
)
def model_and_params(request):
    model = gpt(**VARIANTS[request.param])
    params = init_params(model, _tokens(1, 4))
    return model, params


def _logits(model, params, tokens, **kwargs):
    return _apply(model, params, tokens, kwargs).logits


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


@pytest.mark.parametrize(
    ("size", "count"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_parameter_counts_are_the_published_ones(size, count):
    model = gpt(size)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_no_logit_depends_on_a_later_token(model_and_params):
    model, params = model_and_params
    tokens = _tokens(1, 7)

    def from_embeddings(delta):
        table = params["token_embedding"]["embedding"]
        # One private row per position makes the embedding of a position an independent input.
        rows = table[tokens[0]] + delta
        private = {**params, "token_embedding": {"embedding": jnp.concatenate([rows, table[7:]])}}
        hidden, _ = model.apply({"params": private}, jnp.arange(7)[None], method="hidden")
        return hidden[0]

    jacobian = jax.jit(jax.jacrev(from_embeddings))(jnp.zeros((7, SHAPE["embed_dim"])))
    influence = np.abs(jacobian).sum((1, 3))
    np.testing.assert_array_equal(influence[np.triu_indices(7, 1)], 0.0)
    assert (influence[np.tril_indices(7)] > 0).all()


def test_packed_documents_equal_the_documents_alone(model_and_params):
    model, params = model_and_params
    first, second = jnp.array([[5, 6, 7]]), jnp.array([[8, 9]])
    packed = jnp.concatenate([first, second], 1)
    layout = {"segments": jnp.array([[1, 1, 1, 2, 2]]), "positions": jnp.array([[0, 1, 2, 0, 1]])}
    logits = _logits(model, params, packed, **layout)
    np.testing.assert_allclose(logits[:, :3], _logits(model, params, first), atol=1e-5)
    np.testing.assert_allclose(logits[:, 3:], _logits(model, params, second), atol=1e-5)
    changed = _logits(model, params, packed.at[:, :3].set(jnp.array([1, 2, 3])), **layout)
    np.testing.assert_array_equal(changed[:, 3:], logits[:, 3:])


def test_packed_loss_and_gradient_equal_the_unpacked(model_and_params):
    model, params = model_and_params

    def packed(params):
        out = _logits(
            model,
            params,
            jnp.array([[5, 6, 8, 0]]),
            segments=jnp.array([[1, 1, 2, 0]]),
            positions=jnp.array([[0, 1, 0, 0]]),
        )
        return cross_entropy(out, jnp.array([[6, 7, 9, -100]])).loss_sum

    def alone(params):
        first = cross_entropy(_logits(model, params, jnp.array([[5, 6]])), jnp.array([[6, 7]])).loss_sum
        return first + cross_entropy(_logits(model, params, jnp.array([[8]])), jnp.array([[9]])).loss_sum

    loss, grads = jax.jit(jax.value_and_grad(packed))(params)
    expected, expected_grads = jax.jit(jax.value_and_grad(alone))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, expected_grads)


def test_left_padding_changes_nothing(model_and_params):
    model, params = model_and_params
    short = jnp.array([[5, 6, 7]])
    padded = jnp.array([[0, 0, 5, 6, 7]])
    for filler in (0, 11):
        out = _logits(
            model,
            params,
            padded.at[:, :2].set(filler),
            positions=jnp.array([[0, 0, 0, 1, 2]]),
            key_mask=jnp.array([[False, False, True, True, True]]),
        )
        np.testing.assert_allclose(out[:, 2:], _logits(model, params, short), atol=1e-5)


@pytest.mark.parametrize("split", [(1,) * 7, (3, 1, 1, 1, 1), (2, 2, 3)])
def test_cached_decoding_equals_the_full_pass(model_and_params, split):
    model, params = model_and_params
    tokens = _tokens(2, 7)
    expected = _logits(model, params, tokens)
    cache, start, pieces = model.init_cache(2, 9), 0, []
    for size in split:
        out = _apply(model, params, tokens[:, start : start + size], {"cache": cache})
        cache, start = out.aux.cache, start + size
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


def test_packed_documents_stay_apart_in_the_cache(model_and_params):
    model, params = model_and_params
    tokens = _tokens(1, 5)
    layout = {"segments": jnp.array([[1, 1, 1, 2, 2]]), "positions": jnp.array([[0, 1, 2, 0, 1]])}
    expected = _logits(model, params, tokens, **layout)
    np.testing.assert_allclose(
        _logits(model, params, tokens, **layout, cache=model.init_cache(1, 7)), expected, atol=1e-5
    )


def test_selected_positions_give_their_own_logits(model_and_params):
    model, params = model_and_params
    tokens = _tokens(2, 7)
    select = jnp.array([[6, 0], [3, 3]])
    expected = jnp.take_along_axis(_logits(model, params, tokens), select[..., None], axis=1)
    np.testing.assert_allclose(_logits(model, params, tokens, select=select), expected, atol=1e-6)


def test_batch_rows_do_not_influence_each_other(model_and_params):
    model, params = model_and_params
    tokens = _tokens(3, 5)
    np.testing.assert_allclose(_logits(model, params, tokens)[1:2], _logits(model, params, tokens[1:2]), atol=1e-5)


def test_padding_the_vocabulary_changes_nothing():
    exact, padded = gpt(**SHAPE), gpt(**SHAPE, vocab_multiple=8)
    tokens = _tokens(2, 5)
    params = init_params(exact, tokens)
    table = params["token_embedding"]["embedding"]
    wide = {**params, "token_embedding": {"embedding": jnp.pad(table, ((0, 3), (0, 0)), constant_values=7.0)}}
    shapes = jax.eval_shape(lambda: padded.init(jax.random.key(0), tokens))["params"]
    assert shapes["token_embedding"]["embedding"].shape == (16, SHAPE["embed_dim"])
    np.testing.assert_allclose(_logits(padded, wide, tokens), _logits(exact, params, tokens), atol=1e-6)


def test_all_zero_logits_cost_the_entropy_of_the_real_vocabulary():
    model = gpt(vocab_size=5, num_layers=1, embed_dim=4, num_heads=1, max_length=8, vocab_multiple=8)
    tokens = jnp.array([[0, 1, 2]])
    params = jax.tree.map(jnp.zeros_like, init_params(model, tokens))
    losses = cross_entropy(_logits(model, params, tokens), jnp.array([[1, 2, 4]]))
    np.testing.assert_allclose(losses.loss_sum / losses.weight_sum, math.log(5), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_close_with_float32_parameters_and_logits(dtype):
    exact, low = gpt(**{**SHAPE, "init_stddev": 0.1}), gpt(**{**SHAPE, "init_stddev": 0.1}, dtype=dtype)
    tokens = _tokens(2, 7)
    params = init_params(low, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    out = _logits(low, params, tokens)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, _logits(exact, params, tokens), atol=0.05)


def test_attention_weights_come_out_of_the_scan_in_layer_order():
    scanned, unrolled = gpt(**SHAPE), gpt(**SHAPE, scan_layers=False)
    tokens = _tokens(2, 5)
    params = init_params(scanned, tokens)

    @functools.partial(jax.jit, static_argnums=0)
    def weights_of(model, params):
        return model.apply({"params": params}, tokens, return_weights=True).aux.weights["attention"]

    weights = weights_of(scanned, params)
    assert weights.shape == (2, 2, 3, 5, 5)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    layer = jax.tree.map(lambda leaf: leaf[1], params["decoder"]["layers"])
    first = jax.tree.map(lambda leaf: leaf[0], params["decoder"]["layers"])
    rest = {name: value for name, value in params["decoder"].items() if name != "layers"}
    split = {**params, "decoder": {**rest, "layers_0": first, "layers_1": layer}}
    np.testing.assert_allclose(weights, weights_of(unrolled, split), atol=1e-6)


def test_too_many_tokens_for_learned_positions_are_refused():
    model = gpt(**SHAPE)
    with pytest.raises(ValueError, match="tokens has 33 positions, more than max_length=32"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), _tokens(1, 33)))


@pytest.mark.slow
def test_running_past_learned_positions_in_a_cache_is_refused():
    model = gpt(**SHAPE)
    params = init_params(model, _tokens(1, 4))
    out = model.apply({"params": params}, _tokens(1, 30), cache=model.init_cache(1, 64))
    with pytest.raises(ValueError, match="tokens has 3 positions after the 30 of the cache, more than max_length=32"):
        model.apply({"params": params}, _tokens(1, 3), cache=out.aux.cache)


def test_weights_with_a_cache_are_refused():
    model = gpt(**SHAPE)
    params = init_params(model, _tokens(1, 4))
    with pytest.raises(ValueError, match="return_weights can't be given with a cache"):
        model.apply({"params": params}, _tokens(1, 3), cache=model.init_cache(1, 4), return_weights=True)


def test_a_tiny_model_learns_a_sentence_by_heart():
    model = gpt(vocab_size=13, num_layers=1, embed_dim=16, num_heads=2, max_length=16)
    tokens = _tokens(2, 12, seed=4)
    params = init_params(model, tokens)
    optimizer = optax.adam(1e-2)

    def loss(params):
        out = cross_entropy(_logits(model, params, tokens[:, :-1]), tokens[:, 1:])
        return out.loss_sum / out.weight_sum

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    _, losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=120))((params, optimizer.init(params)))
    np.testing.assert_allclose(losses[0], math.log(13), atol=0.1)
    assert losses[-1] < 0.2
