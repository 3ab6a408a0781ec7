"""Weights that are products of features: blocks of pairs, and the sum over keys that stands for all pairs at once.

The weight of a key is exp(log weight) * phi(query) phi(key), features being of order 1. Log weights enter below the
highest so far, as in a running softmax, so that neither sums nor their gradients overflow; the state is rescaled where
a new highest comes. A query's own factor cancels in the quotient and is never computed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.block_layout import rows_times
from jaxformer.attention.products import batched_matmul


class FeatureKernel(NamedTuple):
    """How features are made, in float32 or wider.

    Attributes:
      query: [B, K, G, t, H] to features [B, K, G, t, F], up to a factor for each query.
      key: [B, K, s, H] to features [B, K, s, F] and log weights [B, K, s].
    """

    query: Callable[[Array], Array]
    key: Callable[[Array], tuple[Array, Array]]


class Keys(NamedTuple):
    """Keys as features, and what they carry."""

    features: Float[Array, "B K s F"]
    log_weight: Float[Array, "B K s"]
    value: Float[Array, "B K s Hv"]


class State(NamedTuple):
    """Sums over keys, both times exp(-highest).

    Attributes:
      total: [B, K, F, Hv], sum of exp(log weight) phi(key) valueᵀ (the paper's S).
      normaliser: [B, K, F], sum of exp(log weight) phi(key) (the paper's z).
      highest: [B, K], the highest log weight of the keys so far.
    """

    total: Float[Array, "B K F Hv"]
    normaliser: Float[Array, "B K F"]
    highest: Float[Array, "B K"]


class Part(NamedTuple):
    """What some of the keys contribute: both sums times exp(-highest)."""

    numerator: Float[Array, "B K G t Hv"]
    denominator: Float[Array, "B K G t"]
    highest: Float[Array, "B K t"]


def empty_state(batch_size: int, num_kv_heads: int, num_features: int, value_dim: int, dtype: DTypeLike) -> State:
    """The state before the first key."""
    return State(
        total=jnp.zeros((batch_size, num_kv_heads, num_features, value_dim), dtype),
        normaliser=jnp.zeros((batch_size, num_kv_heads, num_features), dtype),
        highest=jnp.full((batch_size, num_kv_heads), jnp.finfo(dtype).min, dtype),
    )


def absorb(state: State, keys: Keys, counted: Bool[Array, "#B s"], kept: Bool[Array, "#B"] | None = None) -> State:
    """The state with the counted keys added, after being emptied where it is not `kept`."""
    dtype = keys.features.dtype
    lowest, counted = jnp.finfo(dtype).min, counted[:, None]
    before = state.highest if kept is None else jnp.where(kept[:, None], state.highest, lowest)
    log_weight = lax.stop_gradient(jnp.where(counted, keys.log_weight, lowest))
    highest = jnp.maximum(before, log_weight.max(-1, initial=lowest))
    faded = jnp.exp(before - highest)
    if kept is not None:
        faded = jnp.where(kept[:, None], faded, 0.0)
    share = jnp.exp(jnp.where(counted, keys.log_weight - highest[..., None], -jnp.inf))
    columns = (keys.features * share[..., None]).swapaxes(-1, -2)
    return State(
        total=state.total * faded[..., None, None] + batched_matmul(columns, keys.value, dtype),
        normaliser=state.normaliser * faded[..., None] + columns.sum(-1),
        highest=highest,
    )


def read(query: Float[Array, "B K G t F"], state: State) -> Part:
    """All keys of the state, for every query."""
    dtype = query.dtype
    return Part(
        numerator=rows_times(query, state.total, dtype),
        denominator=rows_times(query, state.normaliser[..., None], dtype)[..., 0],
        highest=jnp.broadcast_to(state.highest[..., None], (*state.highest.shape, query.shape[3])),
    )


def pair_weights(
    query: Float[Array, "B K G t F"], keys: Keys, visible: Bool[Array, "#B t s"]
) -> tuple[Float[Array, "B K G t s"], Float[Array, "B K t"]]:
    """The weight of every pair, 0 where not visible, times exp(-highest visible log weight), and that highest."""
    lowest, visible = jnp.finfo(query.dtype).min, visible[:, None]
    log_weight = keys.log_weight[:, :, None, :]
    highest = lax.stop_gradient(jnp.where(visible, log_weight, lowest).max(-1, initial=lowest))
    # Hidden keys leave before the exponential: however large, they are a factor of exactly 0.
    share = jnp.exp(jnp.where(visible, log_weight - highest[..., None], -jnp.inf))
    products = rows_times(query, keys.features.swapaxes(-1, -2), query.dtype)
    return products * share[:, :, None], highest


def attend_pairs(query: Float[Array, "B K G t F"], keys: Keys, visible: Bool[Array, "#B t s"]) -> Part:
    """The visible keys of a block, pair by pair."""
    weights, highest = pair_weights(query, keys, visible)
    return Part(rows_times(weights, keys.value, query.dtype), weights.sum(-1), highest)


def hide_part(part: Part, seen: Bool[Array, "#B t"]) -> Part:
    """Nothing for the queries that do not see this part."""
    seen = seen[:, None]
    return Part(
        numerator=jnp.where(seen[:, :, None, :, None], part.numerator, 0.0),
        denominator=jnp.where(seen[:, :, None], part.denominator, 0.0),
        highest=jnp.where(seen, part.highest, jnp.finfo(part.highest.dtype).min),
    )


def merge(one: Part, other: Part) -> Part:
    """Both parts, below the higher of their log weights."""
    highest = jnp.maximum(one.highest, other.highest)
    shares = [jnp.exp(part.highest - highest)[:, :, None] for part in (one, other)]
    return Part(
        numerator=one.numerator * shares[0][..., None] + other.numerator * shares[1][..., None],
        denominator=one.denominator * shares[0] + other.denominator * shares[1],
        highest=highest,
    )


def quotient(numerator: Float[Array, "B K G t Hv"], denominator: Float[Array, "B K G t"]) -> Float[Array, "B K G t Hv"]:
    """numerator / denominator, and zeros where the denominator is not positive."""
    positive = denominator > 0
    # Both are brought to order 1 first: the derivative has the square of the denominator, which may underflow.
    unit = lax.stop_gradient(jnp.where(positive, denominator, 1.0))
    denominator = jnp.where(positive, denominator / unit, 1.0)[..., None]
    return jnp.where(positive[..., None], numerator / unit[..., None] / denominator, 0.0)
