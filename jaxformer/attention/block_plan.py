"""Which pairs of blocks a blockwise attention computes: static, from sizes and the causal rule alone."""

from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from jaxformer.attention.terms import Terms

# Tokens per block: of 128, 256 and 512 the fastest on a busy CPU, where larger blocks leave the caches, and as fast as
# any on an idle one; accelerators prefer larger products.
BLOCK_SIZE, BLOCK_SIZE_CPU = 512, 256

Pairs: TypeAlias = Int[np.ndarray, "_ 4"]


@dataclass(frozen=True)
class Plan:
    """Static choices of one attention.

    Attributes:
      num_queries, num_keys: T and S.
      query_block, key_block: tokens per block, at most T and S.
      causal_start: position of the first query, keys counting from 0, where the causal rule is known beforehand.
      mask_all: whether other terms may hide a key in any block.
      dropout_rate: fraction of the weights that is dropped.
    """

    num_queries: int
    num_keys: int
    query_block: int
    key_block: int
    causal_start: int | None
    mask_all: bool
    dropout_rate: float

    def pairs(self) -> tuple[Pairs, Pairs]:
        """The pairs of blocks without and with hidden entries: rows (query start, key start, query skip, key skip).

        A last block that is not full is moved back to end with the sequence, and skips the entries that it shares with
        the block before it. Pairs in which no query sees a key are left out.
        """
        query_owned = np.arange(0, self.num_queries, self.query_block)
        key_owned = np.arange(0, self.num_keys, self.key_block)
        query_owned, key_owned = (grid.ravel() for grid in np.meshgrid(query_owned, key_owned, indexing="ij"))
        query_start = np.minimum(query_owned, self.num_queries - self.query_block)
        key_start = np.minimum(key_owned, self.num_keys - self.key_block)
        skips = query_owned - query_start, key_owned - key_start
        pairs = np.stack([query_start, key_start, *skips], axis=1).astype(np.int32)
        masked = (skips[0] > 0) | (skips[1] > 0) | self.mask_all
        if self.causal_start is None:
            return pairs[~masked], pairs[masked]
        first, last = self.causal_start + query_start, self.causal_start + query_start + self.query_block - 1
        masked |= key_start + self.key_block - 1 > first
        seen = key_owned <= last
        return pairs[seen & ~masked], pairs[seen & masked]

    def num_pairs(self) -> int:
        """How many pairs of blocks `pairs` has, counted without them."""
        query_start = np.minimum(np.arange(0, self.num_queries, self.query_block), self.num_queries - self.query_block)
        key_blocks = -(-self.num_keys // self.key_block)
        if self.causal_start is None:
            return len(query_start) * key_blocks
        last = self.causal_start + query_start + self.query_block - 1
        return int(np.clip(last // self.key_block + 1, 0, key_blocks).sum())


def make_plan(terms: Terms, block_size: int | None, dropout_rate: float) -> Plan:
    """Block sizes that divide the lengths as evenly as multiples of 8 can, and what is known about hidden entries."""
    static = terms.causal and terms.has_default_positions
    restrictions = (terms.key_mask, terms.query_segments, terms.mask)
    return Plan(
        num_queries=terms.num_queries,
        num_keys=terms.num_keys,
        query_block=even_block(terms.num_queries, block_size),
        key_block=even_block(terms.num_keys, block_size),
        causal_start=terms.num_keys - terms.num_queries if static else None,
        mask_all=any(term is not None for term in restrictions) or (terms.causal and not static),
        dropout_rate=dropout_rate,
    )


def even_block(length: int, block_size: int | None = None) -> int:
    """Tokens per block: `block_size`, or what divides the length most evenly; at most the length."""
    if block_size is not None:
        return min(length, block_size)
    blocks = -(-length // (BLOCK_SIZE_CPU if jax.default_backend() == "cpu" else BLOCK_SIZE))
    return min(length, 8 * -(-length // (8 * blocks)))
