"""Linformer: keys and values are projected over positions to a few slots, whatever the length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.inputs import (
    as_array,
    check_flag,
    check_key_mask,
    check_query_key,
    check_scale,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.products import einsum
from jaxformer.functional import compute_dtype, masked_softmax

QUERIES_AT_ONCE = 1024
"""Queries whose weights on all slots are in memory together: some MiB a head."""


def linformer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Linformer attention: each query sees `rank` learned mixtures of all keys, O((T + S) rank) time and memory.

    softmax(scale * query (E key)ᵀ) F value, E being `key_projection` and F `value_projection` (rank: the paper's k).
    For encoders of bounded length, where attention is close to low rank: see `effective_rank`.
    Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768, section 4, equation 7.

    The paper's ways to share are choices of which arrays are passed: "headwise" has one E and one F [rank, max_length]
    for all heads of a layer; "key-value" leaves `value_projection` out, so that F = E; "layerwise" passes that one E
    to all layers; and none of these is an E and an F [K, rank, max_length], one per head.

    Padding is set to zero before the projection, so nothing that it holds counts. Slots to which no key that exists
    contributes (all their coefficients in E and F there are 0) take no part in the softmax, a case that the paper
    leaves open: so an example of padding alone gives zeros, and the identity as projection is dense attention, padded
    or not. A projection that is zero altogether would never learn.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      key_projection: floating [rank, max_length], shared by the heads, or [K, rank, max_length]. Shorter inputs use its
        first S columns.
      value_projection: the same for values, of equal rank; None = `key_projection`.
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing: S tokens of which the last are padding are as the shorter input.
      causal: refused; there is no causal Linformer.
      scale: factor on the logits; 1 / sqrt(H) by default.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: causal is True; shapes or dtypes that do not fit; more keys than max_length; different ranks.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import linformer_attention
        >>> query = key = jnp.zeros((1, 3, 1, 2))  # all keys alike: outputs are means of what is seen
        >>> value = jnp.array([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> halves = jnp.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])  # two slots
        >>> linformer_attention(query, key, value, key_projection=halves)[0, 0].ravel().tolist()
        [3.75]
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    key_mask = check_key_mask(key_mask, *key.shape[:2])
    key_projection, value_projection = _check_projections(key_projection, value_projection, key, causal)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    key_slots = _project(hide_missing(key, key_mask), key_projection)
    value_slots = _project(hide_missing(value, key_mask), value_projection)
    seen = _visible_slots(key_projection, value_projection, key_mask)

    def attend(query: Float[Array, "B T N H"]) -> Float[Array, "B T N Hv"]:
        weights = _slot_weights(query, key_slots, seen)
        output = einsum("bkgtr,bkrv->btkgv", weights.astype(value_slots.dtype), value_slots, value_slots.dtype)
        return output.reshape(*query.shape[:3], value.shape[3]).astype(value.dtype)

    return _by_blocks(attend, query)


def linformer_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    key_projection: ArrayLike,
    value_projection: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The factor that `linformer_attention` gives each value: O(T S) memory. Neither positive nor of sum 1 in general.

    softmax(scale * query (E key)ᵀ) F, zero at padding. For plots and tests.
    Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768, section 4.

    Args:
      query, key, key_projection, value_projection, key_mask, causal, scale: as in `linformer_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries).

    Raises:
      ValueError: as `linformer_attention`.
    """
    query, key = check_query_key(query, key)
    key_mask = check_key_mask(key_mask, *key.shape[:2])
    key_projection, value_projection = _check_projections(key_projection, value_projection, key, causal)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    seen = _visible_slots(key_projection, value_projection, key_mask)
    slots = _slot_weights(query, _project(hide_missing(key, key_mask), key_projection), seen)
    batch_size, num_queries, num_heads, _ = query.shape
    projection = value_projection.astype(slots.dtype)
    weights = einsum(f"bkgtr,{_axes(projection)}->bkgts", slots, projection, slots.dtype)
    weights = weights.reshape(batch_size, num_heads, num_queries, key.shape[1])
    if key_mask is None:
        return weights
    return jnp.where(key_mask[:, None, None, :], weights, jnp.zeros((), weights.dtype))


def _check_projections(
    key_projection: ArrayLike, value_projection: ArrayLike | None, key: Float[Array, "B S K H"], causal: bool
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Both projections, cut to the number of keys."""
    if check_flag(causal, "causal"):
        raise ValueError(
            "linformer attention cannot be causal: its projections mix all positions, so that each holds the future."
        )
    first = _check_projection(key_projection, "key_projection", key)
    if value_projection is None:
        return first, first
    second = _check_projection(value_projection, "value_projection", key)
    if first.shape[-2] != second.shape[-2]:
        raise ValueError(
            f"key_projection has rank {first.shape[-2]} and value_projection {second.shape[-2]}; they must be equal."
        )
    return first, second


def _check_projection(projection: ArrayLike, name: str, key: Float[Array, "B S K H"]) -> Float[Array, "..."]:
    projection = as_array(projection, name)
    num_keys, num_kv_heads = key.shape[1:3]
    if projection.ndim not in (2, 3) or (projection.ndim == 3 and projection.shape[0] != num_kv_heads):
        raise ValueError(
            f"{name} has shape {projection.shape}; it must be (rank, max_length) or (kv_heads, rank, max_length) with "
            f"{num_kv_heads} kv_heads."
        )
    if not jnp.issubdtype(projection.dtype, jnp.floating):
        raise ValueError(f"{name} is {projection.dtype}; it must be floating.")
    if projection.shape[-2] == 0:
        raise ValueError(f"{name} has shape {projection.shape}; its rank must be at least 1, or nothing could be seen.")
    if projection.shape[-1] < num_keys:
        raise ValueError(f"{num_keys} keys are more than the max_length of {name}, {projection.shape[-1]}.")
    return projection[..., :num_keys]


def _by_blocks(attend: Callable[[Array], Array], query: Float[Array, "B T N H"]) -> Float[Array, "B T N Hv"]:
    """`attend` for so many queries at a time that all their weights fit in memory; made again in the backward pass."""
    batch_size, length = query.shape[:2]
    if length <= QUERIES_AT_ONCE:
        return attend(query)
    blocks, size = split_queries(length)
    padded = jnp.pad(query, ((0, 0), (0, blocks * size - length), (0, 0), (0, 0)))
    parts = padded.reshape(batch_size, blocks, size, *query.shape[2:]).swapaxes(0, 1)
    outputs = lax.map(jax.checkpoint(attend), parts).swapaxes(0, 1)
    return outputs.reshape(batch_size, blocks * size, *outputs.shape[3:])[:, :length]


def split_queries(length: int) -> tuple[int, int]:
    """How many blocks, of how many queries, as even as can be."""
    blocks = -(-length // QUERIES_AT_ONCE)
    return blocks, -(-length // blocks)


def _slot_weights(
    query: Float[Array, "B T N H"], slots: Float[Array, "B K R H"], seen: Bool[Array, "#B #K R"]
) -> Float[Array, "B K G T R"]:
    """The softmax over the slots, in float32 (float64 for float64 queries)."""
    dtype = compute_dtype(query.dtype)
    batch_size, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = slots.shape[1]
    grouped = query.reshape(batch_size, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = einsum("btkgh,bkrh->bkgtr", grouped.astype(dtype), slots, dtype)
    return masked_softmax(logits, seen[:, :, None, None, :])


def _visible_slots(
    key_projection: Float[Array, "..."], value_projection: Float[Array, "..."], key_mask: Bool[Array, "#B S"] | None
) -> Bool[Array, "#B #K R"]:
    """Which slots hold any key that exists."""
    count = _contributing(key_projection, key_mask)
    if value_projection is not key_projection:
        count = count + _contributing(value_projection, key_mask)
    return count > 0


def _contributing(projection: Float[Array, "..."], key_mask: Bool[Array, "#B S"] | None) -> Float[Array, "#B #K R"]:
    """How many keys that exist each slot is made of."""
    coefficients = (projection != 0).astype(jnp.float32)
    if key_mask is None:
        counts = coefficients.sum(-1)[None]
    else:
        axes = _axes(projection)
        counts = jnp.einsum(f"{axes},bs->b{axes[:-1]}", coefficients, key_mask.astype(jnp.float32))
    return counts[:, None] if counts.ndim == 2 else counts


def _project(array: Float[Array, "B S K H"], projection: Float[Array, "..."]) -> Float[Array, "B K R H"]:
    """The slots, in float32 or wider; from operands of lower precision where both have it."""
    dtype = compute_dtype(array.dtype)
    if array.dtype != projection.dtype:
        array, projection = array.astype(dtype), projection.astype(dtype)
    return einsum(f"{_axes(projection)},bskh->bkrh", projection, array, dtype)


def _axes(projection: Float[Array, "..."]) -> str:
    return "rs" if projection.ndim == 2 else "krs"
