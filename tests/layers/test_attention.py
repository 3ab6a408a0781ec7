"""Multi-head attention against a numpy loop over heads, with grouped heads, rotary positions and plain functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import dense_attention
from jaxformer.layers import MultiHeadAttention, project_memory

BATCH, LENGTH, SOURCE, WIDTH = 2, 5, 7, 12


def _inputs(length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def _init(layer, *args, **kwargs):
    variables = jax.jit(lambda: layer.init(jax.random.key(1), *args, **kwargs))()
    return jax.tree.map(lambda leaf: 15 * leaf + 0.05 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), variables)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("causal", "deterministic", "return_weights"))
def _apply(layer, variables, *args, **kwargs):
    return layer.apply(variables, *args, **kwargs)


def _oracle(params, x, memory, num_heads, num_kv_heads, head_dim, allowed):
    """One batch row, one head, one query at a time, in float64."""
    params = jax.tree.map(np.float64, params)

    def project(name, value):
        return np.float64(value) @ params[name]["kernel"] + params[name].get("bias", 0.0)

    query, key, value = project("query", x), project("key", memory), project("value", memory)
    merged = np.zeros((*x.shape[:2], num_heads * head_dim))
    for b in range(x.shape[0]):
        for n in range(num_heads):
            group = n // (num_heads // num_kv_heads)
            mine, theirs = slice(n * head_dim, (n + 1) * head_dim), slice(group * head_dim, (group + 1) * head_dim)
            for t in range(x.shape[1]):
                seen = [s for s in range(memory.shape[1]) if allowed(b, t, s)]
                logits = np.array([query[b, t, mine] @ key[b, s, theirs] / np.sqrt(head_dim) for s in seen])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                merged[b, t, mine] = sum(w * value[b, s, theirs] for w, s in zip(weights, seen))
    return merged @ params["out"]["kernel"] + params["out"].get("bias", 0.0)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(None, None), (2, None), (1, 5), (4, 3)])
def test_self_attention_equals_a_loop_over_heads(num_kv_heads, head_dim):
    x = _inputs()
    layer = MultiHeadAttention(num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim)
    variables = _init(layer, x)
    out = _apply(layer, variables, x, causal=True).output
    expected = _oracle(variables["params"], x, x, 4, num_kv_heads or 4, head_dim or WIDTH // 4, lambda b, t, s: s <= t)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_cross_attention_skips_padding_and_reuses_projected_memory():
    x, memory = _inputs(), _inputs(SOURCE, seed=2)
    key_mask = jnp.arange(SOURCE)[None] < jnp.array([[4], [7]])
    layer = MultiHeadAttention(num_heads=3, num_kv_heads=1)
    variables = _init(layer, x, memory)
    out = _apply(layer, variables, x, memory, key_mask=key_mask).output
    expected = _oracle(variables["params"], x, memory, 3, 1, 4, lambda b, t, s: bool(key_mask[b, s]))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    pair = project_memory(variables["params"], memory, 1, jnp.float32)
    np.testing.assert_allclose(_apply(layer, variables, x, pair, key_mask=key_mask).output, out, atol=1e-6)


def test_rotary_attention_depends_on_distances_only():
    x = _inputs()
    layer = MultiHeadAttention(num_heads=3, rotary_base=100.0)
    variables = _init(layer, x)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    here = _apply(layer, variables, x, causal=True, query_positions=positions).output
    there = _apply(layer, variables, x, causal=True, query_positions=positions + 1000).output
    stretched = _apply(layer, variables, x, causal=True, query_positions=positions * 2).output
    np.testing.assert_allclose(there, here, atol=1e-4)
    assert np.abs(stretched - here).max() > 1e-3


def test_positions_decide_what_is_causal():
    x = _inputs()
    layer = MultiHeadAttention(num_heads=3)
    variables = _init(layer, x)
    order = jnp.array([3, 0, 4, 1, 2])
    positions = jnp.broadcast_to(order, (BATCH, LENGTH))
    shuffled = _apply(layer, variables, x, causal=True, query_positions=positions).output
    inverse = jnp.argsort(order)
    sorted_out = _apply(layer, variables, x[:, inverse], causal=True).output
    np.testing.assert_allclose(shuffled[:, inverse], sorted_out, atol=1e-6)


def test_weights_are_a_distribution_taken_before_dropout():
    x = _inputs(6)
    layer = MultiHeadAttention(num_heads=1, dropout_rate=0.5)
    variables = _init(layer, x)
    key_mask = jnp.arange(6)[None] < jnp.array([[4], [6]])
    result = _apply(
        layer,
        variables,
        x,
        key_mask=key_mask,
        deterministic=False,
        return_weights=True,
        rngs={"dropout": jax.random.key(5)},
    )
    assert result.weights.shape == (BATCH, 1, 6, 6)
    np.testing.assert_allclose(result.weights.sum(-1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(result.weights[0, :, :, 4:], 0.0)
    calm = _apply(layer, variables, x, key_mask=key_mask, return_weights=True)
    np.testing.assert_array_equal(calm.weights, result.weights)
    assert np.abs(calm.output - result.output).max() > 1e-3


def test_a_bare_function_serves_and_can_not_decode():
    def uniform(query, key, value):
        return jnp.broadcast_to(value.mean(1, keepdims=True), query.shape)

    x = _inputs()
    layer = MultiHeadAttention(num_heads=3, attention=uniform)
    variables = _init(layer, x)
    params = variables["params"]
    value = x @ params["value"]["kernel"] + params["value"]["bias"][None, None]
    expected = value.mean(1, keepdims=True) @ params["out"]["kernel"] + params["out"]["bias"][None, None]
    out = _apply(layer, variables, x).output
    np.testing.assert_allclose(out, jnp.broadcast_to(expected, out.shape), atol=1e-5)
    with pytest.raises(ValueError, match="bare function and has no cache"):
        layer.apply(variables, x, cache={})


def test_a_plain_dense_function_equals_the_record():
    x = _inputs()
    record, plain = MultiHeadAttention(num_heads=3), MultiHeadAttention(num_heads=3, attention=dense_attention)
    variables = _init(record, x)
    np.testing.assert_array_equal(
        _apply(record, variables, x, causal=True).output, _apply(plain, variables, x, causal=True).output
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "embed_dim=12 must be divisible by num_heads=5"),
        ({"num_heads": 0}, "num_heads=0 must be an integer of at least 1"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 must be divisible by num_kv_heads=3"),
        ({"num_heads": 4, "head_dim": 0}, "head_dim=0 must be an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments).init(jax.random.key(0), _inputs())


def test_attention_dropout_differs_between_rows_and_heads():
    x = jnp.ones((3, 4, 12))
    layer = MultiHeadAttention(num_heads=2, dropout_rate=0.5)
    variables = _init(layer, x)
    out = _apply(layer, variables, x, deterministic=False, rngs={"dropout": jax.random.key(0)}).output
    # Equal rows in, different rows out: each drops its own weights.
    assert np.abs(out[0] - out[1]).max() > 1e-4
    assert np.abs(out[1] - out[2]).max() > 1e-4
