"""Bringing tokens to their experts and back, in two equal ways: products with dispatch tensors, and a stable sort.

Both keep one rule. A routing group is a row of the batch. Of a row each expert takes as many tokens as it has places
for; first choices of all tokens come before second choices, and earlier tokens before later ones. A choice that finds
no place is dropped: its output is zero, and a residual connection leaves the token as it is. Padding takes no place.

Without a capacity nothing is dropped, and a token's output depends on the token alone: on no other token, padding or
row, nor on how many tokens come at a time. With a capacity (training) rows stay independent of each other, but within
a row it matters which tokens came before (they may have taken the places), how many tokens the row has (places follow
the length), and with two or more choices a token also what comes after it: a later token's first choice may take the
place of an earlier token's second. That is the leak of the future that every such layer has in training.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.experts import ExpertRoutes, check_experts, expert_capacities
from jaxformer.functional.numerics import compute_dtype

Experts = Callable[[Array, Array | None, Array], Array]
"""(inputs [G, M, D], owners int [G], tokens int [G or 1, M]) -> [G, M, D]: block g goes through expert owners[g], or
through expert g where owners is None and G = E. `tokens` is each row's index in the batch (row * T + position), from
which randomness such as dropout may be drawn."""

_LARGEST_BLOCK = 128


def einsum_dispatch(
    x: Float[Array, "B T D"], routes: ExpertRoutes, experts: Experts, *, capacity_factor: float | None = None
) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
    """Experts' outputs by products with one-hot tensors [B, T, E, C]: O(B T E C D) time beside the experts' own.

    Lepikhin et al. 2020, "GShard", arXiv:2006.16668, algorithms 1 and 2. Without capacity every expert computes every
    token (what one-hot tensors with C = T would come to), E / K times the work.

    Args:
      x: tokens.
      routes: of these tokens, E experts, K choices.
      experts: what the experts compute, see `Experts`.
      capacity_factor: places of an expert, as multiple of K T / E; see `expert_capacities`. None drops nothing.

    Returns:
      The sum over a token's choices of gate * output, in x.dtype, zeros for padding; and how many choices were dropped.
    """
    x = _hide_padding(x, routes)
    batch, length, width = x.shape
    choices, num_experts = routes.experts.shape[-1], routes.probabilities.shape[-1]
    check_experts(num_experts, choices, capacity_factor)
    wide = compute_dtype(x.dtype)
    ids = jnp.arange(num_experts, dtype=jnp.int32).reshape(1, 1, 1, -1)
    chosen = (routes.experts[..., None] == ids) & routes.mask[..., None, None]  # [B, T, K, E]
    if capacity_factor is None:
        tokens = jnp.arange(batch * length, dtype=jnp.int32)[None]
        inputs = jnp.broadcast_to(x.reshape(1, -1, width), (num_experts, batch * length, width))
        outputs = experts(inputs, None, tokens).reshape(num_experts, batch, length, width)
        gates = jnp.where(chosen, routes.gates[..., None], jnp.zeros((1, 1, 1, 1), routes.gates.dtype)).sum(2)
        combined = jnp.einsum("bte,ebtd->btd", gates.astype(x.dtype), outputs, preferred_element_type=wide)
        return combined.astype(x.dtype), jnp.zeros((), jnp.int32)
    table = expert_capacities(length, num_experts, choices, capacity_factor)
    limits = jnp.asarray(table)[routes.mask.sum(1)].reshape(-1, 1, 1, 1)
    # Choices before tokens, so that all first choices come first: [B, K, T, E].
    chosen = chosen.swapaxes(1, 2)
    flat = chosen.reshape(batch, choices * length, num_experts).astype(jnp.int32)
    places = (jnp.cumsum(flat, axis=1) - flat).reshape(chosen.shape)
    kept = chosen & (places < limits)
    slots = jnp.arange(int(table.max()), dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    hits = kept[..., None] & (places[..., None] == slots)  # [B, K, T, E, C]
    dispatch = hits.any(1)
    gates = routes.gates.swapaxes(1, 2)[..., None, None]
    combine = jnp.where(hits, gates, jnp.zeros_like(gates)).sum(1)
    inputs = jnp.einsum("btec,btd->ebcd", dispatch.astype(x.dtype), x).reshape(num_experts, -1, width)
    index = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length, 1, 1)
    tokens = jnp.where(dispatch, index, 0).sum(1, dtype=jnp.int32).swapaxes(0, 1).reshape(num_experts, -1)
    outputs = experts(inputs, None, tokens).reshape(num_experts, batch, -1, width)
    combined = jnp.einsum("btec,ebcd->btd", combine.astype(x.dtype), outputs, preferred_element_type=wide)
    return combined.astype(x.dtype), (chosen.sum(dtype=jnp.int32) - kept.sum(dtype=jnp.int32))


def sort_dispatch(
    x: Float[Array, "B T D"], routes: ExpertRoutes, experts: Experts, *, capacity_factor: float | None = None
) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
    """Experts' outputs by gathering tokens in the order of a stable sort by expert: O(B T K (D + log T K)) time.

    Arguments, results and rule are those of `einsum_dispatch`; no tensor [T, E, C] exists. Without capacity the tokens
    of all rows are sorted together and cut into blocks of one expert each, so that each choice is computed once (the
    last block of an expert may be part empty): Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, section 4.
    """
    x = _hide_padding(x, routes)
    batch, length, width = x.shape
    choices, num_experts = routes.experts.shape[-1], routes.probabilities.shape[-1]
    check_experts(num_experts, choices, capacity_factor)
    if capacity_factor is None:
        rows = jax.tree.map(lambda leaf: leaf.reshape(1, batch * length, *leaf.shape[2:]), routes)
        outputs, slot = _by_blocks(x.reshape(1, batch * length, width), rows, experts)
        dropped = jnp.zeros((), jnp.int32)
    else:
        table = expert_capacities(length, num_experts, choices, capacity_factor)
        outputs, slot, dropped = _by_places(x, routes, experts, table)
    # slot [B, K, T] of each choice's output; without one, the gate counts as zero.
    found = slot < outputs.shape[1]
    taken = _take(outputs, jnp.where(found, slot, 0).reshape(slot.shape[0], -1)).reshape(*slot.shape, width)
    gates = routes.gates.reshape(slot.shape[0], -1, choices).swapaxes(1, 2)
    gates = jnp.where(found, gates, jnp.zeros_like(gates))[..., None]
    combined = (taken.astype(gates.dtype) * gates).sum(1)
    return combined.reshape(batch, length, width).astype(x.dtype), dropped


DISPATCHES: dict[str, Callable[..., Any]] = {"sort": sort_dispatch, "einsum": einsum_dispatch}
"""The ways to bring tokens to experts, by name."""


def _by_places(x: Array, routes: ExpertRoutes, experts: Experts, table: Any) -> tuple[Array, Array, Array]:
    """Outputs [B, E * C, D] of the places of each row, the place of each choice, and how many choices have none."""
    (batch, length, width), num_experts, capacity = x.shape, routes.probabilities.shape[-1], int(table.max())
    ids, places, counts = _sorted_places(routes)
    limits = jnp.asarray(table)[routes.mask.sum(1)][:, None]  # [B, 1]
    kept = (ids < num_experts) & (places < limits)
    slot = jnp.where(kept, ids * capacity + places, num_experts * capacity)
    token = _token_of_slot(slot, length, num_experts * capacity)

    def experts_first(array: Array) -> Array:
        split = array.reshape(batch, num_experts, capacity, *array.shape[2:])
        return split.swapaxes(0, 1).reshape(num_experts, batch * capacity, *array.shape[2:])

    index = token + length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    outputs = experts(experts_first(_take(x, token)), None, experts_first(index))
    outputs = outputs.reshape(num_experts, batch, capacity, width).swapaxes(0, 1).reshape(batch, -1, width)
    dropped = jnp.maximum(counts - limits, 0).sum(dtype=jnp.int32)
    return outputs, slot.reshape(batch, -1, length), dropped


def _by_blocks(x: Array, routes: ExpertRoutes, experts: Experts) -> tuple[Array, Array]:
    """Outputs [1, G * M, D] of blocks of M tokens of one expert each, and the slot of each choice."""
    (_, length, width), num_experts = x.shape, routes.probabilities.shape[-1]
    ids, places, counts = _sorted_places(routes)
    total = ids.shape[1]
    block = _block_size(total, num_experts)
    num_blocks = min(total, total // block + num_experts)
    blocks = -(-counts[0] // block)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    firsts = jnp.concatenate([ends - blocks, jnp.zeros((1,), jnp.int32)])  # padding's entry is not used
    slot = jnp.where(ids < num_experts, firsts[ids] * block + places, num_blocks * block)
    token = _token_of_slot(slot, length, num_blocks * block)
    owners = (ends[None] <= jnp.arange(num_blocks, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    owners = jnp.minimum(owners, num_experts - 1)
    outputs = experts(_take(x, token).reshape(num_blocks, block, width), owners, token.reshape(num_blocks, block))
    return outputs.reshape(1, -1, width), slot.reshape(1, -1, length)


def _sorted_places(routes: ExpertRoutes) -> tuple[Array, Array, Array]:
    """Of each choice, all first choices before all second ones: its expert (E for padding) and its place in line there.

    Returns:
      experts int [B, K * T], places int [B, K * T], and choices of each expert int [B, E].
    """
    batch, length, choices = routes.experts.shape
    num_experts = routes.probabilities.shape[-1]
    ids = jnp.where(routes.mask[:, None], routes.experts.swapaxes(1, 2), num_experts).reshape(batch, choices * length)
    order = jnp.argsort(ids, axis=1, stable=True)
    ranks = jnp.argsort(order, axis=1)  # the inverse permutation
    counts = (ids[..., None] == jnp.arange(num_experts, dtype=jnp.int32).reshape(1, 1, -1)).sum(1, dtype=jnp.int32)
    # Padding stands behind the last expert; its place is not used.
    starts = jnp.pad(jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts, ((0, 0), (0, 1)))
    return ids, ranks.astype(jnp.int32) - jnp.take_along_axis(starts, ids, axis=1), counts


def _token_of_slot(slot: Array, length: int, num_slots: int) -> Array:
    """int [B, S]: the token in each slot, from the slot of each of K * T choices; token 0 in slots that stay empty."""
    tokens = jnp.arange(slot.shape[1], dtype=jnp.int32) % length

    def one_row(slot: Array) -> Array:
        return jnp.zeros((num_slots,), jnp.int32).at[slot].set(tokens, mode="drop")

    return jax.vmap(one_row)(slot)


def _take(rows: Array, index: Array) -> Array:
    """rows [B, S, D] at index [B, N]: [B, N, D]."""
    return jnp.take_along_axis(rows, index[..., None], axis=1)


def _block_size(total: int, num_experts: int) -> int:
    """Tokens a block, a power of two: empty slots are a quarter of the filled ones at most, and none for few tokens."""
    size = 1
    while size < _LARGEST_BLOCK and 8 * num_experts * size <= total:
        size *= 2
    return size


def _hide_padding(x: Array, routes: ExpertRoutes) -> Array:
    """Zeros in place of padding, be it NaN."""
    return jnp.where(routes.mask[..., None], x, jnp.zeros_like(x))
