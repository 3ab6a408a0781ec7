"""Embeddings: tokens (with the tied output head) and absolute positions, learned or sinusoidal."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional import RelativeBias, sinusoidal_positions


class TokenEmbedding(nn.Module):
    """A table of token vectors, usable as the tied output head.

    Args:
      vocab_size: tokens that exist.
      embed_dim: width of a vector (d_model).
      vocab_multiple: the table is padded to a multiple of this many rows; the extra rows are never read by a valid
        token and never returned by ``attend``.
      dtype: dtype of the vectors returned.
      param_dtype: dtype of ``embedding`` [padded vocabulary, embed_dim].
      embedding_init: initialiser of the table.
    """

    vocab_size: int
    embed_dim: int
    vocab_multiple: int = 1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    embedding_init: Callable = nn.initializers.normal(0.02)

    def setup(self) -> None:
        """Declare the table."""
        rows = -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
        self.embedding = self.param("embedding", self.embedding_init, (rows, self.embed_dim), self.param_dtype)

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Look the tokens up; ids outside the vocabulary give the nearest row's vector (checked where data is read)."""
        return jnp.take(self.embedding, tokens, axis=0, mode="clip").astype(self.dtype)

    def attend(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Logits float32 of every token of the vocabulary: ``x`` times the transposed table, padded rows left out."""
        logits = jnp.einsum(
            "...d,vd->...v",
            x,
            self.embedding.astype(x.dtype),
            preferred_element_type=jnp.promote_types(x.dtype, "float32"),
        )
        return logits[..., : self.vocab_size]


class LearnedPositionEmbedding(nn.Module):
    """A learned vector for each of ``max_length`` positions.

    Args:
      max_length: positions that exist, in tokens.
      embed_dim: width of a vector.
      dtype: dtype of the vectors returned.
      param_dtype: dtype of ``embedding`` [max_length, embed_dim].
      embedding_init: initialiser of the table.
    """

    max_length: int
    embed_dim: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    embedding_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, positions: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Look the positions up; the caller keeps them below ``max_length``."""
        table = self.param("embedding", self.embedding_init, (self.max_length, self.embed_dim), self.param_dtype)
        return jnp.take(table, positions, axis=0, mode="clip").astype(self.dtype)


class SinusoidalPositionEmbedding(nn.Module):
    """Fixed sines and cosines of geometrically spaced wavelengths (no parameters).

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.5. Angles are computed in float32
    whatever ``dtype`` is, so that positions above 256 stay distinct in bfloat16.

    Args:
      embed_dim: width of a vector.
      dtype: dtype of the vectors returned.
    """

    embed_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, positions: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Vectors of the given positions."""
        return jax.lax.stop_gradient(sinusoidal_positions(positions, self.embed_dim, dtype=self.dtype))


class RelativePositionBias(nn.Module):
    """T5's learned bias of each head for each bucket of relative positions.

    Raffel et al. 2020, arXiv:1910.10683, section 2.1.

    Args:
      num_heads: heads of the attention it is added to.
      num_buckets: buckets of relative positions.
      max_distance: distance in tokens from which all share the last bucket.
      bidirectional: half of the buckets are for keys after the query.
      param_dtype: dtype of ``embedding`` [num_buckets, num_heads].
      embedding_init: initialiser of the table.
    """

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    param_dtype: Any = jnp.float32
    embedding_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self) -> RelativeBias:
        """The bias as a function of positions, which attention evaluates block by block."""
        shape = (self.num_buckets, self.num_heads)
        table = self.param("embedding", self.embedding_init, shape, self.param_dtype)
        return RelativeBias(table, bidirectional=self.bidirectional, max_distance=self.max_distance)
