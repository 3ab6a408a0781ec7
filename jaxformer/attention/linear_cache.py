"""Decoding with a state of constant size: the sums over past keys that linear attention reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.attention.block_layout import by_token
from jaxformer.attention.feature_state import FeatureKernel, State, empty_state
from jaxformer.attention.inputs import (
    check_count,
    check_dtype,
    check_key_mask,
    check_query_key,
    check_token_numbers,
    check_value,
    hide_missing,
)
from jaxformer.attention.linear import check_feature_map, linear_kernel
from jaxformer.attention.linear_chunks import CHUNK_SIZE, attend_chunks, heads_first
from jaxformer.attention.stacked import read_layer, write_layer
from jaxformer.functional import compute_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LinearCache:
    """Sums over the keys so far, below the highest log weight; a stack over depth has a leading layer axis.

    Attributes:
      total: float32 or wider [B, K, F, Hv], sum of phi(key) valueᵀ (the paper's S), times exp(-highest).
      normaliser: [B, K, F], sum of phi(key) (the paper's z), times exp(-highest).
      highest: [B, K], the log weight of the heaviest key so far.
    """

    total: Any
    normaliser: Any
    highest: Any


def init_linear_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
    feature_map: str | Callable = "elu",
) -> LinearCache:
    """The state before the first token, for one layer: F (Hv + 1) numbers a head, whatever the length.

    Args:
      batch_size: B.
      max_length: tokens that will come, at least 1; the state serves any number of them.
      num_kv_heads: K.
      head_dim: H, of keys.
      value_dim: Hv, of values; head_dim by default.
      dtype: floating dtype of keys and values; the state is float32, or float64 where they are.
      feature_map: as in `linear_attention`.

    Returns:
      LinearCache without any key.

    Raises:
      ValueError: a size below 1, a dtype that is not floating, or an unknown feature map.
    """
    check_state_sizes(batch_size, max_length, num_kv_heads, head_dim, value_dim, dtype)
    _, num_features = check_feature_map(feature_map, head_dim, dtype)
    return new_cache(batch_size, num_kv_heads, num_features, value_dim or head_dim, dtype)


def linear_step(
    cache: LinearCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    feature_map: str | Callable = "elu",
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B T N Hv"], LinearCache]:
    """Adds T tokens to the state, each reading it after itself: O(T) time whatever came before.

    Equals the last T rows of causal `linear_attention` over all tokens so far, whatever the tokens were split into.
    Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, equations 16 to 20.

    Args:
      cache: of one layer, or stacked over depth with `layer`.
      query: floating [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, Hv].
      layer: int [], which layer of a stacked cache; only its part changes.
      positions: int [B or 1, T], in tokens; tokens count in the order in which they come, so these change nothing.
      key_mask: bool or 0/1 int [B or 1, T], False for padding, which leaves the state as it was. What its own
        query holds, NaN included, stays in its own row of the output, which means nothing.
      feature_map: as in `linear_attention`, and as in `init_linear_cache`.
      chunk_size: tokens per chunk of a long prompt.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache.
    """
    query, key = check_query_key(query, key)
    kernel = linear_kernel(feature_map, query.shape[3])
    return step_features(kernel, cache, query, key, value, layer, positions, key_mask, chunk_size)


def step_features(
    kernel: FeatureKernel,
    cache: LinearCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: ArrayLike,
    layer: ArrayLike | None,
    positions: ArrayLike | None,
    key_mask: ArrayLike | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T N Hv"], LinearCache]:
    """One step with any kernel of features."""
    value = check_value(value, key)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} tokens and key {key.shape[1]}; a step adds the same to both.")
    check_count(chunk_size, "chunk_size")
    batch_size, num_tokens = query.shape[:2]
    check_token_numbers(positions, None, "positions", batch_size, num_tokens, num_tokens)
    key_mask = check_key_mask(key_mask, batch_size, num_tokens)
    made, _ = jax.eval_shape(kernel.key, key.swapaxes(1, 2))
    expected = (*made.shape[:2], made.shape[3], value.shape[3])
    if cache.total.shape[layer is not None :] != expected:
        advice = "give layer for a stacked cache" if layer is None else "layer goes with a stacked cache"
        raise ValueError(
            f"cache.total has shape {cache.total.shape}; these tokens need {expected} a layer "
            f"(batch, kv_heads, features, value_dim); {advice}."
        )
    if num_tokens == 0:
        return jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype), cache
    old = read_layer(cache, layer)
    state = State(*(leaf.astype(made.dtype) for leaf in (old.total, old.normaliser, old.highest)))
    tokens = heads_first(query, hide_missing(key, key_mask), hide_missing(value, key_mask))
    counted = jnp.ones((1, num_tokens), bool) if key_mask is None else key_mask
    output, state = attend_chunks(kernel, *tokens, counted, None, state, chunk_size)
    new = LinearCache(*(leaf.astype(before.dtype) for leaf, before in zip(state, jax.tree.leaves(old))))
    return by_token(output), write_layer(cache, layer, new)


def new_cache(batch_size: int, num_kv_heads: int, num_features: int, value_dim: int, dtype: DTypeLike) -> LinearCache:
    """A state without any key, in float32 or wider."""
    return LinearCache(*empty_state(batch_size, num_kv_heads, num_features, value_dim, compute_dtype(dtype)))


def check_state_sizes(
    batch_size: int, max_length: int, num_kv_heads: int, head_dim: int, value_dim: int | None, dtype: DTypeLike
) -> None:
    """Refuses sizes below 1 and dtypes that are not floating."""
    sizes = {"batch_size": batch_size, "max_length": max_length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "value_dim": head_dim if value_dim is None else value_dim}.items():
        check_count(size, name)
    check_dtype(dtype)
