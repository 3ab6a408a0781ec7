"""Random features whose products estimate exp(query key / sqrt(H)), as kernels of a running state."""

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.feature_state import FeatureKernel
from jaxformer.attention.inputs import as_array, check_count, check_rng
from jaxformer.functional import compute_dtype


def draw_features(
    rng: Array,
    num_features: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    orthogonal: bool = True,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... F H"]:
    """The random directions of `performer_attention`, each a standard normal vector; drawing anew is calling again.

    Orthogonal: blocks of H directions at right angles to each other, uniform over all such blocks, with lengths drawn
    independently as those of normal vectors are (chi with H degrees of freedom). Each direction by itself stays a
    standard normal vector, so the estimate stays unbiased, and its variance falls.
    Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794, section 2.4.

    Args:
      rng: one typed key, as `jax.random.key(seed)` makes it.
      num_features: F, directions; the error falls as 1 / sqrt(F).
      head_dim: H.
      num_kv_heads: K for directions of its own for each key head; None for one set for all.
      orthogonal: False for independent directions.
      dtype: floating dtype of the result.

    Returns:
      [F, H], or [K, F, H].

    Raises:
      ValueError: a size below 1, or an rng that is not one typed key.
    """
    sizes = {
        "num_features": num_features,
        "head_dim": head_dim,
        "num_kv_heads": 1 if num_kv_heads is None else num_kv_heads,
    }
    for name, size in sizes.items():
        check_count(size, name)
    lengths_rng, directions_rng = jax.random.split(check_rng(rng))
    heads = () if num_kv_heads is None else (num_kv_heads,)
    normal = jax.random.normal(lengths_rng, (*heads, num_features, head_dim), dtype)
    if not orthogonal:
        return normal
    blocks = -(-num_features // head_dim)
    square = jax.random.normal(directions_rng, (*heads, blocks, head_dim, head_dim), compute_dtype(dtype))
    directions, upper = jnp.linalg.qr(square)
    # QR alone prefers some rotations; with a positive diagonal of R they are uniform.
    signs = jnp.where(jnp.diagonal(upper, axis1=-2, axis2=-1) < 0, -1.0, 1.0).astype(directions.dtype)
    directions = (directions * signs[..., None, :]).swapaxes(-1, -2)
    directions = directions.reshape(*heads, blocks * head_dim, head_dim)[..., :num_features, :]
    return directions.astype(dtype) * jnp.linalg.norm(normal, axis=-1, keepdims=True)


def random_kernel(projection: Float[Array, "... F H"], features: str) -> FeatureKernel:
    """Features from projections of query / H^(1/4) and key / H^(1/4)."""
    return FEATURES[features](lambda array: _project(array, projection))


def num_outputs(num_features: int, features: str) -> int:
    """Features made of `num_features` directions."""
    return 2 * num_features if features == "trigonometric" else num_features


def check_features(features: str) -> str:
    """The kind of features, refused unless known."""
    if features not in FEATURES:
        raise ValueError(f"features is {features!r}; it must be one of {sorted(FEATURES)}.")
    return features


def check_projection(projection: ArrayLike, num_kv_heads: int, head_dim: int) -> Float[Array, "... F H"]:
    """The directions, refused unless they fit the key heads."""
    projection = as_array(projection, "projection")
    fits = projection.ndim in (2, 3) and projection.shape[-1] == head_dim and projection.shape[-2] > 0
    if not fits or (projection.ndim == 3 and projection.shape[0] != num_kv_heads):
        raise ValueError(
            f"projection has shape {projection.shape}; it must be [features, {head_dim}] or "
            f"[{num_kv_heads}, features, {head_dim}] (kv_heads, features, head_dim)."
        )
    if not jnp.issubdtype(projection.dtype, jnp.floating):
        raise ValueError(f"projection is {projection.dtype}; it must be floating.")
    return projection


def _positive(project: Callable) -> FeatureKernel:
    """exp(w x - |x|²/2), the largest of each token taken out: the query's cancels, the key's is its weight."""

    def exponentials(array: Array) -> tuple[Array, Array, Array]:
        scaled, projected = project(array)
        highest = lax.stop_gradient(projected.max(-1))
        return jnp.exp(projected - highest[..., None]), highest, scaled

    def key(array: Array) -> tuple[Array, Array]:
        made, highest, scaled = exponentials(array)
        return made, highest - 0.5 * jnp.square(scaled).sum(-1)

    return FeatureKernel(query=lambda query: exponentials(query)[0], key=key)


def _trigonometric(project: Callable) -> FeatureKernel:
    """exp(|x|²/2) (cos w x, sin w x)."""

    def waves(array: Array) -> tuple[Array, Array]:
        scaled, projected = project(array)
        return jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], -1), scaled

    def key(array: Array) -> tuple[Array, Array]:
        made, scaled = waves(array)
        return made, 0.5 * jnp.square(scaled).sum(-1)

    return FeatureKernel(query=lambda query: waves(query)[0], key=key)


def _rectified(project: Callable) -> FeatureKernel:
    """max(w x, 0)."""

    def rectified(array: Array) -> tuple[Array, Array]:
        _, projected = project(array)
        made = jax.nn.relu(projected)
        highest = lax.stop_gradient(jnp.maximum(made.max(-1), jnp.finfo(made.dtype).tiny))
        return made / highest[..., None], jnp.log(highest)

    return FeatureKernel(query=lambda query: rectified(query)[0], key=rectified)


FEATURES: MappingProxyType[str, Callable[[Callable], FeatureKernel]] = MappingProxyType(
    {"positive": _positive, "trigonometric": _trigonometric, "relu": _rectified}
)


def _project(
    array: Float[Array, "B K *queries H"], projection: Float[Array, "... F H"]
) -> tuple[Float[Array, "B K *queries H"], Float[Array, "B K *queries F"]]:
    """The array divided by H^(1/4), in float32 or wider, and its products with the directions."""
    dtype = compute_dtype(array.dtype)
    scaled = array.astype(dtype) * array.shape[-1] ** -0.25
    tokens = "gt" if array.ndim == 5 else "t"
    directions = "fh" if projection.ndim == 2 else "kfh"
    pattern = f"bk{tokens}h,{directions}->bk{tokens}f"
    return scaled, jnp.einsum(pattern, scaled, projection.astype(dtype), preferred_element_type=dtype)
