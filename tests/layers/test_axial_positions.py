"""Axial positions: vectors of rows and columns, at any length up to their product, and by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import AxialPositionEmbedding, square_axes
from jaxformer.models import TransformerConfig

SHAPE = {"vocab_size": 13, "num_layers": 1, "embed_dim": 6, "num_heads": 1}


EVERY = np.arange(12)[None]


def make(axial_dims=(2, 4)):
    """The function from tables and positions, and tables of a shape of 3 rows and 4 columns."""
    layer = AxialPositionEmbedding((3, 4), 6, axial_dims)
    draw = np.random.default_rng(0)
    tables = [draw.normal(size=(size, width)).astype(np.float32) for size, width in zip((3, 4), axial_dims or (6, 6))]

    def embed(tables, positions):
        params = {f"axis_{axis}": {"embedding": table} for axis, table in enumerate(tables)}
        return layer.apply({"params": params}, jnp.asarray(positions))

    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros((1, 5), jnp.int32)))["params"]
    assert [shapes[f"axis_{axis}"]["embedding"].shape for axis in range(2)] == [table.shape for table in tables]
    return jax.jit(embed), tables


@pytest.mark.parametrize("axial_dims", [(2, 4), None])
def test_a_position_has_its_row_and_its_column(axial_dims):
    embed, (rows, columns) = make(axial_dims)
    found = embed((rows, columns), EVERY)[0]
    for row in range(3):
        for column in range(4):
            parts = rows[row], columns[column]
            wanted = np.concatenate(parts) if axial_dims else parts[0] + parts[1]
            np.testing.assert_array_equal(found[4 * row + column], wanted)


def test_shorter_rows_and_single_positions_are_parts_of_the_whole():
    embed, tables = make()
    whole = np.asarray(embed(tables, EVERY))
    np.testing.assert_array_equal(embed(tables, EVERY[:, :7]), whole[:, :7])
    mixed = np.array([[11, 0, 5], [6, 6, 1]])
    np.testing.assert_array_equal(embed(tables, mixed), whole[0][mixed])


def test_each_vector_gets_the_gradient_of_all_its_positions():
    embed, tables = make(None)
    rows, columns = jax.jit(jax.grad(lambda tables: embed(tables, EVERY[:, :7]).sum()))(tables)
    np.testing.assert_array_equal(rows[:, 0], [4, 3, 0])
    np.testing.assert_array_equal(columns[:, 0], [2, 2, 2, 1])


def test_three_axes_count_like_digits():
    layer = AxialPositionEmbedding((2, 3, 5), 1)
    digits = [
        np.float32(unit) * np.arange(size, dtype=np.float32)[:, None] for unit, size in ((100, 2), (10, 3), (1, 5))
    ]
    params = {f"axis_{axis}": {"embedding": table} for axis, table in enumerate(digits)}
    found = jax.jit(layer.apply)({"params": params}, np.array([0, 4, 5, 14, 15, 29]))
    np.testing.assert_array_equal(found[:, 0], [0, 4, 10, 24, 100, 124])


@pytest.mark.parametrize(("length", "axes"), [(1, (1, 1)), (7, (3, 3)), (12, (3, 4)), (16, (4, 4)), (17, (4, 5))])
def test_default_axes_hold_every_position(length, axes):
    assert square_axes(length) == axes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axial_shape": (3, 4)}, r"axial_shape=\(3, 4\) needs positions='axial', not 'learned'"),
        ({"positions": "axial", "axial_shape": (3, 4), "max_length": 13}, "has 12 positions, fewer than max_length=13"),
        ({"positions": "axial", "axial_shape": (3, 0)}, r"axial_shape=\(3, 0\) must be a tuple of positive integers"),
        ({"positions": "axial", "axial_dims": (6,)}, r"axial_dims=\(6,\) must be None or 2 positive integers"),
        ({"positions": "axial", "axial_dims": (3, 4)}, r"axial_dims=\(3, 4\) must add up to embed_dim=6, not 7"),
    ],
)
def test_axes_that_do_not_fit_are_refused_when_configured(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SHAPE, **fields})


def test_lists_of_a_configuration_file_are_tuples():
    config = TransformerConfig(**SHAPE, positions="axial", axial_shape=[3, 4], axial_dims=[2, 4], max_length=11)
    assert (config.axial_shape, config.axial_dims) == ((3, 4), (2, 4))
