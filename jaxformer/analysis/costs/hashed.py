"""Content chooses the pairs: LSH attention's sorted chunks, and routing attention's clusters."""

import dataclasses
from collections.abc import Sequence

from jaxformer.analysis.costs.dense import key_value_cache_bytes
from jaxformer.analysis.costs.softmax import BLOCK_BACKWARD_OTHER, FORWARD_OTHER, whole_matrix
from jaxformer.analysis.costs.work import INDEX_BYTES, AttentionCost, Sizes, Work, steps
from jaxformer.attention.clustered import CHUNK
from jaxformer.attention.inputs import check_count
from jaxformer.attention.lsh_buckets import check_factors


def lsh_cost(
    sizes: Sizes,
    *,
    num_hashes: int = 2,
    num_buckets: int | Sequence[int] = 16,
    chunk_size: int = 64,
    num_chunks_before: int = 1,
    num_chunks_after: int | None = None,
) -> AttentionCost:
    """2 R T (H F + W (H + Hv)) operations a head: R rounds that hash to F directions and see W = chunk_size (1 + chunks
    on both sides) keys.

    Kitaev et al. 2020, arXiv:2001.04451, section 2 and table 1. The backward pass computes each round's logits again;
    hashing has no gradient. A decoded token is compared with the buckets of all S cached tokens and attends to all of
    them under a mask.
    """
    directions = sum(check_factors(num_buckets if isinstance(num_buckets, int) else tuple(num_buckets))) // 2
    before, after = num_chunks_before, (0 if sizes.causal else 1) if num_chunks_after is None else num_chunks_after
    if chunk_size >= sizes.queries:
        chunk_size, before, after = sizes.queries, 0, 0
    chunks = steps(sizes.queries, chunk_size)
    pairs = num_hashes * chunks * chunk_size * chunk_size * (before + 1 + after)
    logits = sizes.batch * sizes.heads * pairs
    tokens = sizes.batch * sizes.heads * num_hashes
    hashing = 2 * tokens * sizes.head_dim * directions
    # Sorting compares each token about log2 T times, for the order and for its inverse.
    sorting = 2 * tokens * sizes.queries * max(1, (sizes.queries - 1).bit_length())
    in_round = logits // num_hashes
    kept = (3 * in_round + 3 * sizes.rows * (sizes.head_dim + sizes.value_dim)) * sizes.wide
    prefill, decode = (_masked_step(sizes, hashing, num_hashes, count) for count in (sizes.queries, 1))
    return AttentionCost(
        Work(
            hashing * sizes.queries + sizes.pair_products(pairs),
            (FORWARD_OTHER + 3 * num_hashes) * logits + sorting,
            sizes.io_bytes + 2 * num_hashes * kept,
            kept,
        ),
        Work(
            sizes.pair_products(pairs, 3, 2),
            (BLOCK_BACKWARD_OTHER + 3 * num_hashes) * logits,
            2 * sizes.io_bytes + 4 * num_hashes * kept,
            2 * kept,
        ),
        prefill,
        decode,
        _bucket_cache_bytes(sizes, num_hashes),
        state_bytes=num_hashes * sizes.heads * sizes.head_dim * directions * 4,
    )


def routing_cost(sizes: Sizes, *, num_clusters: int = 8, window: int) -> AttentionCost:
    """4 T C H operations a head that compare queries and keys with C centroids, and 2 C w² (H + Hv) within clusters.

    Roy et al. 2021, arXiv:2003.05997, section 4.1: O(T^1.5) with C and the window w near sqrt(T). The backward pass
    computes the logits again; choosing has no gradient. A decoded token attends to all S slots under a mask.
    """
    window = min(check_count(window, "window"), sizes.queries)
    pairs = num_clusters * window * window
    logits = sizes.batch * sizes.heads * pairs
    compare = 2 * sizes.batch * sizes.heads * num_clusters * sizes.head_dim
    scores = 2 * sizes.rows * num_clusters
    chosen = sizes.batch * sizes.heads * num_clusters * window * (2 * sizes.head_dim + 2 * sizes.value_dim)
    kept = (logits + scores + chosen) * sizes.wide
    prefill, decode = (_masked_step(sizes, 2 * compare, 1, count) for count in (sizes.queries, 1))
    return AttentionCost(
        Work(
            2 * compare * sizes.queries + sizes.pair_products(pairs),
            FORWARD_OTHER * logits + 2 * scores + chosen,
            sizes.io_bytes + 2 * kept,
            kept,
        ),
        Work(
            sizes.pair_products(pairs, 3, 2),
            BLOCK_BACKWARD_OTHER * logits + chosen,
            2 * sizes.io_bytes + 4 * kept,
            2 * kept,
        ),
        prefill,
        decode,
        _bucket_cache_bytes(sizes, 1),
        state_bytes=sizes.heads * num_clusters * sizes.head_dim * 4,
    )


def _masked_step(sizes: Sizes, choosing: int, num_hashes: int, tokens: int) -> Work:
    """Products that choose, comparisons with the buckets of all slots, and attention to these under a mask."""
    now = dataclasses.replace(sizes, queries=tokens)
    buckets = sizes.batch * sizes.heads * num_hashes * sizes.keys
    work = whole_matrix(now, tokens * sizes.keys)[0]
    return work + Work(choosing * tokens, 2 * tokens * buckets, buckets * INDEX_BYTES)


def _bucket_cache_bytes(sizes: Sizes, num_hashes: int) -> int:
    """Keys, values and positions as in a cache of keys and values, with a bucket for each round and no segments."""
    buckets = sizes.batch * sizes.heads * num_hashes * sizes.keys * INDEX_BYTES
    return key_value_cache_bytes(sizes) - sizes.batch * sizes.keys * INDEX_BYTES + buckets


def clustered_cost(
    sizes: Sizes, *, num_clusters: int, num_iterations: int = 10, top_k: int | None = None, num_bits: int = 63
) -> AttentionCost:
    """2 C (T H + S (H + Hv)) operations a head for C mean queries on all keys, 2 T k (H + Hv) for each query on the k
    best keys of its cluster, and 2 T J (H + C (2 L + 1)) for L rounds of K-means on J bits.

    Vyas et al. 2020, arXiv:2007.04825, sections 3.2 and 3.3. Choosing has no gradient, and the means one by the queries
    alone; of the best keys the logits are computed again.
    """
    heads = sizes.batch * sizes.heads
    choose = 2 * sizes.rows * num_bits * (sizes.head_dim + num_clusters * (2 * num_iterations + 1))
    means = 2 * sizes.rows * num_clusters * sizes.head_dim
    shared = sizes.pair_products(num_clusters * sizes.keys)
    best = 0 if top_k is None else min(top_k, sizes.keys)
    chunk = min(sizes.queries, CHUNK)
    refined = steps(sizes.queries, chunk) * chunk * best
    logits = heads * (num_clusters * sizes.keys + refined)
    members = sizes.rows * num_clusters
    kept = (2 * heads * num_clusters * sizes.keys + members + sizes.rows * num_bits) * sizes.wide
    in_chunk = heads * chunk * best * (sizes.head_dim + sizes.value_dim) * sizes.wide
    return AttentionCost(
        Work(
            choose + means + shared + sizes.pair_products(refined),
            FORWARD_OTHER * logits + 3 * members * (num_iterations + 1),
            sizes.io_bytes + 2 * kept + 2 * in_chunk * steps(sizes.queries, chunk),
            kept + in_chunk,
        ),
        Work(
            means + 2 * shared + sizes.pair_products(refined, 3, 2),
            BLOCK_BACKWARD_OTHER * logits + members,
            2 * sizes.io_bytes + 4 * kept + 4 * in_chunk * steps(sizes.queries, chunk),
            2 * (kept + in_chunk),
        ),
        state_bytes=sizes.head_dim * num_bits * 4,
    )
