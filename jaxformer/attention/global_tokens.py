"""Tokens that see all and are seen by all: chosen per example from the sequence, or added to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.block_plan import even_block
from jaxformer.attention.components import Component, Predicate
from jaxformer.attention.inputs import check_count, check_tensor
from jaxformer.functional import as_mask


class GlobalTokens(NamedTuple):
    """The chosen tokens of each example, M slots at most.

    Attributes:
      chosen: True at the chosen tokens.
      positions: int32, where they stand, in ascending order; T in a slot that is not used.
    """

    chosen: Bool[Array, "B T"]
    positions: Int[Array, "B M"]

    @property
    def exists(self) -> Bool[Array, "B M"]:
        """Which slots are used."""
        return self.positions < self.chosen.shape[1]

    def take(self, array: Array) -> Array:
        """[B, T, ..] at the chosen tokens: [B, M, ..], zeros in unused slots."""
        array = jnp.broadcast_to(array, (len(self.chosen), *array.shape[1:]))
        index = self.positions.reshape(self.positions.shape + (1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, index, 1, mode="fill", fill_value=0)

    def replace(self, array: Float[Array, "B T N H"], rows: Float[Array, "B M N H"]) -> Float[Array, "B T N H"]:
        """The array with other rows at the chosen tokens."""
        examples = jnp.arange(len(array), dtype=jnp.int32)[:, None]
        return array.at[examples, self.positions].set(rows, mode="drop")


def choose_tokens(
    global_mask: ArrayLike | None, num_global: int | None, batch_size: int, length: int
) -> GlobalTokens | None:
    """The first `num_global` tokens of each row of the mask, which is refused where it is known to hold more."""
    if global_mask is None:
        if num_global is not None:
            raise ValueError(f"num_global is {num_global}; it goes with global_mask only.")
        return None
    mask = as_mask(global_mask, "global_mask")
    if mask.ndim != 2 or mask.shape[0] not in (1, batch_size) or mask.shape[1] != length:
        raise ValueError(f"global_mask has shape {mask.shape}; it must be {(batch_size, length)} (batch, tokens).")
    if num_global is None:
        raise ValueError("num_global is None; with global_mask it must be the most chosen tokens of a row.")
    num_global = min(check_count(num_global, "num_global"), max(1, length))
    if not isinstance(global_mask, jax.core.Tracer):
        most = int((np.asarray(global_mask) != 0).sum(1).max(initial=0))
        if most > num_global:
            raise ValueError(f"global_mask chooses {most} tokens in a row; num_global allows {num_global}.")
    counted = jnp.cumsum(mask, 1, dtype=jnp.int32)
    number = jnp.arange(min(num_global, length), dtype=jnp.int32)
    positions = (counted[:, None, :] <= number[None, :, None]).sum(-1, dtype=jnp.int32)
    chosen = mask & (counted <= num_global)
    return GlobalTokens(
        jnp.broadcast_to(chosen, (batch_size, length)), jnp.broadcast_to(positions, (batch_size, len(number)))
    )


def check_added(
    global_key: ArrayLike | None,
    global_value: ArrayLike | None,
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
) -> tuple[Float[Array, "B G K H"], Float[Array, "B G K Hv"]] | None:
    """Keys and values of added tokens, one set for all examples or one for each."""
    if global_key is None and global_value is None:
        return None
    if global_key is None or global_value is None:
        raise ValueError("global_key and global_value go together.")
    checked = []
    for array, name, beside in ((global_key, "global_key", key), (global_value, "global_value", value)):
        array = check_tensor(array, name, "[batch or 1, added tokens, kv_heads, head_dim]")
        batch_size, _, *head = beside.shape
        if array.shape[0] not in (1, batch_size) or list(array.shape[2:]) != head:
            raise ValueError(f"{name} has shape {array.shape}; it must be {(batch_size, 'added tokens', *head)}.")
        checked.append(jnp.broadcast_to(array, (batch_size, *array.shape[1:])).astype(beside.dtype))
    if checked[0].shape[1] != checked[1].shape[1]:
        raise ValueError(f"global_key has {checked[0].shape[1]} tokens and global_value {checked[1].shape[1]}.")
    return checked[0], checked[1]


def columns(num_queries: int, num_keys: int, visible: Predicate | None) -> Component:
    """All queries on a few keys, which a predicate may restrict."""
    query_block = even_block(num_queries)
    num_blocks = -(-num_queries // query_block)
    slots = np.arange(num_blocks * query_block, dtype=np.int32)
    starts = slots[::query_block]
    return Component(
        layout="gathered",
        query_order=np.where(slots < num_queries, slots, -1).astype(np.int32),
        key_order=np.arange(num_keys, dtype=np.int32),
        pairs=np.stack([starts, np.zeros_like(starts)], 1),
        full=np.full(num_blocks, visible is None),
        query_block=query_block,
        key_block=num_keys,
        visible=visible or (lambda queries, keys: (queries >= 0) | (keys >= 0)),
    )
