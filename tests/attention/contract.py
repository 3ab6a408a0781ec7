"""The contract table: one row per kind of attention, with its oracle and the arguments under which it is tested.

An oracle shares no code with the kind: the paper's formula written naively with whole matrices, or loops over every
pair. It runs in float64, and its gradients are JAX's own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.attention import AttentionKind

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one case; all differ, so that a swapped axis cannot pass."""

    batch: int = 2
    queries: int = 11
    keys: int = 11
    heads: int = 6
    kv_heads: int = 6
    head_dim: int = 5
    value_dim: int = 8


@dataclass(frozen=True)
class Row:
    """One kind in the table.

    Attributes:
      kind: the record under test.
      oracle: (inputs, *, key_mask [B, S] bool, causal, and the variant's arguments) to (output, weights); inputs holds
        query, key, value and the drawn arrays by name (query_key in place of query and key where they are shared).
      variants: name to keyword arguments; every generic test runs with each.
      arguments: the arrays that the function needs beside the inputs, from a generator and the sizes.
      beside: of the arrays of `arguments`, those with one entry per token, and which of query, key and value each is
        like: tests that change, cut or repeat that one do the same to it.
      padding_queries: tokens that key_mask hides see keys like others; if not, they give zeros.
      degenerate: keyword arguments that make the kind equal to softmax attention over all visible keys, or None.
      degenerate_arguments: likewise, arrays in place of those of `arguments`.
      sizes: changes of the sizes of a case.
      lengths: further lengths T = S at which values are compared.
      selection_leaks: which keys a query sees depends on later tokens, as the kind's docstring says.
      distribution: rows of weights sum to 1 (or 0) and are not negative.
      decode_oracle: like `oracle` for what decoding gives, where that is not the causal full pass.
      step_lengths: how many tokens the steps of the decoding test take; in all less than sizes.queries + 1.
      tolerance: absolute and relative, of float32 values and gradients.
    """

    kind: AttentionKind
    oracle: Callable[..., tuple[Any, Any]]
    variants: dict[str, dict[str, Any]]
    arguments: Callable[[np.random.Generator, Sizes], Inputs] = lambda random, sizes: {}
    beside: dict[str, str] = field(default_factory=dict)
    padding_queries: bool = True
    degenerate: dict[str, Any] | None = None
    degenerate_arguments: Callable[[np.random.Generator, Sizes], Inputs] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 4, 14)
    selection_leaks: bool = False
    distribution: bool = True
    decode_oracle: Callable[..., tuple[Any, Any]] | None = None
    step_lengths: tuple[int, ...] = (3, 1, 1, 2)
    tolerance: float = 2e-5

    def size(self, **changes: int) -> Sizes:
        """The sizes of a case."""
        kind = self.kind
        usual = {"queries": 7} if kind.cross else {}
        usual |= {"kv_heads": 3} if kind.grouped_heads else {}
        return Sizes(**{**usual, **self.sizes, **changes})

    def draw(self, sizes: Sizes, seed: int = 0, arguments: Callable | None = None) -> Inputs:
        """Normal inputs and the arrays that the kind needs."""
        random = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        value = normal(sizes.batch, sizes.keys, sizes.kv_heads, sizes.value_dim)
        query = normal(sizes.batch, sizes.queries, sizes.heads, sizes.head_dim)
        key = normal(sizes.batch, sizes.keys, sizes.kv_heads, sizes.head_dim)
        given = {"query_key": query} if self.kind.shared_query_key else {"query": query, "key": key}
        return {**given, "value": value, **(arguments or self.arguments)(random, sizes)}

    def apply(self, inputs: Inputs, options: dict[str, Any], function: Callable | None = None) -> jax.Array:
        """The kind's function (or another that is called like it) on inputs from `draw`."""
        return call(self.kind, function or self.kind.function, inputs, **options)


def draw_key_mask(random: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """bool [B, S] with holes. A causal first query sees nothing in example 0, where later ones do."""
    key_mask = random.random((sizes.batch, sizes.keys)) < 0.7
    key_mask[0, : sizes.keys - sizes.queries + 1] = False
    return key_mask


def call(kind: AttentionKind, function: Callable, inputs: Inputs, *first: Any, **options: Any) -> Any:
    """A function of the kind on inputs by name: tensors by position, after `first`, and arrays by name."""
    names = ("query_key", "value") if kind.shared_query_key else ("query", "key", "value")
    arrays = {name: array for name, array in inputs.items() if name not in names}
    return function(*first, *(inputs[name] for name in names), **arrays, **options)


def with_gradients(function: Callable[[Inputs], jax.Array], inputs: Inputs, d_output: jax.Array) -> tuple:
    """Output of a function of inputs, and the gradients of (output * d_output).sum() by the floating ones."""
    floating = {name: array for name, array in inputs.items() if jnp.issubdtype(jnp.asarray(array).dtype, jnp.floating)}

    def loss(floating: Inputs) -> tuple[jax.Array, jax.Array]:
        output = function({**inputs, **floating})
        return (output * d_output.astype(output.dtype)).sum(), output

    (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(floating)
    return output, gradients


@functools.cache
def compiled(name: str, variant: str, causal: bool) -> Callable:
    """(inputs, key_mask, d_output) to (output, gradients): compiled once for all tests of a variant."""
    row = rows()[name]

    def run(inputs: Inputs, key_mask: jax.Array, d_output: jax.Array) -> tuple:
        options = {**row.variants[variant], "key_mask": key_mask, "causal": causal}
        return with_gradients(lambda inputs: row.apply(inputs, options), inputs, d_output)

    return jax.jit(run)


def expected(name: str, variant: str, inputs: Inputs, key_mask: Any, causal: bool, d_output: Any) -> tuple:
    """(output, gradients, weights) of the oracle, computed in float64 as numpy arrays."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wide = {name: _widen(array) for name, array in inputs.items()}
        return jax.tree.map(
            np.asarray, _compiled_oracle(name, variant, causal)(wide, jnp.asarray(key_mask), _widen(d_output))
        )


@functools.cache
def _compiled_oracle(name: str, variant: str, causal: bool) -> Callable:
    """(inputs, key_mask, d_output) to (output, gradients, weights): compiled once for all tests of a variant."""
    row = rows()[name]

    def run(inputs: Inputs, key_mask: jax.Array, d_output: jax.Array) -> tuple:
        oracle = functools.partial(row.oracle, key_mask=key_mask, causal=causal, **row.variants[variant])
        output, gradients = with_gradients(lambda inputs: oracle(inputs)[0], inputs, d_output)
        return output, gradients, oracle(inputs)[1]

    return jax.jit(run)


def _widen(array: Any) -> jax.Array:
    array = np.asarray(array)
    return jnp.asarray(array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array)


def visible_pairs(inputs: Inputs, key_mask: Any, causal: bool) -> jax.Array:
    """bool [B, 1, T, S]: the core terms alone, the queries being the last of the keys."""
    queries = inputs.get("query", inputs.get("query_key")).shape[1]
    keys = inputs["value"].shape[1]
    seen = jnp.ones((queries, keys), bool)
    if causal:
        seen = jnp.tril(seen, keys - queries)
    return seen[None, None] & key_mask[:, None, None, :]


def softmax_over(logits: jax.Array, seen: Any) -> jax.Array:
    """Softmax over the entries that `seen` names, zeros in rows without any: written for oracles."""
    seen = jnp.broadcast_to(seen, logits.shape)
    highest = jnp.where(seen, logits, -1e300).max(-1, keepdims=True)
    # Where nothing is seen the difference would overflow, and its gradient be NaN.
    powers = jnp.where(seen, jnp.exp(jnp.where(seen, logits - highest, 0.0)), 0.0)
    total = powers.sum(-1, keepdims=True)
    return powers / jnp.where(total == 0, 1.0, total)


def weighted_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """[B, N, T, S] weights on [B, S, K, Hv] values, each key head serving N / K query heads."""
    return jnp.einsum("bnts,bsnv->btnv", weights, value.repeat(weights.shape[1] // value.shape[2], 2))


def dot_products(query: jax.Array, key: jax.Array) -> jax.Array:
    """[B, N, T, S]: every query on every key of its head."""
    return jnp.einsum("btnh,bsnh->bnts", query, key.repeat(query.shape[2] // key.shape[2], 2))


def dense_oracle(
    inputs: Inputs, *, key_mask: Any, causal: bool, see: Any = True, scale: float | None = None, **ignored: Any
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention over whole matrices, restricted to the pairs of `see` [T, S] as well."""
    scale = inputs["query"].shape[-1] ** -0.5 if scale is None else scale
    logits = scale * dot_products(inputs["query"], inputs["key"])
    weights = softmax_over(logits, visible_pairs(inputs, key_mask, causal) & see)
    return weighted_values(weights, inputs["value"]), weights


@functools.cache
def rows() -> dict[str, Row]:
    """Every row by name, from the files beside this one."""
    import rows_clustered
    import rows_dense
    import rows_linear
    import rows_low_rank
    import rows_lsh
    import rows_origins
    import rows_routing
    import rows_sinkhorn
    import rows_sparse

    modules = (
        rows_dense,
        rows_low_rank,
        rows_lsh,
        rows_linear,
        rows_sparse,
        rows_sinkhorn,
        rows_routing,
        rows_origins,
        rows_clustered,
    )
    return {name: row for module in modules for name, row in module.ROWS.items()}
