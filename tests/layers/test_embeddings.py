"""Embeddings: the padded vocabulary, the tied head, positions that stay distinct in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.layers import LearnedPositionEmbedding, RelativePositionBias, SinusoidalPositionEmbedding, TokenEmbedding


def test_padded_rows_of_the_vocabulary_are_never_returned():
    layer = TokenEmbedding(vocab_size=5, embed_dim=3, vocab_multiple=8)
    tokens = jnp.array([[0, 4, 2]])
    variables = layer.init(jax.random.key(0), tokens)
    table = variables["params"]["embedding"]
    assert table.shape == (8, 3)
    x = layer.apply(variables, tokens)
    np.testing.assert_array_equal(x[0], table[jnp.array([0, 4, 2])])
    logits = layer.apply(variables, x, method="attend")
    np.testing.assert_allclose(logits, x @ table[:5].T, atol=1e-6)


def test_tied_gradient_is_the_sum_of_both_uses():
    layer = TokenEmbedding(vocab_size=5, embed_dim=3)
    tokens = jnp.array([[1, 3]])
    variables = layer.init(jax.random.key(0), tokens)
    weights = jnp.arange(10.0).reshape(1, 2, 5)

    def both(table_in, table_out):
        x = layer.apply({"params": {"embedding": table_in}}, tokens)
        return (weights * layer.apply({"params": {"embedding": table_out}}, x, method="attend")).sum()

    table = variables["params"]["embedding"]
    tied = jax.grad(lambda table: both(table, table))(table)
    first, second = jax.grad(both, (0, 1))(table, table)
    np.testing.assert_allclose(tied, first + second, atol=1e-6)


def test_sinusoidal_positions_stay_distinct_in_bfloat16():
    layer = SinusoidalPositionEmbedding(embed_dim=6, dtype=jnp.bfloat16)
    out = layer.apply({}, jnp.array([[256, 257, 259]]))
    assert out.dtype == jnp.bfloat16
    expected = jnp.sin(jnp.array([256.0, 257.0, 259.0])).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(out[0, :, 0]), np.float32(expected))
    np.testing.assert_allclose(np.float32(out[0, :2, 0]), [-0.9992080, -0.5733572], atol=2e-3)


def test_learned_positions_are_rows_of_their_table():
    layer = LearnedPositionEmbedding(max_length=7, embed_dim=3)
    positions = jnp.array([[0, 6], [5, 1]])
    variables = layer.init(jax.random.key(0), positions)
    np.testing.assert_array_equal(layer.apply(variables, positions), variables["params"]["embedding"][positions])


def test_relative_bias_reads_the_bucket_of_each_distance():
    layer = RelativePositionBias(num_heads=3, bidirectional=True)
    variables = layer.init(jax.random.key(0))
    bias = layer.apply(variables)(jnp.array([[20, 0]]), jnp.array([[0, 19, 20, 28, 320]]))
    table = variables["params"]["embedding"]
    # T5's published buckets for relative positions -20, -1, 0, +8, +300 and 0, +19, +20, +28, +320.
    assert bias.shape == (1, 3, 2, 5)
    np.testing.assert_array_equal(bias[0, :, 0], table[jnp.array([10, 1, 0, 24, 31])].T)
    np.testing.assert_array_equal(bias[0, :, 1, 2], table[26])
