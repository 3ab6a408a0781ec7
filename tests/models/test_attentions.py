"""Every attention of the catalogue by name in a model: it learns, takes turns, and refuses what it can't do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.attention import ATTENTION, PATTERNS, patterns
from jaxformer.models import Transformer, TransformerConfig, gpt, stack_layers, unstack_layers
from jaxformer.models.attention_choice import choose_attention

SHAPE = {"vocab_size": 17, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_length": 32}
ARGS = {
    "bigbird": {"block_size": 4, "num_random": 1, "seed": 0},
    "clustered": {"num_clusters": 4},
    "compressed": {"stride": 3},
    "dilated": {"window": 2, "dilation": 3},
    "fixed": {"stride": 4, "num_summary": 1},
    "global_tokens": {"indices": (0, 1)},
    "linformer": {"rank": 8},
    "local": {"window": 5},
    "longformer": {"window": 4, "global_indices": (0,)},
    "lsh": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 8},
    "performer": {"num_features": 16, "redraw_every": 5},
    "random_blocks": {"num": 2, "seed": 0, "block_size": 4},
    "routing": {"num_clusters": 3, "window": 8},
    "sinkhorn": {"block_size": 4},
    "strided": {"stride": 4},
}
NAMES = sorted({*ATTENTION, *PATTERNS} - {"sparse"})
CAUSAL = [name for name in NAMES if (PATTERNS.get(name) or ATTENTION[name]).causal]
ENCODING = [name for name in NAMES if not (PATTERNS.get(name) or ATTENTION[name]).causal] + ["bigbird", "longformer"]


def fit(model, inputs, targets, steps=40):
    """Losses of a few Adam steps on one batch; targets below 0 do not count."""
    variables = dict(jax.jit(lambda rng: model.init({"params": rng}, inputs))(jax.random.key(0)))
    params = variables.pop("params")
    optimizer = optax.adam(2e-2)

    def loss(params, state):
        output, changed = model.apply({"params": params, **state}, inputs, deterministic=False, mutable=list(state))
        counted = targets >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(output.logits, jnp.maximum(targets, 0))
        mean = jnp.where(counted, losses, 0.0).sum() / counted.sum()
        extra = sum((loss.sum() for loss in output.aux.losses.values()), jnp.zeros(()))
        return mean + extra, (mean, {**state, **changed})

    @jax.jit
    def step(params, state, opt_state):
        (_, (mean, state)), gradients = jax.value_and_grad(loss, has_aux=True)(params, state)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, mean

    carry, losses = (params, variables, optimizer.init(params)), []
    for _ in range(steps):
        *carry, mean = step(*carry)
        losses.append(float(mean))
    return losses, carry[0], carry[1]


@pytest.fixture(scope="module")
def repeating():
    """int [4, 24]: rows that repeat eight random tokens three times."""
    return jnp.asarray(np.tile(np.random.default_rng(0).integers(1, 17, (4, 8)), 3))


# Every run tests those whose arrays are made in three ways; the rest take a minute more.
FIRST = ("linformer", "lsh", "strided")


def each(names):
    """The names as cases, marked slow but for the first."""
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", each(CAUSAL))
def test_every_causal_attention_learns_to_continue(name, repeating):
    model = gpt(**SHAPE, attention=name, attention_args=ARGS.get(name, {}))
    losses, _, _ = fit(model, repeating[:, :-1], repeating[:, 1:])
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", each(ENCODING))
def test_every_other_attention_learns_to_fill_in_masked_tokens(name, repeating):
    """Bytes hidden behind token 0 are told by the repetitions of the row."""
    hidden = np.random.default_rng(1).random(repeating.shape) < 0.2
    inputs, targets = jnp.where(hidden, 0, repeating), jnp.where(hidden, repeating, -1)
    args = {**ARGS[name], "num_blocks": 6} if name == "bigbird" else ARGS[name]
    config = TransformerConfig(**SHAPE, architecture="encoder", attention=name, attention_args=args)
    losses, _, _ = fit(Transformer(config), inputs, targets)
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_state_changes_in_training_only_and_is_part_of_the_model(repeating):
    args = {"num_features": 16, "redraw_every": 3}
    model = gpt(**{**SHAPE, "num_layers": 2}, attention="performer", attention_args=args)
    _, params, state = fit(model, repeating[:, :-1], repeating[:, 1:], steps=4)
    assert jax.tree.map(lambda leaf: leaf.tolist(), state)["state"]["decoder"]["layers"]["attention"]["arguments"][
        "steps"
    ] == [4, 4]

    @jax.jit
    def logits(state):
        return model.apply({"params": params, **state}, repeating).logits

    # Steps 3, 4 and 5 use the same features; step 6 draws others.
    def at(steps):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.full_like(leaf, steps) if path[-1].key == "steps" else leaf, state
        )

    np.testing.assert_array_equal(logits(at(3)), logits(at(5)))
    assert (logits(at(6)) != logits(at(5))).any()


TURNS = {"attention": ("local", "dense"), "attention_args": {"local": {"window": 2}}, "num_layers": 4}


@functools.lru_cache
def taking_turns(scan_layers):
    return gpt(**{**SHAPE, **TURNS}, init_stddev=0.3, scan_layers=scan_layers)


@pytest.mark.slow
def test_layers_that_take_turns_agree_scanned_and_unrolled(repeating):
    scanned, unrolled = taking_turns(True), taking_turns(False)
    params = jax.jit(scanned.init)(jax.random.key(0), repeating)["params"]
    separate = unstack_layers(params, 2)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(separate, 2), params)
    assert {f"layers_{i}" for i in range(4)} < set(separate["decoder"])
    third = separate["decoder"]["layers_2"]["mlp"]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[1]), third, params["decoder"]["layers"]["period_0"]["mlp"]
    )

    def run(model, params):
        def loss(params):
            output = model.apply({"params": params}, repeating, return_weights=True)
            return (output.logits**2).sum(), (output.logits, output.aux.weights["attention"])

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    gradients, (logits, weights) = run(scanned, params)
    other_gradients, (other_logits, other_weights) = run(unrolled, separate)
    np.testing.assert_allclose(logits, other_logits, atol=1e-5)
    np.testing.assert_allclose(weights, other_weights, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=2e-4),
        unstack_layers(gradients, 2),
        other_gradients,
    )
    # Layers 0 and 2 see three tokens, 1 and 3 all of the past.
    assert (weights[0::2, :, :, 10, :8] == 0).all()
    assert (weights[1::2, :, :, 10, :8] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_that_take_turns_decode_as_they_attend(scan_layers, repeating):
    model = taking_turns(scan_layers)
    tokens = repeating[:, :7]
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    cache = model.init_cache(4, 9)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in cache.layers]
    assert sizes[0] < sizes[1], "the window's cache does not grow with the length"
    step = jax.jit(lambda cache, part: model.apply(params, part, cache=cache))
    outputs = []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        output = step(cache, tokens[:, start:stop])
        cache = output.aux.cache
        outputs.append(output.logits)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), jax.jit(model.apply)(params, tokens).logits, atol=1e-4)


@pytest.mark.slow
def test_the_factors_of_a_pattern_take_turns_over_layers(repeating):
    """Sparse Transformer's third use: one factor a layer, after two of which every token is reached."""
    factors = patterns.strided_parts(4)
    args = [{"pattern": factor} for factor in factors]
    shape = {**SHAPE, "num_layers": 2}
    model = gpt(**shape, attention=("sparse", "sparse"), attention_args=args)
    params = jax.jit(model.init)(jax.random.key(0), repeating)
    weights = jax.jit(lambda params: model.apply(params, repeating, return_weights=True))(params).aux.weights[
        "attention"
    ]
    for layer, factor in zip(weights, factors):
        mask = (factor & patterns.causal()).mask(24)
        np.testing.assert_array_equal(layer != 0, np.broadcast_to(mask, layer.shape))
    with pytest.raises(ValueError, match="has 1 mappings for the 2"):
        gpt(**shape, attention=("sparse", "sparse"), attention_args=args[:1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "linformer"}, "'linformer' can't be causal, as architecture='decoder' needs"),
        ({"attention": "lsh", "num_kv_heads": 1}, "'lsh' does not support num_kv_heads=1"),
        ({"attention": "linear", "positions": "alibi"}, "'linear' does not support positions='alibi'"),
        ({"attention": "linear", "attention_scale": 0.5}, "'linear' does not support attention_scale=0.5"),
        ({"attention": "lsh", "attention_dropout_rate": 0.1}, "'lsh' does not support attention_dropout_rate=0.1"),
        ({"attention": ("linear", "dense")}, "num_layers=1 must be a multiple of the 2"),
        ({"attention": ()}, "at least one name"),
        ({"attention": ("dense",), "attention_args": {"local": {}}}, "'local', which is not in attention"),
        ({"attention": "strided", "attention_args": {"strid": 4}}, "'strid', which attention='strided'"),
        ({"attention": "lsh", "attention_args": {"num_hash": 4}}, "'num_hash', which attention='lsh'"),
        ({"attention": "strided", "attention_args": {"stride": 0}}, "stride"),
        ({"attention": "local"}, "attention='local' needs window in attention_args"),
        ({"attention": "strided"}, "attention='strided' needs stride in attention_args"),
        ({"attention": "sinkhorn", "attention_args": {"sort_cut": 2}}, "'sinkhorn' with sort_cut can't be causal"),
        ({"attention": "dense", "attention_args": {"scale": 2.0}}, "'scale', which the layer gives attention='dense'"),
        (
            {"attention": "strided", "attention_args": {"stride": 3, "global_key": 1.0}},
            "'global_key', which attention='strided' makes itself",
        ),
        (
            {
                "architecture": "encoder_decoder",
                "cross_attention": "kernel",
                "cross_attention_args": {"leave_one_out": True},
            },
            "cross_attention='kernel' can't be between two sequences with leave_one_out",
        ),
        ({"attention": "denser"}, "attention='denser' must be one of .*dense.*strided"),
    ],
)
def test_what_an_attention_cannot_do_is_refused_when_configured(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SHAPE, **fields})


def test_settings_exclude_no_more_than_they_must():
    TransformerConfig(**SHAPE, architecture="encoder", attention="sinkhorn", attention_args={"sort_cut": 2})
    TransformerConfig(**SHAPE, attention="sinkhorn", attention_args={"sort_cut": None})
    chosen = (("dilation", 2), ("global_mask", ((True, False),)), ("num_global", 1), ("window", 3))
    assert choose_attention("dilated", (chosen[0], chosen[3])).packing
    assert not choose_attention("dilated", chosen).packing
    with pytest.raises(ValueError, match="attention='dilated' can't decode with a cache with global_mask"):
        gpt(**SHAPE, attention="dilated", attention_args=dict(chosen)).init_cache(2, 9)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        pytest.param("strided", {"stride": 3, "num_added": 2}, marks=pytest.mark.slow),
        pytest.param("kernel", {"leave_one_out": True}, marks=pytest.mark.slow),
        pytest.param("kernel", {"width": 2}, marks=pytest.mark.slow),
    ],
)
def test_settings_decode_as_they_attend(name, args, repeating):
    model = gpt(**SHAPE, attention=name, attention_args=args, init_stddev=0.3)
    tokens = repeating[:, :7]
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    step = jax.jit(lambda cache, part: model.apply(params, part, cache=cache))
    cache, outputs = model.init_cache(4, 9), []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
        output = step(cache, tokens[:, start:stop])
        cache = output.aux.cache
        outputs.append(output.logits)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), jax.jit(model.apply)(params, tokens).logits, atol=1e-4)


def test_a_kind_without_decoding_is_refused_by_name():
    with pytest.raises(ValueError, match="attention='sinkhorn' can't decode with a cache"):
        gpt(**SHAPE, attention="sinkhorn").init_cache(2, 9)
