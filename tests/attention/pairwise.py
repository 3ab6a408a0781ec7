"""Dense attention pair by pair: loops in float64 over all that it honours, the softmax's Jacobian written out."""

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """Inputs of one attention as numpy arrays; `options` holds the keyword arguments that are set."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_output: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.asarray(self.query), jnp.asarray(self.key), jnp.asarray(self.value)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.query.shape[0], self.query.shape[2], self.query.shape[1], self.key.shape[1]


class Oracle(NamedTuple):
    """Output, weights, and the gradients of (output * d_output).sum()."""

    output: np.ndarray
    weights: np.ndarray
    d_query: np.ndarray
    d_key: np.ndarray
    d_value: np.ndarray
    d_bias: np.ndarray


def draw(
    seed: int = 0,
    *,
    batch: int = 2,
    queries: int = 7,
    keys: int = 11,
    heads: int = 6,
    kv_heads: int = 3,
    head_dim: int = 5,
    value_dim: int = 8,
    **options: Any,
) -> Case:
    """A case with normal inputs. All sizes differ, so that a swapped axis cannot pass."""
    random = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, head_dim),
        (batch, keys, kv_heads, head_dim),
        (batch, keys, kv_heads, value_dim),
        (batch, queries, heads, value_dim),
    ]
    return Case(*(random.standard_normal(shape).astype(np.float32) for shape in shapes), options)


def see(case: Case) -> np.ndarray:
    """bool [B, N, T, S]: who may see whom, asked of every pair."""
    batch, heads, queries, keys = case.sizes
    given = case.options
    query_positions = given.get("query_positions", np.arange(keys - queries, keys)[None].repeat(batch, 0))
    key_positions = given.get("key_positions", np.arange(keys)[None].repeat(batch, 0))
    mask = np.broadcast_to(given.get("mask", np.ones((1, 1, 1, 1), bool)), case.sizes)
    seen = np.zeros(case.sizes, bool)
    for b, n, t, s in itertools.product(range(batch), range(heads), range(queries), range(keys)):
        ok = bool(mask[b, n, t, s])
        if "key_mask" in given:
            ok = ok and bool(given["key_mask"][b, s])
        if given.get("causal"):
            ok = ok and key_positions[b, s] <= query_positions[b, t]
        if "query_segments" in given:
            ok = ok and given["query_segments"][b, t] == given["key_segments"][b, s]
        seen[b, n, t, s] = ok
    return seen


def dense_oracle(case: Case) -> Oracle:
    """Attention row by row over exactly the keys that it sees."""
    batch, heads, queries, _ = case.sizes
    query, key, value, d_output = (a.astype(np.float64) for a in (case.query, case.key, case.value, case.d_output))
    group = heads // key.shape[2]
    scale = case.options.get("scale", key.shape[3] ** -0.5)
    bias = np.broadcast_to(case.options.get("bias", np.zeros((1, 1, 1, 1))), case.sizes).astype(np.float64)
    seen = see(case)
    weights, d_bias = np.zeros(case.sizes), np.zeros(case.sizes)
    output, d_query, d_key, d_value = (np.zeros_like(a) for a in (d_output, query, key, value))
    for b, n, t in itertools.product(range(batch), range(heads), range(queries)):
        keys = np.flatnonzero(seen[b, n, t] & (bias[b, n, t] > -np.inf))
        if len(keys) == 0:
            continue
        head = n // group
        row_keys, row_values = key[b, keys, head], value[b, keys, head]
        logits = scale * row_keys @ query[b, t, n] + bias[b, n, t, keys]
        powers = np.exp(logits - logits.max())
        row = powers / powers.sum()
        weights[b, n, t, keys] = row
        output[b, t, n] = row @ row_values
        d_value[b, keys, head] += np.outer(row, d_output[b, t, n])
        d_logits = (np.diag(row) - np.outer(row, row)) @ (row_values @ d_output[b, t, n])
        d_bias[b, n, t, keys] = d_logits
        d_query[b, t, n] = scale * d_logits @ row_keys
        d_key[b, keys, head] += scale * np.outer(d_logits, query[b, t, n])
    return Oracle(output, weights, d_query, d_key, d_value, d_bias)
