"""The Universal Transformer: tied stacks, coordinates, halting against a plain loop, causality, cached decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.functional import halting_weights, sinusoidal_positions
from jaxformer.models import (
    BlockInputs,
    Transformer,
    TransformerBlock,
    TransformerConfig,
    UniversalStack,
    universal_transformer,
)
from jaxformer.training.assembly import make_model
from jaxformer.training.config import load_config, resolve

SHAPE = {
    "vocab_size": 13,
    "num_layers": 4,
    "embed_dim": 12,
    "num_heads": 3,
    "mlp_dim": 20,
    "max_length": 16,
    "init_stddev": 0.3,
    "positions": "sinusoidal",
    "stack": "universal",
    "step_embedding": "sinusoidal",
}
ACT = {"halting": "act", "halting_bias_init": -0.5, "halting_threshold": 0.9}
TIED = {"positions": "rotary", "step_embedding": "none"}


def _model(**fields):
    model = Transformer(TransformerConfig(**{**SHAPE, **fields}))
    source = _ids(1, 3) if model.config.architecture == "encoder_decoder" else None
    return model, _draw(lambda: model.init(jax.random.key(1), _ids(1, 3), source=source))


def _draw(init):
    """Random values for all variables, norms' scales included, without compiling an initialisation."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(init)
    variables = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    return jax.tree.map_with_path(lambda path, leaf: leaf + float("scale" in str(path[-1])), variables)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("deterministic", "return_weights"))
def _apply(model, variables, tokens, kwargs, rng=None, deterministic=True, return_weights=False):
    rngs = None if rng is None else {"dropout": rng}
    return model.apply(
        variables, tokens, **kwargs, rngs=rngs, deterministic=deterministic, return_weights=return_weights
    )


def _ids(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 13)


def _tied_and_plain():
    """A universal model with dropout and the same plain one, as functions of the universal one's parameters."""
    fields = {**TIED, "dropout_rate": 0.2, "attention_dropout_rate": 0.3, "mlp_dropout_rate": 0.1}
    universal, variables = _model(**fields)
    plain = Transformer(TransformerConfig(**{**SHAPE, **fields, "stack": "plain"}))
    tokens, rng = _ids(2, 5), jax.random.key(3)

    def tie(params):
        decoder = dict(params["decoder"])
        block = decoder.pop("block")
        layers = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), block)
        return {**params, "decoder": {**decoder, "layers": layers}}

    def logits(model, params):
        return _apply(model, {"params": params}, tokens, {}, rng, deterministic=False).logits

    return functools.partial(logits, universal), lambda params: logits(plain, tie(params)), variables["params"]


def test_fixed_steps_are_a_plain_stack_with_tied_weights():
    tied, plain, params = _tied_and_plain()
    np.testing.assert_allclose(tied(params), plain(params), atol=1e-5)


@pytest.mark.slow
def test_gradients_of_fixed_steps_are_sums_over_the_layers_of_a_plain_stack():
    tied, plain, params = _tied_and_plain()
    gradients = [jax.grad(lambda params, f=f: jax.nn.log_softmax(f(params))[0].sum())(params) for f in (tied, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


def _problem(bias=-1.5, **fields):
    config = TransformerConfig(**{**SHAPE, **ACT, **fields})
    stack = UniversalStack(config, 4, causal=True)
    x = jax.random.normal(jax.random.key(0), (3, 6, 12))
    mask = jnp.arange(6)[None] >= jnp.array([[0], [2], [1]])
    params = _draw(lambda: stack.init(jax.random.key(2), x, BlockInputs()))["params"]
    params["halting"]["bias"] = jnp.asarray(bias)
    return config, stack, params, x, mask


@functools.partial(jax.jit, static_argnums=0, static_argnames="return_weights")
def _run(stack, params, x, mask, return_weights=False):
    coordinates = jnp.broadcast_to(sinusoidal_positions(jnp.arange(6), 12), x.shape)
    inputs = BlockInputs(key_mask=mask)
    return stack.apply({"params": params}, x, inputs, coordinates=coordinates, return_weights=return_weights)


def _coordinates(length, width, step):
    """Equations 6 and 7, with positions that count from 0."""
    table = np.zeros((length, width))
    for position in range(length):
        for j in range(width // 2):
            scale = 10_000 ** (2 * j / width)
            table[position, 2 * j] = np.sin(position / scale) + np.sin(step / scale)
            table[position, 2 * j + 1] = np.cos(position / scale) + np.cos(step / scale)
    return table


def test_halting_equals_blocks_applied_one_by_one():
    config, stack, params, x, mask = _problem()
    out, aux = _run(stack, params, x, mask, return_weights=True)
    block = TransformerBlock(config, config.attentions[0], causal=True, residual_additions=8)
    once = jax.jit(lambda params, x: block.apply({"params": params}, x, BlockInputs(key_mask=mask))[0])
    states, probabilities, state = [], [], x
    running, total, made = np.array(mask), np.zeros(mask.shape), np.zeros(mask.shape, int)
    for step in range(4):
        given = state + jnp.asarray(_coordinates(6, 12, step + 1), x.dtype)[None]
        logits = np.asarray(given) @ np.asarray(params["halting"]["kernel"]) + params["halting"]["bias"]
        probabilities.append(1 / (1 + np.exp(-logits)))
        state = jnp.where(running[..., None], once(params["block"], given), state)
        states.append(state)
        total += probabilities[-1]
        made += running
        running = running & (total < 0.9)
    weights = halting_weights(jnp.stack(probabilities), threshold=0.9, mask=mask)
    expected = sum(np.asarray(w)[..., None] * s for w, s in zip(weights.weights, states))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert len(np.unique(weights.num_steps[mask])) > 2
    np.testing.assert_allclose(aux.weights["halting"], weights.weights, atol=1e-6)
    cost = weights.num_steps + weights.remainder
    np.testing.assert_array_equal(aux.maps["ponder_steps"], made)
    np.testing.assert_allclose(aux.maps["ponder_remainder"], weights.remainder, atol=1e-5)
    assert not aux.maps["ponder_remainder"][~mask].any()
    assert aux.weights["attention"].shape == (4, 3, 3, 6, 6)
    np.testing.assert_allclose(aux.losses["ponder"], 0.01 * cost[mask].mean(), rtol=1e-5)
    steps, count = aux.metrics["ponder_steps"]
    assert (steps, count) == (weights.num_steps[mask].sum(), mask.sum())


def test_early_exit_equals_the_scan():
    _, stack, params, x, mask = _problem(bias=1.0)
    _, early, *_ = _problem(early_exit=True)
    out, aux = _run(stack, params, x, mask, return_weights=True)
    other, other_aux = _run(early, params, x, mask)
    np.testing.assert_allclose(other, out, atol=1e-6)
    np.testing.assert_allclose(other_aux.losses["ponder"], aux.losses["ponder"], rtol=1e-6)
    np.testing.assert_array_equal(other_aux.maps["ponder_steps"], aux.maps["ponder_steps"])


@pytest.mark.parametrize("mix", ["weighted", pytest.param("exponential", marks=pytest.mark.slow)])
def test_causal_by_gradient(mix):
    _, stack, params, x, mask = _problem(halting_mix=mix)
    row = jax.jit(jax.grad(lambda x, t: jnp.sin(_run(stack, params, x, mask | True)[0][:, t]).sum()))
    for t in (0, 3, 5):
        seen = jnp.abs(row(x, t)).max((0, 2))
        assert (seen[: t + 1] > 0).all()
        assert (seen[t + 1 :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"remat": "full"}, {"scan_layers": False}])
def test_recomputation_and_unrolling_change_neither_loss_nor_gradient(fields):
    _, stack, params, x, mask = _problem()
    _, other, *_ = _problem(**fields)

    def loss(params, stack):
        out, aux = _run(stack, params, x, mask)
        return jnp.sin(out).sum() + aux.losses["ponder"]

    gradients = [jax.jit(jax.grad(functools.partial(loss, stack=each)))(params) for each in (stack, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *gradients)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients[0]))


def _decode(model, variables, tokens, cache, mask, positions):
    pieces = []
    for first, last in [(0, 3), (3, 6), (6, 7)]:
        columns = slice(first, last)
        given = {"cache": cache, "key_mask": mask[:, columns], "positions": positions[:, columns]}
        out = _apply(model, variables, tokens[:, columns], given)
        cache = out.aux.cache
        pieces.append(out.logits)
    return jnp.concatenate(pieces, 1)


LOCAL = {"attention": "local", "attention_args": {"window": 2}}


@pytest.mark.parametrize(
    "fields",
    [
        {**ACT, "early_exit": True, "convolution_width": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(ACT, marks=pytest.mark.slow),
        pytest.param({**ACT, **LOCAL, "early_exit": True}, marks=pytest.mark.slow),
    ],
)
def test_cached_decoding_equals_the_full_pass(fields):
    model, variables = _model(**fields)
    full = Transformer(TransformerConfig(**{**SHAPE, **fields, "early_exit": False}))
    tokens = _ids(3, 7)
    padding = jnp.array([[0], [2], [1]])
    mask = jnp.arange(7)[None] >= padding
    positions = jnp.maximum(jnp.arange(7)[None] - padding, 0)
    expected = _apply(full, variables, tokens, {"key_mask": mask, "positions": positions}).logits
    cache = model.init_cache(3, 9)
    logits = _decode(model, variables, tokens, cache, mask, positions)
    np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-5)


@pytest.mark.slow
def test_encoder_decoder_decodes_from_tied_memory_and_reports_the_encoders_pondering():
    model, variables = _model(**ACT, architecture="encoder_decoder", num_encoder_layers=3, early_exit=True)
    source, tokens = _ids(2, 5), _ids(2, 7, seed=1)
    source_mask = jnp.arange(5)[None] < jnp.array([[5], [3]])
    out = _apply(model, variables, tokens, {"source": source, "source_mask": source_mask})
    assert set(out.aux.losses) == {"ponder", "encoder_ponder"}
    assert out.aux.metrics["encoder_ponder_steps"][1] == 8
    assert out.aux.metrics["encoder_ponder_steps"][0] == out.aux.maps["encoder_ponder_steps"].sum()
    assert out.aux.maps["ponder_steps"].shape == tokens.shape
    start = jax.jit(lambda variables: model.apply(variables, source, 8, source_mask=source_mask, method="start"))
    cache = start(variables)
    ones, positions = jnp.ones((2, 7), bool), jnp.broadcast_to(jnp.arange(7), (2, 7))
    logits = _decode(model, variables, tokens, cache, ones, positions)
    np.testing.assert_allclose(logits, out.logits, atol=1e-5)
    # Padding's content changes neither what is read nor what it costs.
    other = jnp.where(source_mask, source, 12 - source)
    changed = _apply(model, variables, tokens, {"source": other, "source_mask": source_mask})
    np.testing.assert_allclose(changed.logits, out.logits, atol=1e-5)
    np.testing.assert_allclose(changed.aux.losses["encoder_ponder"], out.aux.losses["encoder_ponder"], rtol=1e-5)


def test_random_starts_shift_positions_in_training_only():
    model, variables = _model(random_position_start=3, num_layers=2)
    tokens = _ids(5, 6)
    shifted = [
        _apply(model, variables, tokens, {"positions": jnp.broadcast_to(jnp.arange(6) + start, (5, 6))}).logits
        for start in range(4)
    ]
    drawn = []
    for seed in range(4):
        out = _apply(model, variables, tokens, {}, jax.random.key(seed), deterministic=False).logits
        for row in range(5):
            fits = [np.allclose(out[row], other[row], atol=1e-5) for other in shifted]
            assert sum(fits) == 1
            drawn.append(fits.index(True))
    assert set(drawn) == {0, 1, 2, 3}
    assert drawn[:5] != drawn[5:10]
    np.testing.assert_allclose(_apply(model, variables, tokens, {}).logits, shifted[0], atol=1e-6)


def test_the_preset_is_one_block_as_wide_as_asked():
    model = universal_transformer("base", architecture="encoder_decoder", halting="act", num_layers=12)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), _ids(1, 3), source=_ids(1, 3)))["params"]
    width, hidden = 1024, 4096
    attention, norm = 4 * (width**2 + width), 2 * width
    feed_forward = 2 * width * hidden + width + hidden
    encoder = attention + feed_forward + 2 * norm + width + 1
    counted = {side: sum(leaf.size for leaf in jax.tree.leaves(shapes[side])) for side in ("encoder", "decoder")}
    assert counted == {"encoder": encoder, "decoder": encoder + attention + norm}
    with pytest.raises(ValueError, match="size='huge' must be one of tiny, small, base, big"):
        universal_transformer("huge")


def test_the_language_model_experiment_makes_one():
    config = load_config("language_model:size=tiny,model=universal", ["model.halting=act", "model.max_length=7"]).config
    model = make_model(resolve(config, {"model.vocab_size": 13}))
    assert (model.config.stack, model.config.halting, model.config.positions) == ("universal", "act", "sinusoidal")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"halting": "act"}, {"halting": "act", "convolution_width": 3}])
def test_a_tiny_model_learns_sequences_by_heart(fields):
    model = universal_transformer("tiny", vocab_size=13, embed_dim=32, **fields)
    params = jax.jit(model.init)(jax.random.key(0), _ids(1, 3))["params"]
    optimizer = optax.adam(3e-3)
    tokens = _ids(8, 12)

    def loss(params):
        out = model.apply({"params": params}, tokens[:, :-1])
        mean = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])[:, 2:].mean()
        return mean + out.aux.losses.get("ponder", 0.0), mean

    @jax.jit
    def step(params, state):
        (_, mean), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, mean

    state = optimizer.init(params)
    for _ in range(150):
        params, state, mean = step(params, state)
    assert mean < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 10.0])
def test_a_huge_ponder_weight_drives_the_steps_to_one(weight):
    fields = {"halting": "act", "halting_bias_init": -3.0, "ponder_weight": weight}
    model = universal_transformer("tiny", vocab_size=13, embed_dim=32, **fields)
    params = jax.jit(model.init)(jax.random.key(0), _ids(1, 3))["params"]
    optimizer = optax.adam(1e-2)
    tokens = _ids(8, 12)

    def loss(params):
        out = model.apply({"params": params}, tokens[:, :-1])
        mean = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:]).mean()
        return mean + out.aux.losses["ponder"], out.aux.maps["ponder_steps"]

    @jax.jit
    def step(params, state):
        gradient, steps = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, steps

    state = optimizer.init(params)
    params, state, steps = step(params, state)
    assert (steps == 4).all()
    for _ in range(100):
        params, state, steps = step(params, state)
    assert (steps == 1).all() if weight else steps.mean() > 2


def test_settings_that_do_not_fit_are_refused():
    for fields, match in [
        ({"stack": "tied"}, "stack='tied' must be one of plain, universal"),
        ({"stack": "plain", "step_embedding": "none", "halting": "act"}, "halting='act' needs stack='universal'"),
        ({"halting_threshold": 1.5}, r"halting_threshold=1\.5 must be a finite number in \(0, 1\]"),
        ({"ponder_weight": -1.0}, r"ponder_weight=-1\.0 must be a finite number of at least 0"),
        ({"early_exit": True}, "early_exit=True needs halting='act'"),
        ({"random_position_start": 3, "positions": "learned"}, "random_position_start=3 needs positions='sinusoidal'"),
        ({"remat": "sqrt"}, "remat='sqrt' groups the blocks of stack='plain'"),
        ({"attention": ("dense", "additive")}, "must be one name: stack='universal' has one block"),
    ]:
        with pytest.raises(ValueError, match=match):
            TransformerConfig(**{**SHAPE, **fields})
