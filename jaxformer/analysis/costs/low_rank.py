"""Fewer keys for all queries: Linformer's learned slots and memory-compressed attention's pooled windows."""

import dataclasses

from jaxformer.analysis.costs.softmax import BACKWARD_OTHER, FORWARD_OTHER
from jaxformer.analysis.costs.work import INDEX_BYTES, AttentionCost, Sizes, Work, steps
from jaxformer.attention.compressed_cache import CHUNK
from jaxformer.attention.compressed_pool import Windows
from jaxformer.attention.linformer import split_queries


def linformer_cost(
    sizes: Sizes, *, rank: int = 64, share_heads: bool = True, share_key_value: bool = False
) -> AttentionCost:
    """2 (S + T) rank (H + Hv) operations a head: keys and values projected to slots, then attention to these.

    Wang et al. 2020, arXiv:2006.04768, section 4, equation 7 and table 1. All four products have two operands with
    gradients. One projection for keys and values saves parameters, not products. Many queries go block by block, whose
    logits the backward pass computes again.
    """
    project = 2 * rank * sizes.key_value_numbers(sizes.keys)
    blocks, size = split_queries(sizes.queries)
    queries = blocks * size
    again = sizes.pair_products(queries * rank, 1, 0) if blocks > 1 else 0
    logits = sizes.batch * sizes.heads * queries * rank
    products = project + sizes.pair_products(queries * rank)
    slots = rank * sizes.key_value_numbers(1)
    kept = (2 * logits // blocks + slots) * sizes.wide
    heads = 1 if share_heads else sizes.kv_heads
    parameters = (1 if share_key_value else 2) * heads * rank * sizes.keys
    read = sizes.io_bytes + sizes.param_bytes(parameters)
    return AttentionCost(
        Work(products, FORWARD_OTHER * logits + slots, read + 2 * kept, kept),
        Work(
            2 * products + again,
            BACKWARD_OTHER * logits + slots,
            2 * read + 3 * kept,
            kept + logits // blocks * sizes.wide,
        ),
        parameters=parameters,
        parameter_bytes=sizes.param_bytes(parameters),
    )


def compressed_cost(
    sizes: Sizes, *, stride: int = 4, window_size: int | None = None, recent: bool = True, convolution: bool = False
) -> AttentionCost:
    """2 T (S / stride + R) (H + Hv) operations a head, where causal queries in blocks of a stride see R recent tokens.

    Liu et al. 2018, arXiv:1801.10198, section 4.2.3: S / stride slots. R is window_size, and 0 where not causal. With
    `convolution`, kernels of window_size weights a channel cost 2 window_size operations for each number of a slot.
    A decoded token reads all slots, a ring of window_size tokens and itself.
    """
    windows = Windows.checked(stride, window_size, recent, sizes.causal)
    slots = windows.num_slots(sizes.keys)
    _, blocks, block = windows.query_blocks(sizes.queries, sizes.keys)
    near = windows.reach + block if windows.near else 0
    pairs = blocks * block * (slots + near)
    pool = 2 * windows.size * sizes.key_value_numbers(slots) if convolution else 0
    products = pool + sizes.pair_products(pairs)
    logits = sizes.batch * sizes.heads * pairs
    pooled = sizes.key_value_numbers(slots * windows.size + blocks * near)
    kept = 2 * logits * sizes.wide + pooled * sizes.item
    parameters = windows.size * (sizes.head_dim + sizes.value_dim) if convolution else 0
    prefill, decode = (_step(sizes, windows, tokens) for tokens in (sizes.queries, 1))
    return AttentionCost(
        Work(products, FORWARD_OTHER * logits + pooled, sizes.io_bytes + 2 * kept, kept),
        Work(
            2 * products,
            BACKWARD_OTHER * logits + pooled,
            2 * sizes.io_bytes + 3 * kept,
            kept + logits * sizes.wide,
        ),
        prefill,
        decode,
        _cache_bytes(sizes, windows),
        parameters,
        sizes.param_bytes(parameters),
    )


def _step(sizes: Sizes, windows: Windows, tokens: int) -> Work:
    """Each chunk of new tokens attends to all slots, the ring and itself."""
    chunk = min(tokens, CHUNK)
    chunks = steps(tokens, CHUNK)
    seen = windows.num_slots(sizes.keys) + windows.size + chunk
    now = dataclasses.replace(sizes, queries=tokens)
    logits = sizes.batch * sizes.heads * chunk * seen
    read = sizes.key_value_numbers(seen) * sizes.wide
    added = steps(windows.size, windows.stride) * sizes.key_value_numbers(chunks * chunk)
    return Work(
        matmul=chunks * sizes.pair_products(chunk * seen),
        other=FORWARD_OTHER * chunks * logits + 2 * added,
        moved_bytes=now.rows * (sizes.head_dim + sizes.value_dim) * sizes.item + chunks * read,
        temporary_bytes=2 * logits * sizes.wide + read,
    )


def _cache_bytes(sizes: Sizes, windows: Windows) -> int:
    """Slots in float32 or wider with their counts, and the ring with its positions."""
    slots = windows.num_slots(sizes.keys)
    numbers = sizes.key_value_numbers(slots) * sizes.wide + sizes.key_value_numbers(windows.size) * sizes.item
    return numbers + (sizes.batch * (slots + windows.size) + 1) * INDEX_BYTES
