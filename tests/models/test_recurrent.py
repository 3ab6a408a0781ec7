"""The recurrent model against its equations written as numpy loops, its padding, caches and ways of generating."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import beam_search, generate, score
from jaxformer.models import RecurrentConfig, recurrent

SIZES = {"vocab_size": 11, "embed_dim": 5, "hidden_dim": 6, "init_stddev": 0.5}
VARIANTS = {
    "bahdanau": {"attention_dim": 4},
    "luong": {"convention": "luong", "attention": "general", "cell": "lstm", "num_layers": 2},
    "dot": {"attention": "dot", "share_embeddings": False, "bidirectional": False},
    "scaled": {"attention": "scaled_dot", "convention": "luong"},
    "none": {"attention": "none", "cell": "lstm"},
}
SOURCE = jnp.array([[3, 4, 5, 6], [7, 8, 0, 0]])
MASK = jnp.array([[True] * 4, [True, True, False, False]])
TOKENS = jnp.array([[1, 9, 10, 2, 5], [1, 3, 3, 8, 2]])


@functools.cache
def make(name):
    model = recurrent(**SIZES, **VARIANTS[name])
    init = jax.jit(lambda key: model.init(key, TOKENS, source=SOURCE))
    params = jax.tree.map(lambda leaf: leaf * 1.5, init(jax.random.key(0))["params"])
    return model, params


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def _gru(p, h, x):
    """Cho et al. 2014, with the reset gate behind the product, as cuDNN, PyTorch and Flax have it."""
    r = _sigmoid(_dense(p["ir"], x) + _dense(p["hr"], h))
    z = _sigmoid(_dense(p["iz"], x) + _dense(p["hz"], h))
    n = np.tanh(_dense(p["in"], x) + r * _dense(p["hn"], h))
    return (1 - z) * n + z * h


def _lstm(p, state, x):
    c, h = state
    i, f, g, o = (_dense(p["i" + gate], x) + _dense(p["h" + gate], h) for gate in "ifgo")
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return c, _sigmoid(o) * np.tanh(c)


def _cell(config, p, state, x):
    if config.cell == "gru":
        state = _gru(p, state, x)
        return state, state
    state = _lstm(p, state, x)
    return state, state[1]


def _naive(name, params, source, tokens):
    """Logits and weights of one row without padding, one token and one layer at a time."""
    config = make(name)[0].config
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = p["token_embedding"]["embedding"]
    x = list((table if config.share_embeddings else p["source_embedding"]["embedding"])[source])
    ways = 2 if config.bidirectional else 1
    width = config.hidden_dim // ways
    parts = 2 if config.cell == "lstm" else 1
    states = []
    for layer in range(config.num_layers):
        outputs, last = [], []
        for way in range(ways):
            cell = p[f"encoder_{layer}_{way}"]["cell"]
            state = np.zeros(width) if parts == 1 else (np.zeros(width), np.zeros(width))
            seen = []
            for token in x[::-1] if way else x:
                state, h = _cell(config, cell, state, token)
                seen.append(h)
            outputs.append(seen[::-1] if way else seen)
            last.append(state if parts == 2 else (state,))
        x = [np.concatenate(both) for both in zip(*outputs)]
        made = [
            np.tanh(_dense(p[f"bridge_{layer}_{part}"], np.concatenate([state[part] for state in last])))
            for part in range(parts)
        ]
        states.append(tuple(made) if parts == 2 else made[0])
    memory = np.array(x)

    def attend(query):
        if config.attention == "none":
            return np.zeros(0), np.zeros(len(memory))
        scores = []
        for key in memory:
            if config.attention == "additive":
                compared = np.tanh(_dense(p["query_projection"], query) + _dense(p["key_projection"], key))
                scores.append(_dense(p["score_vector"], compared)[0])
            elif config.attention == "general":
                scores.append(query @ _dense(p["key_projection"], key))
            else:
                scores.append(query @ key / (np.sqrt(config.hidden_dim) if config.attention == "scaled_dot" else 1))
        weights = np.exp(scores) / np.exp(scores).sum()
        return weights @ memory, weights

    logits, all_weights = [], []
    for token in tokens:
        x = table[token]
        if config.convention == "bahdanau":
            context, weights = attend(states[-1] if parts == 1 else states[-1][1])
            x = np.concatenate([x, context])
        for layer in range(config.num_layers):
            states[layer], x = _cell(config, p[f"decoder_{layer}"], states[layer], x)
        if config.convention == "luong":
            context, weights = attend(x)
        read = np.tanh(_dense(p["readout"], np.concatenate([x, context])))
        logits.append(_dense(p["output_head"], read))
        all_weights.append(weights)
    return np.array(logits), np.array(all_weights)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bahdanau" else pytest.mark.slow) for name in VARIANTS]
)
def test_logits_and_weights_equal_the_equations(name):
    model, params = make(name)
    given = {"source": SOURCE, "source_mask": MASK}
    output = jax.jit(lambda params, given: model.apply({"params": params}, TOKENS, **given, return_weights=True))(
        params, given
    )
    for row, length in enumerate((4, 2)):
        logits, weights = _naive(name, params, np.asarray(SOURCE)[row, :length], np.asarray(TOKENS)[row])
        np.testing.assert_allclose(output.logits[row], logits, atol=2e-5)
        if name != "none":
            found = output.aux.weights["cross_attention"][row, 0]
            np.testing.assert_allclose(found[:, :length], weights, atol=2e-6)
            np.testing.assert_array_equal(found[:, length:], 0)
    assert (output.aux.weights == {}) == (name == "none")


@pytest.mark.parametrize("name", ["bahdanau", pytest.param("luong", marks=pytest.mark.slow)])
def test_what_stands_in_the_padding_changes_neither_logits_nor_gradients(name):
    model, params = make(name)

    def loss(params, source):
        logits = model.apply({"params": params}, TOKENS, source=source, source_mask=MASK).logits
        return (logits * jnp.cos(jnp.arange(logits.size).reshape(logits.shape))).sum()

    both = jax.jit(jax.value_and_grad(loss))
    plain, other = both(params, SOURCE), both(params, jnp.where(MASK, SOURCE, 9))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-6), plain, other)


@pytest.mark.parametrize("name", ["bahdanau", "luong", pytest.param("none", marks=pytest.mark.slow)])
def test_decoding_with_a_cache_equals_the_full_pass(name):
    model, params = make(name)
    given = {"source": SOURCE, "source_mask": MASK}
    full = _apply(model, params, TOKENS, given).logits
    start = jax.jit(lambda params: model.apply({"params": params}, SOURCE, 9, source_mask=MASK, method="start"))
    cache = start(params)
    first = _apply(model, params, TOKENS[:, :2], {"cache": cache})
    np.testing.assert_allclose(first.logits, full[:, :2], atol=1e-5)
    cache = first.aux.cache
    for place in range(2, 5):
        output = _apply(model, params, TOKENS[:, place : place + 1], {"cache": cache})
        np.testing.assert_allclose(output.logits[:, 0], full[:, place], atol=1e-5)
        cache = output.aux.cache


def test_later_tokens_change_no_earlier_logits():
    model, params = make("bahdanau")
    given = {"source": SOURCE, "source_mask": MASK}
    changed = TOKENS.at[:, 3].set(7)
    before, after = (_apply(model, params, tokens, given).logits for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any()


@pytest.mark.parametrize("name", ["bahdanau", pytest.param("luong", marks=pytest.mark.slow)])
def test_greedy_text_free_running_and_one_beam_agree_with_full_passes(name):
    model, params = make(name)
    sources, prompts = [[3, 4, 5, 6], [7, 8]], [[1], [1]]
    out = generate(model, params, prompts, sources=sources, max_new_tokens=5)
    run = jax.jit(
        lambda params: model.apply(
            {"params": params}, jnp.array([1, 1]), 5, source=SOURCE, source_mask=MASK, method="free_run"
        )
    )
    np.testing.assert_array_equal(run(params).argmax(-1), out)
    beams = beam_search(model, params, prompts, sources=sources, max_new_tokens=5, eos_id=None, num_beams=1)
    np.testing.assert_array_equal(beams.tokens[:, 0], out)
    ids = jnp.concatenate([jnp.ones((2, 1), jnp.int32), jnp.asarray(out)], 1)
    full = _apply(model, params, ids, {"source": SOURCE, "source_mask": MASK}).logits
    np.testing.assert_array_equal(full[:, :-1].argmax(-1), out)
    scored = score(model, params, prompts, out, sources=sources)
    np.testing.assert_allclose(scored.log_probs / 5, beams.scores[:, 0], rtol=1e-4)


def test_prompts_of_unequal_length_are_read_alone():
    model, params = make("bahdanau")
    sources, prompts = [[3, 4, 5, 6], [7, 8]], [[1, 2, 3], [1]]
    together = generate(model, params, prompts, sources=sources, max_new_tokens=4)
    for row in range(2):
        alone = generate(model, params, prompts[row : row + 1], sources=sources[row : row + 1], max_new_tokens=4)
        np.testing.assert_array_equal(alone[0], together[row])


def test_dropout_is_of_training_alone_and_of_its_key():
    model, params = make("bahdanau")
    dropping = recurrent(**SIZES, **VARIANTS["bahdanau"], dropout_rate=0.4)
    run = jax.jit(
        lambda key: (
            dropping.apply({"params": params}, TOKENS, source=SOURCE, deterministic=False, rngs={"dropout": key}).logits
        )
    )
    one, again, other = (run(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).mean() > 0.9
    plain = _apply(model, params, TOKENS, {"source": SOURCE}).logits
    np.testing.assert_array_equal(_apply(dropping, params, TOKENS, {"source": SOURCE}).logits, plain)


def test_bfloat16_is_near_float32():
    model, params = make("bahdanau")
    low = recurrent(**SIZES, **VARIANTS["bahdanau"], dtype="bfloat16")
    given = {"source": SOURCE, "source_mask": MASK}
    output = _apply(low, params, TOKENS, given).logits
    assert output.dtype == jnp.float32
    np.testing.assert_allclose(output, _apply(model, params, TOKENS, given).logits, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bahdanau", "luong"])
def test_it_learns_to_reverse(name):
    import optax

    model = recurrent(vocab_size=12, embed_dim=24, hidden_dim=48, **{**VARIANTS[name], "attention_dim": None})
    source = jax.random.randint(jax.random.key(1), (400, 64, 5), 2, 12)
    optimizer = optax.adam(1e-2)

    def loss(params, source):
        target = source[:, ::-1]
        tokens = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        logits = model.apply({"params": params}, tokens, source=source).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    def step(carry, source):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, source)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    params = jax.jit(lambda key: model.init(key, source[0], source=source[0]))(jax.random.key(0))["params"]
    (params, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, source))((params, optimizer.init(params)))
    assert losses[-1] < 0.1 < 2 < losses[0]
    fresh = np.asarray(jax.random.randint(jax.random.key(2), (50, 5), 2, 12))
    out = generate(model, params, [[1]] * 50, sources=fresh, max_new_tokens=5)
    assert (out == fresh[:, ::-1]).all(-1).mean() > 0.9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cell": "rnn"}, "cell='rnn' must be one of gru, lstm"),
        ({"attention": "cosine"}, "attention='cosine' must be one of additive, dot, scaled_dot, general, none"),
        ({"convention": "x"}, "convention='x' must be one of bahdanau, luong"),
        ({"hidden_dim": 7}, "hidden_dim=7 must be even"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"dropout_rate": 1.0}, r"dropout_rate=1.0 must be in \[0, 1\)"),
        ({"attention_dim": 0}, "attention_dim=0 must be at least 1, or None"),
    ],
)
def test_wrong_settings_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RecurrentConfig(**{**SIZES, **fields})


def test_a_call_needs_a_source_or_a_cache():
    model, params = make("bahdanau")
    with pytest.raises(ValueError, match="needs source, or a cache made by start"):
        model.apply({"params": params}, TOKENS)
