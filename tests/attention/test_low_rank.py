"""Linformer and memory-compressed attention: what is special to each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import linformer_attention, linformer_attention_weights


def draw(*, batch=2, queries, keys, heads=2, kv_heads=2, head_dim=3, value_dim=5, seed=0):
    random = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, head_dim),
        (batch, keys, kv_heads, head_dim),
        (batch, keys, kv_heads, value_dim),
    ]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def test_linformer_is_refused_where_it_has_no_meaning():
    query, key, value = draw(queries=4, keys=9)
    projection = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="cannot be causal: its projections mix all positions"):
        linformer_attention(query, key[:, :8], value[:, :8], key_projection=projection, causal=True)
    with pytest.raises(ValueError, match="9 keys are more than the max_length of key_projection, 8"):
        linformer_attention(query, key, value, key_projection=projection)
    with pytest.raises(ValueError, match="rank 2 and value_projection 3"):
        linformer_attention(
            query, key[:, :8], value[:, :8], key_projection=projection, value_projection=np.ones((3, 8), np.float32)
        )
    with pytest.raises(ValueError, match=r"key_projection has shape \(5, 2, 8\).*2 kv_heads"):
        linformer_attention(query, key, value, key_projection=np.ones((5, 2, 8), np.float32))


def test_linformer_on_a_short_input_is_the_padded_one_whatever_the_padding_holds():
    """Five tokens use the first five columns, and so do eight of which three are padding."""
    query, key, value = draw(queries=8, keys=8)
    random = np.random.default_rng(1)
    # The last slot is made of columns that no short input has, so that it must vanish.
    projection = random.standard_normal((2, 3, 8)).astype(np.float32)
    projection[:, 2, :5] = 0.0
    run = jax.jit(linformer_attention)
    short = run(query[:, :5], key[:, :5], value[:, :5], key_projection=projection)
    mask = np.arange(8)[None] < 5
    for content in (0.0, 1e30, np.nan):
        filled = [jnp.where(mask[:, :, None, None], array, content) for array in (key, value)]
        padded = run(query, *filled, key_projection=projection, key_mask=mask)
        np.testing.assert_allclose(padded[:, :5], short, atol=1e-6)


def test_linformer_by_hand():
    """Two slots: the sum of both keys and the second alone; logits ln 3 and 0; values 10 and 2."""
    query = jnp.ones((1, 1, 1, 1))
    key = jnp.asarray([np.log(3.0), 0.0], jnp.float32).reshape(1, 2, 1, 1)
    value = jnp.asarray([8.0, 2.0]).reshape(1, 2, 1, 1)
    projection = np.asarray([[1.0, 1.0], [0.0, 1.0]], np.float32)
    output = linformer_attention(query, key, value, key_projection=projection)
    np.testing.assert_allclose(output.ravel(), [0.75 * 10 + 0.25 * 2], rtol=1e-6)
    weights = linformer_attention_weights(query, key, key_projection=projection)
    np.testing.assert_allclose(weights.ravel(), [0.75, 1.0], rtol=1e-6)


def test_linformer_with_a_projection_per_head_is_each_head_with_its_own():
    query, key, value = draw(queries=4, keys=7, heads=6, kv_heads=3)
    first, second = (np.random.default_rng(seed).standard_normal((3, 2, 9)).astype(np.float32) for seed in (1, 2))
    mask = np.arange(7)[None] != 3
    run = jax.jit(linformer_attention)
    output = run(query, key, value, key_projection=first, value_projection=second, key_mask=mask)
    for head in range(3):
        one, two = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        alone = {"key_projection": first[head], "value_projection": second[head], "key_mask": mask}
        want = run(query[:, :, two], key[:, :, one], value[:, :, one], **alone)
        np.testing.assert_allclose(output[:, :, two], want, atol=1e-6)


def temporary_bytes(function, *arrays):
    compiled = jax.jit(jax.grad(lambda *arrays: function(*arrays).sum(), (0, 1, 2))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_linformer_memory_is_linear():
    def bytes_at(length):
        shapes = [(1, length, 2, 16)] * 3
        projection = np.ones((8, length), np.float32)
        return temporary_bytes(
            lambda *arrays: linformer_attention(*arrays, key_projection=projection),
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        )

    assert bytes_at(4096) < 2.2 * bytes_at(2048)
