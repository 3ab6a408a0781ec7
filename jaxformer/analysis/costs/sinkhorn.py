"""Sorted blocks: Sinkhorn attention."""

from jaxformer.analysis.costs.softmax import BACKWARD_OTHER, FORWARD_OTHER
from jaxformer.analysis.costs.work import AttentionCost, Sizes, Work, steps


def sinkhorn_cost(
    sizes: Sizes, *, block_size: int = 16, sort_cut: int | None = None, num_iterations: int = 8
) -> AttentionCost:
    """2 C M b (H + Hv) operations a key head that bring C sorted blocks together from M = T / b, and 4 T b (H + Hv) a
    head for attention to the own and the sorted block of b tokens.

    Tay et al. 2020, arXiv:2002.11296, section 3 and table 1. C is M, or sort_cut, when every query sees all C. All
    products have two operands with gradients, but for the one that counts which tokens exist. Balancing takes about 8
    operations for each of M² scores and iteration. Parameters are the sorting network's two layers.
    """
    blocks = steps(sizes.queries, block_size)
    sorted_blocks = blocks if sort_cut is None else min(sort_cut, blocks)
    seen = 1 if sort_cut is None else sorted_blocks
    count = 2 * sizes.batch * sizes.kv_heads * sorted_blocks * blocks * block_size
    bring = count * (sizes.head_dim + sizes.value_dim)
    pairs = blocks * block_size * block_size * (1 + seen)
    attend = sizes.pair_products(pairs)
    logits = sizes.batch * sizes.heads * pairs
    slots = sizes.key_value_numbers(sorted_blocks * block_size)
    balancing = 8 * num_iterations * sizes.batch * sizes.kv_heads * blocks * blocks
    kept = (2 * logits + slots) * sizes.wide + sizes.io_bytes
    hidden = (sizes.embed_dim + 1) * sizes.embed_dim
    parameters = hidden + (sizes.embed_dim + 1) * sizes.heads * steps(sizes.keys, block_size)
    return AttentionCost(
        Work(
            count + bring + attend,
            FORWARD_OTHER * logits + 2 * slots + balancing,
            sizes.io_bytes + 2 * kept,
            kept,
        ),
        Work(
            count + 2 * (bring + attend),
            BACKWARD_OTHER * logits + 3 * slots + 2 * balancing,
            2 * sizes.io_bytes + 3 * kept,
            kept + logits * sizes.wide,
        ),
        parameters=parameters,
        parameter_bytes=sizes.param_bytes(parameters),
    )
