"""Sinkhorn attention's row: balancing entry by entry, then one softmax over the own and the sorted block."""

import jax.numpy as jnp
import numpy as np
from contract import Row, softmax_over, weighted_values

from jaxformer.attention import ATTENTION


def balanced(scores, exists, causal, temperature=0.75, rounds=8):
    """exp(scores / temperature) scaled by columns and rows in turn, in the plain domain: [.., M, M]."""
    blocks = scores.shape[-1]
    shares = jnp.exp(scores / temperature) * exists[:, None, :, None] * exists[:, None, None, :]
    if causal:
        shares = shares * np.tril(np.ones((blocks, blocks)), -1)
    for _ in range(rounds):
        columns = jnp.cumsum(shares, -2) if causal else shares.sum(-2, keepdims=True)
        shares = shares / jnp.where(columns == 0, 1, columns)
        rows = shares.sum(-1, keepdims=True)
        shares = shares / jnp.where(rows == 0, 1, rows)
    return shares


def sinkhorn_oracle(inputs, *, key_mask, causal, block_size, sort_cut=None):
    """Every query on every slot, a slot being a token of its own block or a mean over one token of each block."""
    batch, length, heads, head_dim = inputs["query"].shape
    group = heads // inputs["key"].shape[2]
    blocks = -(-length // block_size)
    padded = blocks * block_size
    mask = jnp.pad(key_mask, [(0, 0), (0, padded - length)])
    exists = mask.reshape(batch, blocks, block_size).any(-1)
    scores = jnp.broadcast_to(inputs["block_scores"], (batch, *inputs["block_scores"].shape[1:]))
    shares = balanced(scores[:, :, :blocks, :blocks], exists, causal)
    # Source of slot (block, place): token at the same place of each block, by share, among those that exist.
    sources = jnp.einsum("bkij,st->bkisjt", shares, jnp.eye(block_size)).reshape(*shares.shape[:2], padded, padded)
    sources = jnp.broadcast_to(sources * mask[:, None, None], (batch, heads // group, padded, padded)).repeat(group, 1)
    received = sources.sum(-1)
    sources = sources / jnp.where(received == 0, 1, received)[..., None]
    key = jnp.where(key_mask[:, :, None, None], inputs["key"], 0).repeat(group, 2)
    key = jnp.pad(key, [(0, 0), (0, padded - length), (0, 0), (0, 0)])
    slots = jnp.concatenate([jnp.einsum("bnst,btnh->bsnh", sources, key), key], 1)
    logits = jnp.einsum("btnh,bsnh->bnts", inputs["query"], slots) * head_dim**-0.5
    logits = (
        logits
        + jnp.log(jnp.concatenate([jnp.where(received > 0, received, 1), jnp.ones_like(received)], -1))[:, :, None]
    )
    at, slot_at = np.arange(length)[:, None], np.arange(padded)[None]
    own = (at // block_size == slot_at // block_size) & (slot_at <= at if causal else True)
    brought = at // block_size == slot_at // block_size if sort_cut is None else slot_at // block_size < sort_cut
    brought = np.broadcast_to(brought, (length, padded))
    seen = jnp.concatenate(
        [
            brought & (received > 0)[:, :, None],
            jnp.broadcast_to(own & mask[:, None, None], (batch, heads, length, padded)),
        ],
        -1,
    )
    weights = softmax_over(logits, seen)
    weights = (weights[..., :padded] @ sources + weights[..., padded:])[..., :length]
    return weighted_values(weights, jnp.where(key_mask[:, :, None, None], inputs["value"], 0)), weights


def draw_scores(random, batch, blocks):
    return random.standard_normal((batch, 1, blocks, blocks)).astype(np.float32)


ROWS = {
    "sinkhorn": Row(
        kind=ATTENTION["sinkhorn"],
        variants={"blocks_of_3": {"block_size": 3}},
        oracle=sinkhorn_oracle,
        arguments=lambda random, sizes: {"block_scores": draw_scores(random, sizes.batch, max(6, -(-sizes.keys // 3)))},
        degenerate={"block_size": 16},
    ),
}
