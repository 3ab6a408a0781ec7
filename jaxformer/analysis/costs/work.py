"""Sizes of an attention, and what one pass over it costs: the terms in which all formulas are written."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxformer.attention.terms import Terms
from jaxformer.functional import compute_dtype

INDEX_BYTES = 4
FLAG_BYTES = 1


@dataclass(frozen=True)
class Work:
    """What one pass costs.

    Attributes:
      matmul: operations of matrix products, a multiplication and an addition being two: exact.
      other: operations on single elements (exponentials, maxima, masks, sums, sorting), estimated by a few for each
        element: see the formula of each kind.
      moved_bytes: bytes read and written beside the cores, estimated: inputs and outputs once, what a form keeps in
        memory in between written and read once, and what a loop reads again as often as it does.
      temporary_bytes: memory in use beside inputs and outputs, estimated by the largest intermediate arrays.
    """

    matmul: int
    other: int = 0
    moved_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def total(self) -> int:
        """All operations."""
        return self.matmul + self.other

    @property
    def intensity(self) -> float:
        """Operations for each byte moved; memory is the limit below what a machine can do while it moves one."""
        return self.total / self.moved_bytes if self.moved_bytes else math.inf

    def __add__(self, other: "Work") -> "Work":
        """One pass after the other."""
        return Work(
            self.matmul + other.matmul,
            self.other + other.other,
            self.moved_bytes + other.moved_bytes,
            max(self.temporary_bytes, other.temporary_bytes),
        )


@dataclass(frozen=True)
class AttentionCost:
    """The cost of one attention of one layer, projections of the model's layer apart.

    Attributes:
      forward: the output from query, key and value.
      backward: the gradients by query, key, value and what is learned beside them, recomputation included.
      prefill: `length` tokens through the decoding step into an empty cache; None if the kind cannot decode.
      decode: one more token for each row of the batch, on a full cache; None if the kind cannot decode.
      cache_bytes: the decoding state; None if the kind cannot decode.
      parameters: how many numbers are learned beside the projections of query, key, value and output.
      parameter_bytes: their memory.
      state_bytes: memory of what is drawn, not learned.
    """

    forward: Work
    backward: Work
    prefill: Work | None = None
    decode: Work | None = None
    cache_bytes: int | None = None
    parameters: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0

    @property
    def training(self) -> Work:
        """The forward and the backward pass."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention.

    Attributes:
      batch, queries, keys, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, H and Hv. S is also the number of
        slots of a cache.
      causal: whether keys behind the query are hidden.
      dtype: of queries, keys and values.
      embed_dim: width of the layer's input, for kinds that make arrays from it.
      param_dtype: of parameters.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    dtype: jnp.dtype
    embed_dim: int
    param_dtype: jnp.dtype

    @property
    def item(self) -> int:
        """Bytes of a number of queries, keys and values."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of a number of logits, sums and states."""
        return compute_dtype(self.dtype).itemsize

    @property
    def rows(self) -> int:
        """Rows of logits: one for each query head and query."""
        return self.batch * self.heads * self.queries

    @property
    def io_bytes(self) -> int:
        """Queries, keys, values and outputs."""
        queries = self.rows * (self.head_dim + self.value_dim)
        return (queries + self.key_value_numbers(self.keys)) * self.item

    def key_value_numbers(self, tokens: int) -> int:
        """Numbers in the keys and values of so many tokens."""
        return self.batch * self.kv_heads * tokens * (self.head_dim + self.value_dim)

    def pair_products(self, pairs: int, with_head: int = 1, with_value: int = 1) -> int:
        """Operations of products over `pairs` (query, key) pairs a query head, so many times over H and over Hv."""
        width = with_head * self.head_dim + with_value * self.value_dim
        return 2 * self.batch * self.heads * pairs * width

    def param_bytes(self, count: int) -> int:
        """Memory of so many parameters."""
        return count * self.param_dtype.itemsize

    def terms(self) -> Terms:
        """What is known beforehand of who sees whom, as the attention functions see it."""
        return Terms(
            num_queries=self.queries, num_keys=self.keys, query_start=self.keys - self.queries, causal=self.causal
        )


def steps(tokens: int, most: int) -> int:
    """How many chunks of at most `most` tokens."""
    return -(-tokens // most)
