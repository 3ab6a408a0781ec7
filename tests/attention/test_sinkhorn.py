"""Sinkhorn balancing and attention: the balanced matrix, causality of it, soft padding, SortCut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows_sinkhorn import balanced, sinkhorn_oracle

from jaxformer.attention import block_summaries, sinkhorn, sinkhorn_attention, sinkhorn_attention_weights


def draw(*, batch=2, length=8, heads=4, kv_heads=2, head_dim=3, value_dim=5, blocks=4, seed=0):
    random = np.random.default_rng(seed)
    shapes = [
        (batch, length, heads, head_dim),
        (batch, length, kv_heads, head_dim),
        (batch, length, kv_heads, value_dim),
        (batch, kv_heads, blocks, blocks),
    ]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("block_size", "causal", "sort_cut", "temperature"))
def attend(query, key, value, scores, key_mask=None, **options):
    return sinkhorn_attention(query, key, value, block_scores=scores, key_mask=key_mask, **options)


def test_balancing_converges_to_the_doubly_stochastic_matrix_and_never_overflows():
    scores = jnp.asarray([[1.0, 2.0], [3.0, 0.5]])
    np.testing.assert_allclose(sinkhorn(scores, 50), [[0.1480472, 0.8519528], [0.8519528, 0.1480472]], rtol=2e-6)
    large = sinkhorn(scores * 1000, 50)
    np.testing.assert_allclose(large, [[0.0, 1.0], [1.0, 0.0]], atol=1e-6)
    assert np.isfinite(jax.grad(lambda scores: sinkhorn(scores, 50)[0, 1])(scores * 1000)).all()
    # A soft permutation with some rows and columns missing is that of the rest.
    scores = np.random.default_rng(0).standard_normal((3, 5, 5)).astype(np.float32)
    kept = np.asarray([0, 2, 3])
    mask = np.zeros((5, 5), bool)
    mask[np.ix_(kept, kept)] = True
    part = np.asarray(sinkhorn(scores, 60, mask=mask))
    np.testing.assert_allclose(part[:, kept][:, :, kept], sinkhorn(scores[:, kept][:, :, kept], 60), atol=1e-6)
    np.testing.assert_allclose(part.sum(-2)[:, kept], 1.0, atol=1e-5)
    assert not part[:, [1, 4]].any()
    assert not part[:, :, [1, 4]].any()


def test_minus_infinity_is_an_entry_that_takes_no_part():
    scores = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    mask = np.ones((4, 4), bool)
    mask[1], mask[:, 2] = False, False

    @functools.partial(jax.jit, static_argnames="causal")
    def both(scores, mask, causal):
        outer = jnp.arange(16.0).reshape(4, 4)
        return jax.value_and_grad(
            lambda scores: (outer * sinkhorn(scores, 5, temperature=0.5, mask=mask, causal=causal)).sum()
        )(scores)

    hidden = np.where(mask, scores, -np.inf)
    for causal in (False, True):
        for wanted, found in zip(both(scores, mask, causal), both(hidden, np.ones((4, 4), bool), causal)):
            np.testing.assert_array_equal(wanted, found)
            assert np.isfinite(found).all()
    cold = sinkhorn(scores * 1e30, 3, temperature=1e-30)
    assert np.isfinite(cold).all()

    query, key, value, scores = draw()
    scores = np.array(scores)
    scores[:, :, 1], scores[:, :, :, 2] = -np.inf, -np.inf
    slopes = jax.jit(jax.grad(lambda *arrays: attend(*arrays, block_size=2).sum(), (0, 1, 2, 3)))(
        query, key, value, scores
    )
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_causal_balancing_depends_on_nothing_later():
    """By the Jacobian: row i on rows up to i and on columns before i, and bit-equal whatever follows or how much."""
    scores = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    run = jax.jit(lambda scores: sinkhorn(scores, 8, temperature=0.75, causal=True))
    shares = np.asarray(run(scores))
    np.testing.assert_allclose(shares.sum(-1), [0, 1, 1, 1, 1, 1], atol=1e-6)
    np.testing.assert_array_equal(shares != 0, np.tril(np.ones((6, 6), bool), -1))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = jax.jit(lambda scores: balanced(scores[None, None], jnp.ones((1, 6)), True)[0, 0])(scores)
    np.testing.assert_allclose(shares, want, atol=1e-5)
    reach = np.asarray(jax.jacobian(run)(scores))
    for row in range(6):
        assert not reach[row, :, row + 1 :].any()
        assert not reach[row, :, :, row:].any()
    for row in range(1, 6):
        changed = scores.copy()
        changed[row:] = 1e4
        changed[:, row:] = -1e4
        np.testing.assert_array_equal(run(changed)[:row], shares[:row])
    np.testing.assert_allclose(run(scores[:4, :4]), shares[:4, :4], atol=1e-6)


def test_changing_any_later_block_changes_nothing_earlier():
    """Four blocks of two, scores from the layer's own kind of summaries: the whole path from tokens to outputs."""
    random = np.random.default_rng(1)
    to_scores = random.standard_normal((3, 3)).astype(np.float32)

    @jax.jit
    def layer(x):
        summaries = block_summaries(x, 2, causal=True)
        scores = jnp.einsum("bid,de,bje->bij", summaries, to_scores, summaries)[:, None]
        tokens = x[:, :, None]
        return sinkhorn_attention(tokens, tokens, tokens, block_scores=scores, block_size=2, causal=True)

    x = random.standard_normal((1, 8, 3)).astype(np.float32)
    before = layer(x)
    for block in range(1, 4):
        for content in (-3.0, 1e15):
            changed = x.copy()
            changed[:, 2 * block :] = content
            after = layer(changed)
            np.testing.assert_array_equal(after[:, : 2 * block], before[:, : 2 * block])
    # Earlier blocks do arrive: the first token moves all later ones.
    changed = x.copy()
    changed[:, 0] += 1.0
    assert (np.abs(layer(changed) - before).max((0, 2, 3)) > 0).all()


def test_summaries_are_means_of_what_exists():
    x = np.arange(1.0, 8.0, dtype=np.float32).reshape(1, 7, 1)

    @jax.jit
    def both(x, mask):
        return [block_summaries(x, 3, key_mask=mask, causal=causal).ravel() for causal in (False, True)]

    plain, causal = both(x, np.ones((1, 7), np.int32))
    np.testing.assert_allclose(plain, [2, 5, 7])
    np.testing.assert_allclose(causal, [1, 2.5, 4])
    mask = np.asarray([[1, 0, 1, 0, 0, 0, 0]], np.int32)
    plain, causal = both(np.where(mask[:, :, None] != 0, x, np.float32(np.nan)), mask)
    np.testing.assert_allclose(plain, [2, 0, 0])
    np.testing.assert_allclose(causal, [1, 2, 2])


def test_a_hard_permutation_brings_one_block_and_blocks_of_one_sort_tokens():
    """Scores of 100 on a permutation: softmax over exactly the own and the chosen token."""
    query, key, value, _ = draw(length=4, heads=2)
    chosen = np.asarray([2, 3, 1, 0])
    scores = np.zeros((1, 1, 4, 4), np.float32)
    scores[:, :, np.arange(4), chosen] = 100.0
    output = attend(query, key, value, scores, block_size=1)
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(3.0)
    seen = np.eye(4, dtype=bool)
    seen[np.arange(4), chosen] = True
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    np.testing.assert_allclose(output, jnp.einsum("bnts,bsnv->btnv", weights, value), atol=1e-5)


@pytest.mark.slow
def test_sort_cut_and_scores_per_head_equal_the_oracle():
    query, key, value, scores = draw()
    mask = np.random.default_rng(3).random((2, 8)) < 0.7
    options = {"block_size": 3, "sort_cut": 2}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        inputs = {"query": query, "key": key, "value": value, "block_scores": scores}
        inputs = {name: array.astype(np.float64) for name, array in inputs.items()}
        want, weights = jax.jit(lambda inputs: sinkhorn_oracle(inputs, key_mask=mask, causal=False, **options))(inputs)
    np.testing.assert_allclose(attend(query, key, value, scores, mask, **options), want, atol=2e-5)
    actual = jax.jit(
        lambda query, key: sinkhorn_attention_weights(query, key, block_scores=scores, key_mask=mask, **options)
    )(query, key)
    np.testing.assert_allclose(actual, weights, atol=2e-5)


def test_unsupported_pairs_are_refused():
    query, key, value, scores = draw()
    refused = {
        "sort_cut shows": {"sort_cut": 2, "causal": True},
        "sort_cut is 0": {"sort_cut": 0},
        "temperature is 0": {"temperature": 0.0},
        "temperature is 1e-40": {"temperature": 1e-40},
        "temperature is True": {"temperature": True},
        "temperature is nan": {"temperature": float("nan")},
        "num_iterations is 0": {"num_iterations": 0},
        "block_size is 0": {"block_size": 0},
        "for fewer blocks than the 8": {"block_size": 1},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            sinkhorn_attention(query, key, value, block_scores=scores, **{"block_size": 2, **options})
    with pytest.raises(ValueError, match="self-attention only"):
        sinkhorn_attention(query[:, :4], key, value, block_scores=scores, block_size=2)


@pytest.mark.slow
def test_memory_grows_with_blocks_not_with_pairs():
    def bytes_at(length):
        tokens = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        scores = jax.ShapeDtypeStruct((1, 2, length // 64, length // 64), jnp.float32)

        def loss(tokens, scores):
            return sinkhorn_attention(tokens, tokens, tokens, block_scores=scores, block_size=64).sum()

        compiled = jax.jit(jax.grad(loss)).lower(tokens, scores).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_at(4096) < 2.3 * bytes_at(2048)
