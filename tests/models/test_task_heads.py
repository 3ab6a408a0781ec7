"""Task heads: the body's own parameters, pooling wherever padding is, shapes of each task, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import HeadConfig, TaskModel, bert, gpt, t5

SHAPE = {"vocab_size": 13, "num_layers": 1, "embed_dim": 12, "num_heads": 3, "max_length": 16}
BODIES = {"encoder": bert(**SHAPE), "decoder": gpt(**SHAPE)}
TOKENS = jax.random.randint(jax.random.key(3), (2, 5), 0, 13)
MASK = jnp.arange(5)[None] < jnp.array([[5], [3]])
LEFT = jnp.arange(5)[None] >= jnp.array([[0], [2]])


def random_params(model):
    """Parameters drawn without compiling, biases too."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))["params"]
    draws = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(draws.normal(0.0, 0.4, leaf.shape).astype(np.float32)), shapes)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs).logits


@functools.partial(jax.jit, static_argnums=0)
def _hidden(model, params, tokens, kwargs):
    return model.apply({"params": params}, tokens, **kwargs, method="hidden")[0]


def _model(body, **head):
    model = TaskModel(BODIES[body].config, HeadConfig(**head))
    return model, random_params(model)


def _by_hand(params, hidden, activation):
    """Pooled states through the pooler, where there is one, and the classifier, in float64."""
    params, x = jax.tree.map(np.float64, params), np.float64(hidden)
    if activation is not None:
        x = activation(x @ params["pooler"]["kernel"] + params["pooler"]["bias"])
    return x @ params["classifier"]["kernel"] + params["classifier"]["bias"]


def _body_params(params):
    return {name: leaf for name, leaf in params.items() if name not in ("pooler", "classifier")}


@pytest.mark.parametrize(
    ("body", "head", "pool", "activation"),
    [
        ("encoder", {"num_classes": 3}, lambda x: [x[0, 0], x[1, 0]], np.tanh),
        (
            "encoder",
            {"num_classes": 3, "pooling": "mean", "pooler": "relu"},
            lambda x: [x[0].mean(0), x[1, :3].mean(0)],
            lambda x: np.maximum(x, 0),
        ),
        ("decoder", {"num_classes": 2, "pooling": "last", "pooler": None}, lambda x: [x[0, 4], x[1, 2]], None),
    ],
    ids=["first", "mean", "last"],
)
def test_a_text_is_classified_from_its_pooled_tokens(body, head, pool, activation):
    model, params = _model(body, task="classification", **head)
    logits = _logits(model, params, TOKENS, {"key_mask": MASK})
    hidden = _hidden(BODIES[body], _body_params(params), TOKENS, {"key_mask": MASK})
    expected = _by_hand(params, np.stack(pool(np.asarray(hidden))), activation)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_last_token_is_found_behind_padding_on_the_left():
    model, params = _model("decoder", task="regression", pooling="last", pooler=None)
    padded = jnp.concatenate([TOKENS[:1], jnp.pad(TOKENS[1:, :3], ((0, 0), (2, 0)), constant_values=9)])
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    left = _logits(model, params, padded, {"key_mask": LEFT, "positions": positions})
    right = _logits(model, params, TOKENS.at[1, 3:].set(9), {"key_mask": MASK})
    assert left.shape == (2,)
    np.testing.assert_allclose(left, right, atol=1e-5)


@functools.cache
def _body_shapes():
    return jax.eval_shape(lambda: BODIES["encoder"].init(jax.random.key(0), TOKENS, method="hidden"))


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ({"task": "regression"}, (2,)),
        ({"task": "classification", "num_classes": 4}, (2, 4)),
        ({"task": "tagging", "num_classes": 4}, (2, 5, 4)),
        ({"task": "answers"}, (2, 5, 2)),
        ({"task": "answer_tokens"}, (2, 5, 3)),
    ],
)
def test_each_task_has_its_shape_and_the_bodys_parameters(head, shape):
    model = TaskModel(BODIES["encoder"].config, HeadConfig(**head))
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))
    out = jax.eval_shape(model.apply, variables, TOKENS)
    assert out.logits.shape == shape
    body = _body_shapes()
    own = {"classifier"} | ({"pooler"} if head["task"] in ("regression", "classification") else set())
    assert set(variables["params"]) == set(body["params"]) | own
    assert _body_params(variables["params"]) == body["params"]


def test_tokens_are_tagged_from_their_own_state():
    model, params = _model("encoder", task="tagging", num_classes=4)
    hidden = _hidden(BODIES["encoder"], _body_params(params), TOKENS, {"key_mask": MASK})
    expected = _by_hand(params, hidden, None)
    np.testing.assert_allclose(_logits(model, params, TOKENS, {"key_mask": MASK}), expected, atol=1e-5)
    np.testing.assert_array_equal(_hidden(model, params, TOKENS, {"key_mask": MASK}), hidden)


@pytest.mark.slow
def test_dropout_stands_before_the_classifier_in_training_alone():
    config = bert(**SHAPE, dropout_rate=0.0, attention_dropout_rate=0.0).config
    model = TaskModel(config, HeadConfig(task="tagging", num_classes=4, dropout_rate=0.999))
    params = random_params(model)
    run = functools.partial(model.apply, {"params": params}, TOKENS)
    dropped = run(deterministic=False, rngs={"dropout": jax.random.key(0)}).logits
    np.testing.assert_allclose(dropped[0, 0], params["classifier"]["bias"], atol=1e-6)
    assert np.abs(run().logits - dropped).max() > 0.1


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"task": "ner"}, "task='ner' must be one of classification, regression, tagging, answers, answer_tokens"),
        ({"task": "tagging", "num_classes": 0}, "num_classes=0 must be an integer of at least 1"),
        ({"task": "regression", "num_classes": 1}, "num_classes=1 must be None for task='regression'"),
        ({"task": "answers", "pooling": "max"}, "pooling='max' must be one of first, last, mean"),
        ({"task": "answers", "pooler": "gelu"}, "pooler='gelu' must be one of tanh, relu, or None"),
        ({"task": "answers", "dropout_rate": 1.0}, "dropout_rate=1.0 must be in"),
    ],
)
def test_heads_that_can_not_be_are_refused(head, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**head)


def test_bodies_that_do_not_fit_are_refused():
    both = t5("tiny").config
    with pytest.raises(ValueError, match="architecture='encoder_decoder' has no task heads"):
        TaskModel(both, HeadConfig(task="regression"))
    with pytest.raises(ValueError, match="num_classes=None must be a number for task='tagging'"):
        TaskModel(BODIES["encoder"].config, HeadConfig(task="tagging"))
    with pytest.raises(ValueError, match="task='answers' needs architecture='encoder'"):
        TaskModel(BODIES["decoder"].config, HeadConfig(task="answers"))
    with pytest.raises(ValueError, match="pooling='first' needs architecture='encoder'"):
        TaskModel(BODIES["decoder"].config, HeadConfig(task="regression"))
