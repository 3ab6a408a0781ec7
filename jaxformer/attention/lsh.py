"""LSH attention: each token sees the tokens that hash into its bucket and stand near it in the order of buckets."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.by_heads import map_heads
from jaxformer.attention.inputs import check_count, check_flag, check_key_mask, check_tensor, check_value, hide_missing
from jaxformer.attention.lsh_buckets import check_rotations, hash_tokens
from jaxformer.attention.lsh_rounds import Rule, attend_rounds, sort_rounds
from jaxformer.attention.products import einsum
from jaxformer.attention.unit_length import unit_length
from jaxformer.functional import compute_dtype, masked_softmax


def lsh_attention(
    query_key: ArrayLike,
    value: ArrayLike,
    *,
    rotations: ArrayLike,
    num_buckets: int | tuple[int, ...] | None = None,
    num_hashes: int | None = None,
    chunk_size: int = 64,
    num_chunks_before: int = 1,
    num_chunks_after: int | None = None,
    within_bucket: bool = False,
    deduplicate: bool = True,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
) -> Float[Array, "B T N Hv"]:
    """LSH attention: each token sees tokens of like direction, O(T R (chunk_size + F)) time, O(T R) memory.

    In each of R rounds (num_hashes) tokens are hashed into buckets, argmax of [x R, -x R], sorted by (bucket, position)
    and cut into chunks; a token sees its own chunk and its neighbours. softmax(q_i · q_j / |q_j|) value over the keys
    that any round shows: keys have unit length and there is no further 1 / sqrt(H). A token sees itself only if nothing
    else is visible to it in any round. For long sequences in which each token matters to few others; below a few
    thousand tokens shared-query-key attention over all pairs is as fast and exact.
    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2, equations 2 to 6.

    Rounds are combined exactly. With deduplicate the result is one softmax over the union of the keys of all rounds
    (the paper's N_ij term); without, one with log(number of rounds that show the key) added to the logits, as Trax and
    Hugging Face compute it. Each round's order is cut at its ends: the first chunk doesn't look back into the last.
    Deviations: by default a chunk's tokens see each other across the borders of buckets, as in Trax (the paper's rule
    is within_bucket); "itself as the last resort" is a rule, not a penalty on a logit.

    Which keys a token sees depends on the whole sequence: later tokens that hash into earlier buckets move the borders
    of chunks. Causal attention never reads later values or keys, but its choice of past keys does depend on them, so
    decoding (`lsh_step`) follows a rule of its own. With within_bucket and chunk_size >= T the choice is causal too.

    Args:
      query_key: floating [B, T, N, H].
      value: floating [B, T, N, Hv].
      rotations: floating [R, N, H, F] or [R, H, F] from `draw_rotations`, the same in training and in decoding.
      num_buckets: as it was drawn, an even number or a tuple of factors; None = one factor, 2 F.
      num_hashes: use only the first so many rounds of rotations, in 1 .. R; None = all. More rounds in evaluation than
        in training are fine, and bring the result closer to attention over all pairs.
      chunk_size: tokens per chunk.
      num_chunks_before, num_chunks_after: neighbouring chunks that a token sees besides its own, each at least 0.
        None = 0 where causal, else 1, so that a bucket that a border cuts is seen from both of its sides.
      within_bucket: see only tokens of one's own bucket among them.
      deduplicate: count a key once however many rounds show it.
      key_mask: bool or 0/1 int [B or 1, T], True = the token exists. Padding sorts into a bucket of its own at the end,
        sees nothing, and moves no real token, however much of it there is and whatever it holds.
      causal: hide tokens at later positions.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for padding.

    Raises:
      ValueError: shapes or dtypes that do not fit, query_key and value of different tokens or heads, or a number out of
        range.
    """
    query_key, mask, buckets, rule = _prepare(
        query_key,
        key_mask,
        rotations,
        num_buckets,
        num_hashes,
        chunk_size,
        (num_chunks_before, num_chunks_after),
        within_bucket,
        deduplicate,
        causal,
    )
    value = hide_missing(check_value(value, query_key), mask)
    batch_size, length, num_heads, _ = query_key.shape
    if not value.size:
        return value
    exists = jnp.ones((1, length), bool) if mask is None else mask
    exists = jnp.broadcast_to(exists[None], (num_heads, batch_size, length))
    arrays = (
        jnp.moveaxis(query_key, 2, 0),
        jnp.moveaxis(value, 2, 0),
        exists,
        jnp.moveaxis(buckets, 1, 0),
    )
    pairs = length * rule.chunk_size * (rule.before + 1 + rule.after)
    output = map_heads(lambda *arrays: attend_rounds(rule, *arrays), arrays, batch_size, num_heads, pairs)
    return jnp.moveaxis(output, 0, 2)


def lsh_attention_weights(
    query_key: ArrayLike,
    *,
    rotations: ArrayLike,
    num_buckets: int | tuple[int, ...] | None = None,
    num_hashes: int | None = None,
    chunk_size: int = 64,
    num_chunks_before: int = 1,
    num_chunks_after: int | None = None,
    within_bucket: bool = False,
    deduplicate: bool = True,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
) -> Float[Array, "B N T T"]:
    """The weights that `lsh_attention` gives each value: O(T²) time and memory. For plots and tests.

    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2.

    Args:
      query_key, rotations, num_buckets, num_hashes, chunk_size, num_chunks_before, num_chunks_after, within_bucket,
        deduplicate, key_mask, causal: as in `lsh_attention`.

    Returns:
      float32 [B, N, T, T] (float64 for float64 queries): rows that sum to 1, or zeros for padding.

    Raises:
      ValueError: as `lsh_attention`.
    """
    query_key, mask, buckets, rule = _prepare(
        query_key,
        key_mask,
        rotations,
        num_buckets,
        num_hashes,
        chunk_size,
        (num_chunks_before, num_chunks_after),
        within_bucket,
        deduplicate,
        causal,
    )
    dtype = compute_dtype(query_key.dtype)
    length = query_key.shape[1]
    exists = jnp.ones((1, length), bool) if mask is None else mask
    positions = jnp.where(exists, jnp.arange(length, dtype=jnp.int32)[None], jnp.int32(-1))
    chunks = jax.vmap(jax.vmap(lambda buckets: sort_rounds(rule, buckets)[2]))(buckets)
    rounds = rule.shows(chunks, chunks, buckets, buckets).sum(2, dtype=jnp.int32)
    visible = (rounds > 0) & rule.orders(positions, positions)[:, None]
    logits = einsum("btnh,bsnh->bnts", query_key, unit_length(query_key).astype(query_key.dtype), dtype)
    if not rule.deduplicate:
        logits = logits + jnp.log(jnp.maximum(rounds, 1).astype(dtype))
    alone = ~visible.any(-1, keepdims=True) & jnp.eye(length, dtype=bool)[None, None] & exists[:, None, None, :]
    return masked_softmax(logits, visible | alone)


def _prepare(
    query_key: ArrayLike,
    key_mask: ArrayLike | None,
    rotations: ArrayLike,
    num_buckets: int | tuple[int, ...] | None,
    num_hashes: int | None,
    chunk_size: int,
    num_chunks: tuple[int, int | None],
    within_bucket: bool,
    deduplicate: bool,
    causal: bool,
) -> tuple[Float[Array, "B T N H"], Bool[Array, "#B T"] | None, Array, Rule]:
    """Checked tokens with zeros where none exists, their mask and buckets, and what they see of each other."""
    query_key = check_tensor(query_key, "query_key", "[batch, tokens, heads, head_dim]")
    _, length, num_heads, head_dim = query_key.shape
    if not num_heads or not head_dim:
        raise ValueError(f"query_key has shape {query_key.shape}; it must have heads, and head_dim of at least 1.")
    rotations, factors = check_rotations(rotations, num_buckets, num_heads, head_dim)
    if num_hashes is not None:
        if check_count(num_hashes, "num_hashes") > rotations.shape[0]:
            raise ValueError(f"num_hashes is {num_hashes}; it must be in 1 .. {rotations.shape[0]}.")
        rotations = rotations[:num_hashes]
    before, after = num_chunks
    causal = check_flag(causal, "causal")
    within_bucket, deduplicate = check_flag(within_bucket, "within_bucket"), check_flag(deduplicate, "deduplicate")
    after = (0 if causal else 1) if after is None else after
    chunk_size = check_count(chunk_size, "chunk_size")
    before = check_count(before, "num_chunks_before", 0)
    after = check_count(after, "num_chunks_after", 0)
    mask = check_key_mask(key_mask, query_key.shape[0], length)
    query_key = hide_missing(query_key, mask)
    # One chunk of all tokens is the same chunk however long it might have been.
    if chunk_size >= length:
        chunk_size, before, after = max(length, 1), 0, 0
    rule = Rule(chunk_size, before, after, within_bucket, deduplicate, causal)
    return query_key, mask, hash_tokens(query_key, rotations, factors, mask), rule
