"""Axial position embedding: vectors of the row and the column of a position, in place of a vector of its own."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.layers.embeddings import LearnedPositionEmbedding


def check_axes(axial_shape: Any, axial_dims: Any, embed_dim: int) -> None:
    """Refuses a shape or widths that make no axial embedding of this width.

    Raises:
      ValueError: as said.
    """
    if not _are_counts(axial_shape) or not axial_shape:
        raise ValueError(f"axial_shape={axial_shape!r} must be a tuple of positive integers, as (rows, columns)")
    if axial_dims is None:
        return
    if not _are_counts(axial_dims) or len(axial_dims) != len(axial_shape):
        raise ValueError(
            f"axial_dims={axial_dims!r} must be None or {len(axial_shape)} positive integers, one for each axis of "
            f"axial_shape={axial_shape!r}"
        )
    if sum(axial_dims) != embed_dim:
        raise ValueError(f"axial_dims={axial_dims!r} must add up to embed_dim={embed_dim}, not {sum(axial_dims)}")


def square_axes(max_length: int) -> tuple[int, int]:
    """The (rows, columns) nearest to a square that have at least ``max_length`` positions."""
    columns = math.isqrt(max_length - 1) + 1
    return -(-max_length // columns), columns


class AxialPositionEmbedding(nn.Module):
    """A learned vector for each row and each column of an array of positions: rows + columns, not their product.

    Position p stands in row p // columns and column p % columns. Its vector is the row's and the column's side by side
    (Kitaev et al. 2020, "Reformer", arXiv:2001.04451, as its published configurations do; Ho et al. 2019, "Axial
    Attention in Multidimensional Transformers", arXiv:1912.12180), or their sum (Child et al. 2019, arXiv:1904.10509,
    section 5.3, with columns = stride). Positions are looked up by number, so that a row of any length up to the
    product, a part of one, and a decoded token have the vectors that they have in the whole array. Deviation: tables
    are initialised as other embeddings are, not with unit variance.

    Args:
      axial_shape: rows and columns (and further axes, the last changing fastest).
      embed_dim: width of a vector.
      axial_dims: width of each axis's part, adding up to embed_dim; None = the sum of parts of full width.
      dtype: dtype of the vectors returned.
      param_dtype: dtype of ``axis_0/embedding`` [rows, width], ``axis_1/embedding`` [columns, width], ….
      embedding_init: initialiser of the tables.

    Raises:
      ValueError: widths that do not add up to embed_dim, or are not one for each axis.
    """

    axial_shape: tuple[int, ...]
    embed_dim: int
    axial_dims: tuple[int, ...] | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    embedding_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, positions: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Look the positions up; the caller keeps them below the product of ``axial_shape``."""
        check_axes(self.axial_shape, self.axial_dims, self.embed_dim)
        positions = jnp.clip(positions, 0, math.prod(self.axial_shape) - 1)
        parts = []
        for axis, size in enumerate(self.axial_shape):
            index = positions // math.prod(self.axial_shape[axis + 1 :]) % size
            width = self.embed_dim if self.axial_dims is None else self.axial_dims[axis]
            arguments = (size, width, self.dtype, self.param_dtype, self.embedding_init)
            parts.append(LearnedPositionEmbedding(*arguments, name=f"axis_{axis}")(index))
        return sum(parts[1:], parts[0]) if self.axial_dims is None else jnp.concatenate(parts, -1)


def _are_counts(values: Any) -> bool:
    """Whether this is a tuple of positive integers."""
    return isinstance(values, tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values
    )
