"""LSH attention's row of the contract table: its oracle looks at every pair in every round."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
from contract import Row, softmax_over, visible_pairs, weighted_values

from jaxformer.attention import ATTENTION


def draw(random, sizes):
    """Rotations of three rounds into 2 * 4 buckets: enough tokens share one, and enough do not."""
    return {"rotations": random.standard_normal((3, sizes.heads, sizes.head_dim, 3)).astype(np.float32)}


def one_bucket(random, sizes):
    return {"rotations": np.zeros((1, sizes.head_dim, 1), np.float32)}


def hashed(inputs, num_buckets, num_hashes):
    """int [B, N, R, T]: the bucket of each token, one factor of their number after the other."""
    turned = jnp.einsum("btnh,rnhf->bnrtf", inputs["query_key"], inputs["rotations"][:num_hashes])
    ends = list(itertools.accumulate(factor // 2 for factor in num_buckets))
    bucket = 0
    for factor, end in zip(num_buckets, ends):
        part = turned[..., end - factor // 2 : end]
        bucket = bucket * factor + jnp.concatenate([part, -part], -1).argmax(-1)
    return bucket


def rounds_that_show(bucket, key_mask, chunk_size, before, after, within_bucket, num_buckets):
    """int [B, N, T, S]: in how many rounds each key stands in the chunks that a query sees."""
    length = bucket.shape[-1]
    bucket = jnp.where(key_mask[:, None, None, :], bucket, math.prod(num_buckets))
    mine, theirs = bucket[..., :, None], bucket[..., None, :]
    token = jnp.arange(length)
    # How many tokens sort before each one.
    earlier = (theirs < mine) | ((theirs == mine) & (token[None, :] < token[:, None]))
    chunk = earlier.sum(-1) // chunk_size
    apart = chunk[..., None, :] - chunk[..., :, None]
    shown = (apart >= -before) & (apart <= after)
    if within_bucket:
        shown = shown & (mine == theirs)
    return shown.sum(2)


def attend(inputs, rounds, key_mask, causal, deduplicate):
    """One softmax over the keys that some round shows, each as often as it counts; oneself in need."""
    query, value = inputs["query_key"], inputs["value"]
    key = query / jnp.sqrt((query**2).sum(-1, keepdims=True))
    itself = jnp.eye(query.shape[1], dtype=bool)
    pairs = visible_pairs(inputs, key_mask, causal) & key_mask[:, None, :, None]
    seen = (rounds > 0) & pairs & ~itself
    alone = ~seen.any(-1, keepdims=True) & pairs & itself
    times = 1 if deduplicate else jnp.maximum(rounds, 1)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) + jnp.log(times)
    weights = softmax_over(logits, seen | alone)
    return weighted_values(weights, value), weights


def oracle(
    inputs,
    *,
    key_mask,
    causal,
    num_buckets,
    num_hashes,
    chunk_size,
    num_chunks_before=1,
    num_chunks_after=None,
    within_bucket=False,
    deduplicate=True,
):
    after = (0 if causal else 1) if num_chunks_after is None else num_chunks_after
    bucket = hashed(inputs, num_buckets, num_hashes)
    rounds = rounds_that_show(bucket, key_mask, chunk_size, num_chunks_before, after, within_bucket, num_buckets)
    return attend(inputs, rounds, key_mask, causal, deduplicate)


def decode_oracle(inputs, *, key_mask, causal, num_buckets, num_hashes, deduplicate=True, **ignored):
    bucket = hashed(inputs, num_buckets, num_hashes)
    rounds = (bucket[..., :, None] == bucket[..., None, :]).sum(2)
    return attend(inputs, rounds, key_mask, causal, deduplicate)


ROWS = {
    "lsh": Row(
        kind=ATTENTION["lsh"],
        variants={
            "three_rounds": {"num_buckets": (2, 4), "num_hashes": 3, "chunk_size": 3},
            "within_bucket_counted_each_time": {
                "num_buckets": (2, 4),
                "num_hashes": 2,
                "chunk_size": 4,
                "within_bucket": True,
                "deduplicate": False,
                "num_chunks_before": 0,
                "num_chunks_after": 1,
            },
            "counted_each_time": {"num_buckets": (2, 4), "num_hashes": 3, "chunk_size": 3, "deduplicate": False},
            "within_bucket": {
                "num_buckets": (2, 4),
                "num_hashes": 3,
                "chunk_size": 3,
                "within_bucket": True,
                "num_chunks_before": 2,
            },
        },
        oracle=oracle,
        decode_oracle=decode_oracle,
        arguments=draw,
        selection_leaks=True,
        degenerate={"chunk_size": 20},
        degenerate_arguments=one_bucket,
    ),
}
