"""Locality-sensitive hashing of vectors into buckets by random rotations: close directions share a bucket."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import as_array, check_count, check_key_mask, check_rng, check_tensor, hide_missing
from jaxformer.functional import first_argmax


def draw_rotations(
    rng: Array, num_hashes: int, num_buckets: int | tuple[int, ...], head_dim: int, num_heads: int | None = None
) -> Float[Array, "..."]:
    """Random directions for `lsh_buckets`: standard normal, one set for each round of hashing.

    Args:
      rng: one typed key.
      num_hashes: rounds of hashing, at least 1.
      num_buckets: an even number of buckets, or a tuple of even factors whose product it is: hashing then costs the
        factors' sum, not their product. About 2 * length / chunk_size; fix it for a model, never from a batch.
      head_dim: H.
      num_heads: N, for rotations of each head's own; None = all heads share them.

    Returns:
      float32 [num_hashes, N, H, F] or [num_hashes, H, F], F being half the sum of the factors.

    Raises:
      ValueError: a size below 1, a factor that is not an even number, or an rng that is not one typed key.
    """
    factors = check_factors(num_buckets)
    sizes = {"num_hashes": num_hashes, "head_dim": head_dim, "num_heads": 1 if num_heads is None else num_heads}
    for name, size in sizes.items():
        check_count(size, name)
    heads = () if num_heads is None else (num_heads,)
    return jax.random.normal(check_rng(rng), (num_hashes, *heads, head_dim, sum(factors) // 2), jnp.float32)


def lsh_buckets(
    query_key: ArrayLike,
    rotations: ArrayLike,
    *,
    num_buckets: int | tuple[int, ...] | None = None,
    key_mask: ArrayLike | None = None,
) -> Int[Array, "B N R T"]:
    """The bucket of each token in every round: argmax of [x R, -x R], in float32 and outside the gradient.

    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2. O(T F) time for
    each head and round, F being half the sum of the factors of num_buckets.

    Args:
      query_key: floating [B, T, N, H].
      rotations: floating [R, N, H, F] or [R, H, F] (shared by all heads), from `draw_rotations`. R rounds.
      num_buckets: as it was drawn; None = one factor, 2 F.
      key_mask: bool or 0/1 int [B or 1, T]; padding goes to a bucket of its own, numbered after all others.

    Returns:
      int32 [B, N, R, T].

    Raises:
      ValueError: shapes that do not fit each other, or num_buckets that does not fit the rotations.
    """
    query_key = check_tensor(query_key, "query_key", "[batch, tokens, heads, head_dim]")
    rotations, factors = check_rotations(rotations, num_buckets, query_key.shape[2], query_key.shape[3])
    key_mask = check_key_mask(key_mask, *query_key.shape[:2])
    return hash_tokens(hide_missing(query_key, key_mask), rotations, factors, key_mask)


def hash_tokens(
    query_key: Float[Array, "B T N H"],
    rotations: Float[Array, "R N H F"],
    factors: tuple[int, ...],
    key_mask: Bool[Array, "#B T"] | None,
) -> Int[Array, "B N R T"]:
    """Buckets of checked inputs that hold zeros where no token exists."""
    vectors = lax.stop_gradient(query_key).astype(jnp.float32)

    def one_round(rotations: Float[Array, "N H F"]) -> Int[Array, "B N T"]:
        # Full precision on every backend: a bucket must not depend on where or how often it is computed.
        turned = jnp.einsum("btnh,nhf->bntf", vectors, rotations, precision=lax.Precision.HIGHEST)
        bucket, first = jnp.zeros(turned.shape[:-1], jnp.int32), 0
        for factor in factors:
            part = turned[..., first : first + factor // 2]
            bucket = bucket * factor + first_argmax(jnp.concatenate([part, -part], -1)).astype(jnp.int32)
            first += factor // 2
        return bucket

    # Round by round, so that memory doesn't grow with the number of rounds.
    buckets = jnp.moveaxis(lax.map(one_round, lax.stop_gradient(rotations)), 0, 2)
    if key_mask is None:
        return buckets
    return jnp.where(key_mask[:, None, None, :], buckets, jnp.int32(math.prod(factors)))


def check_factors(num_buckets: int | tuple[int, ...]) -> tuple[int, ...]:
    """The factors of a number of buckets, each even."""
    parts = num_buckets if isinstance(num_buckets, tuple | list) else (num_buckets,)
    factors = tuple(check_count(factor, "num_buckets", 2) for factor in parts)
    if not factors or any(factor % 2 for factor in factors) or math.prod(factors) >= 2**31 - 1:
        raise ValueError(
            f"num_buckets is {num_buckets}; it must be an even number or a tuple of them, their product below 2^31 - 1."
        )
    return factors


def check_rotations(
    rotations: ArrayLike, num_buckets: int | tuple[int, ...] | None, num_heads: int, head_dim: int
) -> tuple[Float[Array, "R N H F"], tuple[int, ...]]:
    """Rotations of every head in float32, and the factors of the number of buckets."""
    rotations = as_array(rotations, "rotations")
    wanted = f"[num_hashes, {num_heads}, {head_dim}, F] or [num_hashes, {head_dim}, F]"
    fits = rotations.ndim in (3, 4) and rotations.shape[1:-1] in ((head_dim,), (num_heads, head_dim))
    if not fits or not jnp.issubdtype(rotations.dtype, jnp.floating) or 0 in rotations.shape:
        raise ValueError(f"rotations are {rotations.dtype} {rotations.shape}; they must be floating {wanted}.")
    factors = check_factors(2 * rotations.shape[-1] if num_buckets is None else num_buckets)
    if sum(factors) != 2 * rotations.shape[-1]:
        raise ValueError(
            f"num_buckets is {num_buckets}, which needs {sum(factors) / 2:g} directions; rotations have "
            f"{rotations.shape[-1]}."
        )
    rotations = rotations.astype(jnp.float32)
    if rotations.ndim == 3:
        rotations = jnp.broadcast_to(rotations[:, None], (rotations.shape[0], num_heads, *rotations.shape[1:]))
    return rotations, factors
