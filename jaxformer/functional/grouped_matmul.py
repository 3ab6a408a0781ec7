"""Products of blocks of rows, each with one of several kernels: every row meets its own expert's kernel only."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxformer.functional.checks import as_floating, as_integers
from jaxformer.functional.numerics import compute_dtype


def grouped_matmul(x: ArrayLike, kernels: ArrayLike, owners: ArrayLike) -> Float[Array, "G M H"]:
    """Each block times its owner's kernel, O(G M D H) time: neither unused kernels nor copies of kernels are touched.

    One block after the other, so that nothing of size [G, D, H] exists, forward or backward: the kernels' gradient is
    added up in place, in at least float32. (`jax.lax.ragged_dot` multiplies every row by all E kernels where the
    backend has no such product of its own, as on CPUs.)

    Args:
      x: floating [G, M, D], G blocks of M rows.
      kernels: [E, D, H] in x.dtype, one for each of E owners.
      owners: int [G], the kernel of each block, in [0, E).

    Returns:
      [G, M, H] in x.dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    x, kernels, owners = as_floating(x, "x", 3), as_floating(kernels, "kernels", 3), as_integers(owners, "owners")
    if x.ndim != 3 or kernels.ndim != 3 or x.shape[2] != kernels.shape[1] or x.dtype != kernels.dtype:
        raise ValueError(
            f"kernels is {kernels.dtype} {kernels.shape}; it must be [owners, D, H] for x [blocks, rows, D], "
            f"{x.dtype} {x.shape}."
        )
    if owners.shape != x.shape[:1]:
        raise ValueError(f"owners has shape {owners.shape}; it must be [blocks], {x.shape[:1]}.")
    return _grouped_matmul(x, kernels, owners)


@jax.custom_vjp
def _grouped_matmul(
    x: Float[Array, "G M D"], kernels: Float[Array, "E D H"], owners: Int[Array, "G"]
) -> Float[Array, "G M H"]:
    return jax.lax.map(lambda block: block[0] @ _pick(kernels, block[1]), (x, owners))


def _forward(x: Array, kernels: Array, owners: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_matmul(x, kernels, owners), (x, kernels, owners)


def _backward(kept: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, kernels, owners = kept
    wide = compute_dtype(x.dtype)

    def one_block(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        rows, gradient, owner = block
        change = jnp.matmul(rows.T, gradient, preferred_element_type=wide)
        updated = jax.lax.dynamic_update_index_in_dim(total, _pick(total, owner) + change, owner, 0)
        return updated, gradient @ _pick(kernels, owner).T

    total, rows = jax.lax.scan(one_block, jnp.zeros(kernels.shape, wide), (x, cotangent, owners))
    return rows, total.astype(kernels.dtype), None


def _pick(stacked: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)


_grouped_matmul.defvjp(_forward, _backward)
