"""Tokens in the slots of an order, as the loops over pairs of blocks read them."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxformer.attention.block_layout import by_head
from jaxformer.attention.token_order import TokenOrder


class Slots(NamedTuple):
    """An order, and whether its tokens stand before the heads, as `Runs` reads them, or behind, as `Blocks` does."""

    order: TokenOrder
    tokens_first: bool

    def rows(self, array: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B _ _ _ H"]:
        """Queries by key head: [B, Q, K, G, H] or [B, K, G, Q, H]."""
        if self.tokens_first:
            array = self.order.take(array, 1)
            return array.reshape(*array.shape[:2], num_kv_heads, -1, array.shape[3])
        return self.order.take(by_head(array, num_kv_heads), 3)

    def row_sums(self, array: Float[Array, "B T K G"]) -> Float[Array, "B _ _ _"]:
        """One number for each row."""
        array = self.order.take(array, 1)
        return array if self.tokens_first else array.transpose(0, 2, 3, 1)

    def rows_across(self, rows: Float[Array, "B _ _ _ H"]) -> Float[Array, "B _ _ _ _"]:
        """From `rows`, what is read by columns: [B, K, H, G, Q]."""
        return rows if self.tokens_first else rows.transpose(0, 1, 4, 2, 3)

    def columns(self, array: Float[Array, "B S K H"]) -> Float[Array, "B _ _ H"]:
        """Keys or values: [B, S, K, H] or [B, K, S, H]."""
        array = self.order.take(array, 1)
        return array if self.tokens_first else array.transpose(0, 2, 1, 3)

    def columns_across(self, array: Float[Array, "B S K H"]) -> Float[Array, "B _ _ _"]:
        """Keys or values that are read by columns: [B, K, H, S] where tokens do not stand first."""
        array = self.order.take(array, 1)
        return array if self.tokens_first else array.transpose(0, 2, 3, 1)

    def rows_back(self, array: Array, empty: float) -> Array:
        """The way back from `rows` and `row_sums`, to [B, T, K, G, ..]; `empty` at tokens without a slot."""
        if not self.tokens_first:
            array = array.transpose(0, 3, 1, 2, *range(4, array.ndim))
        return self.order.put_back(array, 1, empty)

    def across_back(self, array: Float[Array, "B _ _ _"]) -> Float[Array, "B S K H"]:
        """The way back from `columns_across`, zeros at tokens without a slot."""
        return self.order.put_back(array if self.tokens_first else array.transpose(0, 3, 1, 2), 1, 0.0)
