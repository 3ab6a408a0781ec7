"""Linformer and memory-compressed attention: what is special to each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.attention.linformer as linformer
from jaxformer.attention import (
    attention_spectrum,
    compressed_attention,
    compressed_attention_weights,
    compressed_cache,
    compressed_step,
    effective_rank,
    init_compressed_cache,
    linformer_attention,
    linformer_attention_weights,
    rank_for_share,
)


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


def test_compressed_kernels_are_a_strided_convolution():
    """One head, all channels mixed: keys and values as JAX's own convolution pools them."""
    query, key, value = draw(queries=5, keys=9, heads=1, kv_heads=1)
    random = np.random.default_rng(1)
    kernels = [random.standard_normal((4, 1, size, size)).astype(np.float32) for size in (3, 5)]
    output = jax.jit(
        lambda *arrays: compressed_attention(
            *arrays[:3], stride=3, window_size=4, key_kernel=arrays[3], value_kernel=arrays[4]
        )
    )(query, key, value, *kernels)

    def convolve(array, kernel):
        return jax.lax.conv_general_dilated(
            array[:, :, 0], kernel[:, 0], (3,), [(0, 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )

    slots, contents = convolve(key, kernels[0]), convolve(value, kernels[1])
    assert slots.shape[1] == 3
    weights = jax.nn.softmax(jnp.einsum("bth,bch->btc", query[:, :, 0], slots) / jnp.sqrt(3.0))
    np.testing.assert_allclose(output[:, :, 0], weights @ contents, atol=1e-5)


def test_compressed_by_counting():
    """Zero logits and stride 3: query 7 sees the means 1 and 4 of two windows, then tokens 6 and 7 as they are."""
    zeros = jnp.zeros((1, 8, 1, 1))
    value = jnp.arange(8.0).reshape(1, 8, 1, 1)
    attend = jax.jit(compressed_attention, static_argnames=("stride", "recent", "causal"))
    output = attend(zeros, zeros, value, stride=3, causal=True).ravel()
    # Query 5 ends a window, which it does not see as a slot yet; query 2 sees tokens alone.
    np.testing.assert_allclose(output[jnp.asarray([2, 5, 7])], [1.0, (1 + 3 + 4 + 5) / 4, (1 + 4 + 6 + 7) / 4])
    weights = jax.jit(lambda zeros: compressed_attention_weights(zeros, zeros, stride=3, causal=True)[0, 0, 7])(zeros)
    np.testing.assert_allclose(weights, np.asarray([1, 1, 1, 1, 1, 1, 3, 3]) / 12, rtol=1e-6)
    output = attend(zeros, zeros, value, stride=3, causal=True, recent=False).ravel()
    np.testing.assert_allclose(output, [0, 0, 1, 1, 1, 2.5, 2.5, 2.5])


@pytest.mark.slow
def test_compressed_prompts_in_chunks_equal_the_full_pass(monkeypatch):
    """A prompt longer than a chunk, left-padded by two and with a hole, then single tokens; every kind of kernel."""
    monkeypatch.setattr(compressed_cache, "CHUNK", 4)
    query, key, value = draw(queries=13, keys=13, heads=4)
    random = np.random.default_rng(1)
    key_kernel = random.standard_normal((3, 2, 3, 3)).astype(np.float32)
    options = {"stride": 2, "window_size": 3}
    mask = np.ones((2, 13), bool)
    mask[1, :2] = mask[:, 6] = False
    positions = np.maximum(np.arange(13)[None] - np.asarray([[0], [2]]), 0).astype(np.int32)
    cache = init_compressed_cache(2, 13, 2, 3, value_dim=5, **options)
    cache = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), cache)

    @jax.jit
    def step(cache, query, key, value, positions, mask):
        given = {"positions": positions, "key_mask": mask, "layer": 1, "key_kernel": key_kernel, **options}
        return compressed_step(cache, query, key, value, **given)

    outputs, stop = [], 0
    for length in (11, 1, 1):
        start, stop = stop, stop + length
        output, cache = step(cache, *(array[:, start:stop] for array in (query, key, value, positions, mask)))
        outputs.append(output)
    decoded = jnp.concatenate(outputs, 1)
    assert cache.index.tolist() == [0, 13]
    assert not cache.slot_count[0].any()
    full = jax.jit(
        lambda *arrays: compressed_attention(
            *arrays[:3], causal=True, key_mask=arrays[3], key_kernel=key_kernel, **options
        )
    )
    for row, start in enumerate((0, 2)):
        alone = [array[row : row + 1, start:] for array in (query, key, value, mask)]
        np.testing.assert_allclose(decoded[row : row + 1, start:], full(*alone), atol=1e-5)


def test_compressed_refuses_what_does_not_fit():
    query, key, value = draw(queries=4, keys=4)
    with pytest.raises(ValueError, match="stride is 0"):
        compressed_attention(query, key, value, stride=0)
    with pytest.raises(ValueError, match="shorter than the stride 3 it would skip tokens"):
        compressed_attention(query, key, value, stride=3, window_size=2)
    with pytest.raises(ValueError, match=r"key_kernel has shape \(2,\)"):
        compressed_attention(query, key, value, stride=3, key_kernel=np.ones(2, np.float32))
    with pytest.raises(ValueError, match="no one matrix"):
        compressed_attention_weights(query, key, stride=3, value_kernel=np.ones((3, 5), np.float32))
    with pytest.raises(ValueError, match="4 queries over 3 keys"):
        compressed_attention(query, key[:, :3], value[:, :3], stride=3, causal=True)
    cache = init_compressed_cache(2, 3, 2, 3, stride=3, value_dim=5)
    with pytest.raises(ValueError, match="4 tokens do not fit"):
        compressed_step(cache, query, key, value, stride=3)
    with pytest.raises(ValueError, match="recent tokens"):
        compressed_step(cache, query, key, value, stride=2)


@pytest.mark.slow
def test_spectrum_equals_numpy_and_known_ranks():
    random = np.random.default_rng(0)
    weights = random.random((3, 7, 5)).astype(np.float32)
    values, cumulative = attention_spectrum(weights)
    want = np.linalg.svd(weights.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(values, want, atol=1e-5)
    shares = want / want.sum(-1, keepdims=True)
    np.testing.assert_allclose(cumulative, shares.cumsum(-1), atol=1e-5)
    np.testing.assert_allclose(effective_rank(weights), np.exp(-(shares * np.log(shares)).sum(-1)), rtol=1e-4)
    np.testing.assert_array_equal(rank_for_share(weights), (shares.cumsum(-1) < 0.9).sum(-1) + 1)
    # Attention of each token to itself alone has full rank, to all alike rank 1, to nothing rank 0.
    known = np.stack([np.eye(10), np.full((10, 10), 0.1), np.zeros((10, 10))]).astype(np.float32)
    np.testing.assert_allclose(effective_rank(known), [10, 1, 0], rtol=1e-4)
    np.testing.assert_array_equal(rank_for_share(known, 0.85), [9, 1, 0])
    # Singular values 3 and 1.
    np.testing.assert_allclose(effective_rank(np.diag([3.0, 1.0])), 4 / 3**0.75, rtol=1e-5)
    with pytest.raises(ValueError, match="share is 90"):
        rank_for_share(known, 90)
    with pytest.raises(ValueError, match="weights is int"):
        effective_rank(np.ones((2, 2), np.int32))


def test_many_queries_go_by_blocks_and_give_the_same(monkeypatch):
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.standard_normal((2, 11, 3, 5)), jnp.float32) for _ in range(3))
    projection = jnp.asarray(random.standard_normal((4, 11)), jnp.float32)

    def run(*arrays):
        return (linformer_attention(*arrays[:3], key_projection=arrays[3]) ** 2).sum()

    want = jax.jit(jax.value_and_grad(run, (0, 1, 2, 3)))(query, key, value, projection)
    monkeypatch.setattr(linformer, "QUERIES_AT_ONCE", 4)
    got = jax.jit(jax.value_and_grad(lambda *arrays: run(*arrays), (0, 1, 2, 3)))(query, key, value, projection)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
