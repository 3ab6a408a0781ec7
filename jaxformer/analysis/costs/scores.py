"""Scores that are not products of query and key: additive, concatenation, kernel and bilinear attention."""

import dataclasses

from jaxformer.analysis.costs.dense import all_pairs, cached_steps, key_value_cache_bytes
from jaxformer.analysis.costs.softmax import BACKWARD_OTHER, FORWARD_OTHER
from jaxformer.analysis.costs.work import AttentionCost, Sizes, Work, steps
from jaxformer.attention.scores import BLOCK_SIZE

# Operations for each activation of a pair: sum, function, product, sum; the backward pass makes them twice and
# differentiates them.
SCORE_OTHER, SCORE_BACKWARD_OTHER = 4, 14


def additive_cost(sizes: Sizes, *, hidden_dim: int | None = None, block_size: int = BLOCK_SIZE) -> AttentionCost:
    """4 T S M operations a head on single activations for the scores, which no matrix product can do, 2 T S Hv for the
    values, and 2 (T + S) H M for both projections.

    Bahdanau et al. 2015, arXiv:1409.0473, section 3.1 and appendix A.1.2. Every product has two operands with
    gradients. A decoded token projects all S slots of the cache again. M is `hidden_dim`, head_dim by default.
    """
    hidden = sizes.head_dim if hidden_dim is None else hidden_dim
    project = _projections(sizes, hidden)
    forward, backward = _by_blocks(sizes, hidden, block_size)
    steps_ = (dataclasses.replace(sizes, queries=tokens) for tokens in (sizes.queries, 1))
    prefill, decode = (_by_blocks(now, hidden, BLOCK_SIZE)[0] + Work(_projections(now, hidden)) for now in steps_)
    parameters = 2 * sizes.head_dim * hidden + hidden
    return AttentionCost(
        forward + Work(project),
        backward + Work(2 * project),
        prefill,
        decode,
        key_value_cache_bytes(sizes),
        parameters,
        sizes.param_bytes(parameters),
    )


def concat_cost(sizes: Sizes, *, hidden_dim: int | None = None, block_size: int = BLOCK_SIZE) -> AttentionCost:
    """As additive attention: one kernel for [query; key] is a kernel for each.

    Luong et al. 2015, arXiv:1508.04025, section 3.1, equation 8.
    """
    return additive_cost(sizes, hidden_dim=hidden_dim, block_size=block_size)


def kernel_cost(
    sizes: Sizes, *, width: float | tuple[float, ...] | None = None, block_size: int = BLOCK_SIZE
) -> AttentionCost:
    """4 T S H operations a head on single differences for the distances, and 2 T S Hv for the values.

    Nadaraya 1964, doi:10.1137/1109020; Watson 1964. Distances are summed from differences, not from products. One width
    a head is learned, unless it is fixed by `width`.
    """
    parameters = sizes.heads if width is None else 0
    forward, backward = _by_blocks(sizes, sizes.head_dim, block_size)
    steps_ = (dataclasses.replace(sizes, queries=tokens) for tokens in (sizes.queries, 1))
    prefill, decode = (_by_blocks(now, sizes.head_dim, BLOCK_SIZE)[0] for now in steps_)
    return AttentionCost(
        forward,
        backward,
        prefill,
        decode,
        key_value_cache_bytes(sizes),
        parameters=parameters,
        parameter_bytes=sizes.param_bytes(parameters),
    )


def bilinear_cost(sizes: Sizes) -> AttentionCost:
    """2 T H² operations a head for the projected query beside those of dense attention.

    Luong et al. 2015, arXiv:1508.04025, section 3.1, equation 8, "general".
    """
    forward, backward = all_pairs(sizes, sizes.terms())
    prefill, decode = cached_steps(sizes)
    one = 2 * sizes.batch * sizes.heads * sizes.head_dim**2
    project, parameters = one * sizes.queries, sizes.head_dim**2
    return AttentionCost(
        forward + Work(project),
        backward + Work(2 * project),
        prefill + Work(project),
        decode + Work(one),
        key_value_cache_bytes(sizes),
        parameters,
        sizes.param_bytes(parameters),
    )


def _projections(sizes: Sizes, hidden: int) -> int:
    tokens = sizes.batch * (sizes.heads * sizes.queries + sizes.kv_heads * sizes.keys)
    return 2 * tokens * sizes.head_dim * hidden


def _by_blocks(sizes: Sizes, width: int, block_size: int) -> tuple[Work, Work]:
    """Blocks of queries meet all keys: only values enter a product, and its recomputation is not needed."""
    query_block, key_block = min(block_size, sizes.queries), min(block_size, sizes.keys)
    blocks = steps(sizes.queries, query_block)
    pairs = blocks * query_block * sizes.keys
    logits = sizes.batch * sizes.heads * pairs
    block = sizes.batch * sizes.heads * query_block * (2 * sizes.keys + key_block * width) * sizes.wide
    read = blocks * sizes.key_value_numbers(sizes.keys) * sizes.item
    forward = Work(
        sizes.pair_products(pairs, 0, 1),
        (FORWARD_OTHER + SCORE_OTHER * width) * logits,
        sizes.io_bytes + read + 4 * logits * sizes.wide,
        block,
    )
    backward = Work(
        sizes.pair_products(pairs, 0, 2),
        (FORWARD_OTHER + BACKWARD_OTHER + SCORE_BACKWARD_OTHER * width) * logits,
        2 * sizes.io_bytes + 3 * read + 6 * logits * sizes.wide,
        2 * block,
    )
    return forward, backward
