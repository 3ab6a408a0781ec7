"""Positions as features (sinusoidal, rotary) and as biases on attention logits (ALiBi, T5 buckets).

Angles and distances are computed in float32 from integer positions and rounded afterwards: bfloat16 cannot tell
position 257 from 256.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Num

from jaxformer.functional.checks import as_integers, token_pairs
from jaxformer.functional.numerics import compute_dtype


def sinusoidal_positions(
    positions: ArrayLike, embed_dim: int, *, max_wavelength: float = 10_000.0, dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Fixed position features: sin(p / max_wavelength^(2i/D)) at feature 2i, the cosine at feature 2i + 1.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.5. An odd width ends on a sine.

    Args:
      positions: int [...] (or float32 for fractional positions), in tokens.
      embed_dim: D, number of features, at least 1.
      max_wavelength: 1 / (2 pi) of the longest wavelength, in tokens.
      dtype: dtype of the result.

    Returns:
      [..., D] in dtype.

    Raises:
      ValueError: embed_dim below 1, or positions in a floating type of fewer than 32 bits.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import sinusoidal_positions
        >>> sinusoidal_positions(jnp.array([0, 1]), 4).round(3).tolist()[0]
        [0.0, 1.0, 0.0, 1.0]
    """
    if embed_dim < 1:
        raise ValueError(f"embed_dim is {embed_dim}; it must be at least 1.")
    angles = _angles(positions, embed_dim, max_wavelength, compute_dtype(dtype))
    features = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return features.reshape((*angles.shape[:-1], -1))[..., :embed_dim].astype(dtype)


def apply_rotary(
    x: ArrayLike, positions: ArrayLike, *, base: float = 10_000.0, fraction: float = 1.0
) -> Float[Array, "B T N H"]:
    """Rotates pairs of features of queries or keys by angles that grow with the position.

    Feature i turns with feature i + R/2 by the angle p * base^(-2i/R), R being the number of rotated features: the
    "rotate half" pairing of GPT-NeoX and Llama. The product of a rotated query and key depends on their distance only.
    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, equation 34,
    which pairs neighbours instead: the same up to an order of features.

    Args:
      x: floating [B, T, N, H], queries or keys.
      positions: int [B, T] or [1, T] (or float32 for fractional positions), in tokens.
      base: the slowest pair turns by nearly 1 / base radians per token.
      fraction: share of the features that are rotated, in [0, 1]; the count is rounded down to an even one, and the
        features behind it pass unchanged.

    Returns:
      [B, T, N, H] in x.dtype.

    Raises:
      ValueError: shapes that do not fit, x not floating, fraction outside [0, 1], or positions of too few bits.
    """
    x, positions = jnp.asarray(x), jnp.asarray(positions)
    if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; it must be floating [batch, tokens, heads, features].")
    if positions.ndim != 2 or positions.shape[0] not in (1, x.shape[0]) or positions.shape[1] != x.shape[1]:
        raise ValueError(f"positions have shape {positions.shape}; they must be {x.shape[:2]} or {(1, x.shape[1])}.")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}; it must be within [0, 1].")
    rotated_dim = 2 * (int(x.shape[-1] * fraction) // 2)
    return _rotate(x, positions, base, rotated_dim) if rotated_dim else x


def alibi_slopes(num_heads: int) -> Float[Array, "N"]:
    """Slopes of ALiBi: the geometric sequence 2^(-8/N), 2^(-16/N), .. for N heads.

    Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv:2108.12409, section 3. When N is no power of two, the
    sequence of the power below it is followed by every other slope of the power above, as in the authors' code.

    Args:
      num_heads: N, at least 1.

    Returns:
      float32 [N].

    Raises:
      ValueError: num_heads below 1.

    Examples:
        >>> from jaxformer.functional import alibi_slopes
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; it must be at least 1.")
    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
    return jnp.asarray(np.concatenate([slopes, between])[:num_heads], jnp.float32)


def relative_position_bucket(
    relative_position: ArrayLike, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Int[Array, "..."]:
    """Bucket of a relative position: one each for near ones, logarithmically wider ones up to max_distance.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv:1910.10683, section 2.1, and the T5 code.

    Args:
      relative_position: int [...], key position minus query position (tokens).
      bidirectional: half of the buckets for keys after the query; otherwise such keys all share bucket 0.
      num_buckets: number of buckets: at least 2; even and at least 4 if bidirectional.
      max_distance: distance (tokens) from which on all share the last bucket, above the number of exact buckets.

    Returns:
      int32 [...], in [0, num_buckets).

    Raises:
      ValueError: relative_position is not integer, or num_buckets or max_distance is too small.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import relative_position_bucket
        >>> relative_position_bucket(jnp.array([-200, -3, -1, 0, 1]), bidirectional=False).tolist()
        [31, 3, 1, 0, 0]
    """
    relative_position = as_integers(relative_position, "relative_position")
    _check_buckets(bidirectional, num_buckets, max_distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0).astype(jnp.int32)
        return offset + _distance_bucket(jnp.abs(relative_position), num_buckets, max_distance)
    return _distance_bucket(jnp.maximum(-relative_position, 0), num_buckets, max_distance)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AlibiBias:
    """ALiBi as a function of positions: -slope * |query position - key position|, evaluated block by block.

    A pytree: slopes may be learned. See `alibi_slopes` for the paper; without a causal mask it is symmetric.

    Attributes:
      slopes: floating [N], one per head.
    """

    slopes: Any  # An array, but tree transformations rebuild the object around specifications and placeholders too.

    def __call__(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Float[Array, "B N T S"]:
        """The bias for a block.

        Args:
          query_positions: int [B, T] or [1, T].
          key_positions: int [B, S] or [1, S].

        Returns:
          [B, N, T, S], float32 (float64 for float64 slopes).

        Raises:
          ValueError: positions are not integer [B, T] and [B, S].
        """
        return _alibi(jnp.asarray(self.slopes), *token_pairs(query_positions, key_positions, "positions"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RelativeBias:
    """The learned bias of T5 as a function of positions: one number per bucket of distance and head.

    A pytree: the table gets gradients. See `relative_position_bucket` for the paper and the buckets.

    Attributes:
      table: floating [num_buckets, N].
      bidirectional: whether keys after the query have buckets of their own.
      max_distance: distance (tokens) from which on all share the last bucket.
    """

    table: Any  # An array, or whatever a tree transformation puts in its place.
    bidirectional: bool = field(metadata={"static": True})
    max_distance: int = field(default=128, metadata={"static": True})

    def __call__(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Float[Array, "B N T S"]:
        """The bias for a block.

        Args:
          query_positions: int [B, T] or [1, T].
          key_positions: int [B, S] or [1, S].

        Returns:
          [B, N, T, S], float32 (float64 for a float64 table).

        Raises:
          ValueError: positions are not integer [B, T] and [B, S], or the table has too few buckets.
        """
        table = jnp.asarray(self.table)
        distances = _distances(*token_pairs(query_positions, key_positions, "positions"))
        buckets = relative_position_bucket(
            distances,
            bidirectional=self.bidirectional,
            num_buckets=table.shape[0],
            max_distance=self.max_distance,
        )
        return _look_up(table, buckets)


def _angles(positions: ArrayLike, dim: int, wavelength: float, dtype: DTypeLike) -> Float[Array, "*positions half"]:
    """Angle of every position at each of ceil(dim / 2) frequencies."""
    positions = jnp.asarray(positions)
    if jnp.issubdtype(positions.dtype, jnp.floating) and jnp.finfo(positions.dtype).bits < 32:
        raise ValueError(f"positions are {positions.dtype}, which merges neighbours; pass integers or float32.")
    frequencies = jnp.asarray(float(wavelength) ** (-np.arange(0, dim, 2) / dim), dtype)
    return positions.astype(dtype)[..., None] * frequencies.reshape((1,) * positions.ndim + frequencies.shape)


def _rotate(
    x: Float[Array, "B T N H"], positions: Num[Array, "#B T"], base: float, rotated_dim: int
) -> Float[Array, "B T N H"]:
    dtype = compute_dtype(x.dtype)
    angles = _angles(positions, rotated_dim, base, dtype)[:, :, None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x[..., :rotated_dim].astype(dtype), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + [x[..., rotated_dim:]], axis=-1)


def _check_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    if num_buckets < (4 if bidirectional else 2) or (bidirectional and num_buckets % 2):
        need = "even and at least 4 if bidirectional" if bidirectional else "at least 2"
        raise ValueError(f"num_buckets is {num_buckets}; it must be {need}.")
    exact = num_buckets // (4 if bidirectional else 2)
    if max_distance <= exact:
        raise ValueError(f"max_distance is {max_distance}; it must be above the {exact} exact buckets.")


def _distance_bucket(distance: Int[Array, "..."], num_buckets: int, max_distance: int) -> Int[Array, "..."]:
    exact = num_buckets // 2
    ratio = jnp.maximum(distance, exact).astype(jnp.float32) / exact
    octaves = jnp.log(ratio) / math.log(max_distance / exact)
    wide = exact + (octaves * (num_buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, distance, jnp.minimum(wide, num_buckets - 1))


def _distances(query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]) -> Int[Array, "B T S"]:
    return key_positions[:, None, :] - query_positions[:, :, None]


def _alibi(
    slopes: Float[Array, "N"], query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
) -> Float[Array, "B N T S"]:
    dtype = compute_dtype(slopes.dtype)
    distances = jnp.abs(_distances(query_positions, key_positions)).astype(dtype)
    return -slopes.astype(dtype)[None, :, None, None] * distances[:, None]


def _look_up(table: Float[Array, "num_buckets N"], buckets: Int[Array, "B T S"]) -> Float[Array, "B N T S"]:
    table = table.astype(compute_dtype(table.dtype))
    return jnp.moveaxis(table[buckets], -1, 1)
