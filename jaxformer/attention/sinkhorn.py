"""Sinkhorn attention: each block of queries sees its own block and one that a learned soft permutation brings it."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.inputs import (
    as_array,
    check_count,
    check_key_mask,
    check_query_key,
    check_scale,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.products import einsum
from jaxformer.attention.sinkhorn_scores import sinkhorn
from jaxformer.functional import compute_dtype, masked_softmax

# Slots that received less than this of tokens that exist are empty: far below what changes a sum in float32.
LEAST = 1e-9


def sinkhorn_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    block_scores: ArrayLike,
    block_size: int,
    temperature: float = 0.75,
    num_iterations: int = 8,
    sort_cut: int | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Sinkhorn attention: each query sees its own block and a sorted one, O(T block_size + T² / block_size) time.

    softmax over the union of block i and of sorted block i, which is sum_j P_ij block j, token by token, with
    P = `sinkhorn(block_scores)`. Memory is O(T block_size + (T / block_size)²). For long inputs whose distant relations
    are few and learnable; a block_size of 1 sorts single tokens.
    Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, section 3. Scores come from the caller's sorting
    network, as from `block_summaries`; noise, if any, is added to them, in training only.

    Padding takes no part: blocks without any key are left out of P, and each slot of a sorted block is the mean of the
    tokens that exist among those that it receives, its weight in the softmax being the share of P that they have.

    Causal: block i receives earlier blocks alone, block 0 none, and row i of P depends on no later row or column of the
    scores: see `sinkhorn`. With causal summaries nothing of the future reaches a query.

    sort_cut = n is the paper's SortCut, for encoders: every query sees the first n sorted blocks, O(T n block_size)
    time. Its own block stays beside them, which the paper leaves out.

    Args:
      query: floating [B, T, N, H].
      key: [B, T, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, T, K, Hv].
      block_scores: floating [B or 1, K or 1, blocks, blocks]: how much block i (row) wants block j. At least as many
        blocks as the input has, T / block_size rounded up; the first ones are used. -inf: block i never gets block j.
      block_size: tokens per block; the last block may be shorter.
      temperature: of the balancing, at least 1e-30.
      num_iterations: rounds of balancing, at least 1.
      sort_cut: how many of the sorted blocks every query sees; None = its own one. Not with causal.
      key_mask: bool or 0/1 int [B or 1, T], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide what is later than the query.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; other keys than queries; too few block_scores; a number out of
        range; causal with sort_cut, which would show later blocks.
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    key_mask = check_key_mask(key_mask, *key.shape[:2])
    mask = _block_mask(key_mask, query, key, block_size)
    shares = _shares(block_scores, mask, key.shape[2], temperature, num_iterations, causal)
    sources, received = _sources(shares, mask, sort_cut, causal)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    key_blocks = _blocks(hide_missing(key, key_mask), block_size)
    own, brought = _weights(_blocks(query, block_size), key_blocks, mask, sources, received, causal, sort_cut)
    blocks = _blocks(hide_missing(value, key_mask), block_size)
    slots = _slots(blocks, sources, received)
    output = einsum("bkgmts,bmskv->bmtkgv", own.astype(slots.dtype), blocks.astype(slots.dtype), slots.dtype)
    pair, slot = _axes(sort_cut)
    output = output + einsum(f"{pair},{slot}v->bmtkgv", brought.astype(slots.dtype), slots, slots.dtype)
    output = output.reshape(value.shape[0], blocks.shape[1] * block_size, query.shape[2], value.shape[3])
    return output[:, : query.shape[1]].astype(value.dtype)


def sinkhorn_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    block_scores: ArrayLike,
    block_size: int,
    temperature: float = 0.75,
    num_iterations: int = 8,
    sort_cut: int | None = None,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `sinkhorn_attention` gives each value: O(T²) memory.

    A slot's weight is spread over the tokens that it is the mean of. For plots and tests.
    Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, section 3.

    Args:
      query, key, block_scores, block_size, temperature, num_iterations, sort_cut, key_mask, causal, scale: as in
        `sinkhorn_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `sinkhorn_attention`.
    """
    query, key = check_query_key(query, key)
    key_mask = check_key_mask(key_mask, *key.shape[:2])
    mask = _block_mask(key_mask, query, key, block_size)
    shares = _shares(block_scores, mask, key.shape[2], temperature, num_iterations, causal)
    sources, received = _sources(shares, mask, sort_cut, causal)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    key_blocks = _blocks(hide_missing(key, key_mask), block_size)
    own, brought = _weights(_blocks(query, block_size), key_blocks, mask, sources, received, causal, sort_cut)
    dtype = own.dtype
    # Spread over (source block, token in it): each token takes its block's share of the slot.
    pair, slot = _axes(sort_cut)
    each = 1 / jnp.where(received < LEAST, 1, received).astype(dtype)
    brought = einsum(f"{pair},{slot}->{pair}", brought, each, dtype)
    spread = einsum(f"{pair},{slot[:-1]}j->bkgmtjs", brought, sources.astype(dtype), dtype)
    spread = spread * mask.astype(dtype)[:, None, None, None, None]
    num_blocks = mask.shape[1]
    own = own[:, :, :, :, :, None] * jnp.eye(num_blocks, dtype=dtype)[None, None, None, :, None, :, None]
    batch_size, length, num_heads, _ = query.shape
    weights = (spread + own).reshape(batch_size, num_heads, num_blocks * block_size, num_blocks * block_size)
    return weights[:, :, :length, :length]


def _blocks(array: Array, block_size: int) -> Array:
    """[B, M, block_size, ..]: tokens by blocks, the last one filled up with zeros."""
    num_blocks = -(-array.shape[1] // block_size)
    rest = [(0, 0)] * (array.ndim - 2)
    array = jnp.pad(array, [(0, 0), (0, num_blocks * block_size - array.shape[1]), *rest])
    return array.reshape(array.shape[0], num_blocks, block_size, *array.shape[2:])


def _block_mask(
    key_mask: Bool[Array, "#B S"] | None, query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], block_size: int
) -> Bool[Array, "B M b"]:
    """Which tokens exist, by blocks."""
    check_count(block_size, "block_size")
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{query.shape[1]} queries over {key.shape[1]} keys: sinkhorn attention sorts blocks of one sequence and "
            "is self-attention only."
        )
    mask = jnp.ones((1, 1), bool) if key_mask is None else key_mask
    return _blocks(jnp.broadcast_to(mask, key.shape[:2]), block_size)


def _shares(
    block_scores: ArrayLike,
    mask: Bool[Array, "B M b"],
    num_kv_heads: int,
    temperature: float,
    num_iterations: int,
    causal: bool,
) -> Float[Array, "B K M M"]:
    """The share of each block that each block receives, blocks without any key left out."""
    block_scores = as_array(block_scores, "block_scores")
    batch_size, num_blocks, _ = mask.shape
    shape, wanted = block_scores.shape, (batch_size, num_kv_heads, num_blocks, num_blocks)
    if len(shape) != 4 or shape[2] != shape[3] or shape[0] not in (1, batch_size) or shape[1] not in (1, num_kv_heads):
        raise ValueError(f"block_scores has shape {shape}; it must be {wanted} (batch, kv_heads, blocks, blocks).")
    if min(shape[2:]) < num_blocks:
        raise ValueError(f"block_scores {shape} is for fewer blocks than the {num_blocks} of this input.")
    if not jnp.issubdtype(block_scores.dtype, jnp.floating):
        raise ValueError(f"block_scores is {block_scores.dtype}; it must be floating.")
    scores = jnp.broadcast_to(block_scores[:, :, :num_blocks, :num_blocks], wanted)
    exists = mask.any(-1)
    pairs = exists[:, None, :, None] & exists[:, None, None, :]
    return sinkhorn(scores, num_iterations, temperature=temperature, mask=pairs, causal=causal)


def _sources(
    shares: Float[Array, "B K M M"], mask: Bool[Array, "B M b"], sort_cut: int | None, causal: bool
) -> tuple[Float[Array, "B K C M"], Float[Array, "B K C b"]]:
    """Of which blocks the sorted blocks in use are made, and how much of each slot are tokens that exist."""
    if sort_cut is not None:
        if causal:
            raise ValueError("sort_cut shows the first sorted blocks to all queries, later tokens too: not if causal.")
        check_count(sort_cut, "sort_cut")
        shares = shares[:, :, :sort_cut]
    return shares, einsum("bkcj,bjs->bkcs", shares, mask.astype(shares.dtype), shares.dtype)


def _slots(
    blocks: Float[Array, "B M b K H"], sources: Float[Array, "B K C M"], received: Float[Array, "B K C b"]
) -> Float[Array, "B K C b H"]:
    """The sorted blocks, in float32 or wider: means of the tokens that exist; `blocks` holds zeros elsewhere."""
    dtype = compute_dtype(blocks.dtype)
    received = jnp.where(received < LEAST, 1, received).astype(dtype)
    return einsum("bkcj,bjskh->bkcsh", sources.astype(dtype), blocks.astype(dtype), dtype) / received[..., None]


def _weights(
    query: Float[Array, "B M b N H"],
    key: Float[Array, "B M b K H"],
    mask: Bool[Array, "B M b"],
    sources: Float[Array, "B K C M"],
    received: Float[Array, "B K C b"],
    causal: bool,
    sort_cut: int | None,
) -> tuple[Float[Array, "B K G M b b"], Float[Array, "..."]]:
    """Weights of the own block and of the sorted ones, from one softmax, in float32 (float64 for float64 queries)."""
    block_size, num_heads, head_dim = query.shape[2:]
    dtype = compute_dtype(query.dtype)
    query = query.astype(dtype).reshape(*query.shape[:3], key.shape[3], num_heads // key.shape[3], head_dim)
    own = einsum("bmtkgh,bmskh->bkgmts", query, key.astype(dtype), dtype)
    own_seen = mask[:, None, None, :, None]
    if causal:
        own_seen = own_seen & jnp.tril(jnp.ones((block_size, block_size), bool))[None, None, None, None]
    pair, slot = _axes(sort_cut)
    brought = einsum(f"bmtkgh,{slot}h->{pair}", query, _slots(key, sources, received).astype(dtype), dtype)
    fills = received >= LEAST
    # A slot counts as much as the share of it that exists: with it, participation goes to 0 without a jump.
    share = jnp.log(jnp.where(fills, received, 1)).astype(dtype)
    if sort_cut is None:
        share, fills = share[:, :, None, :, None], fills[:, :, None, :, None]
    else:
        share, fills = share[:, :, None, None, None], fills[:, :, None, None, None]
    shape = brought.shape
    flat = (*own.shape[:-1], block_size * (1 if sort_cut is None else shape[-2]))
    seen = [jnp.broadcast_to(own_seen, own.shape), jnp.broadcast_to(fills, shape).reshape(flat)]
    logits = [own, (brought + share).reshape(flat)]
    weights = masked_softmax(jnp.concatenate(logits, -1), jnp.concatenate(seen, -1))
    return weights[..., :block_size], weights[..., block_size:].reshape(shape)


def _axes(sort_cut: int | None) -> tuple[str, str]:
    """Einsum axes of (query, slot) pairs and of slots: each block of queries has its own slots, or all see the same."""
    return ("bkgmts", "bkms") if sort_cut is None else ("bkgmtcs", "bkcs")
