"""Softmax over pairs of queries and keys in its two forms: the whole matrix in memory, and a running sum over blocks.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1: two products of T x S pairs over H and Hv. The backward pass has
four: gradients of weights and values from the second, of queries and keys from the first; the blockwise form computes
the logits once more (Dao et al. 2022, arXiv:2205.14135, appendix B).
"""

from jaxformer.analysis.costs.work import Sizes, Work

# Operations for each logit beside the products. Forward: hide, maximum, difference, exponential, sum. Backward of the
# whole matrix: two products, a sum and two selections; by blocks the exponential and the mask come again.
FORWARD_OTHER, BACKWARD_OTHER, BLOCK_BACKWARD_OTHER = 5, 5, 8


def whole_matrix(sizes: Sizes, pairs: int) -> tuple[Work, Work]:
    """Forward and backward with `pairs` logits a head and example in memory.

    Products: 2 pairs (H + Hv) forward, twice as many backward. In memory are the logits and their exponentials; the
    backward pass keeps the exponentials and makes the gradients of both.
    """
    logits = sizes.batch * sizes.heads * pairs
    outputs = sizes.rows * sizes.value_dim
    forward = Work(
        matmul=sizes.pair_products(pairs),
        other=FORWARD_OTHER * logits + outputs,
        moved_bytes=sizes.io_bytes + 4 * logits * sizes.wide,
        temporary_bytes=2 * logits * sizes.wide,
    )
    backward = Work(
        matmul=sizes.pair_products(pairs, 2, 2),
        other=BACKWARD_OTHER * logits + 2 * outputs,
        moved_bytes=2 * sizes.io_bytes + 6 * logits * sizes.wide,
        temporary_bytes=3 * logits * sizes.wide,
    )
    return forward, backward


def running_softmax(
    sizes: Sizes, pairs: int, query_block: int, key_block: int, together: int | None = None, run: int = 1
) -> tuple[Work, Work]:
    """Forward and backward over `pairs` pairs in blocks, hidden ones that share a block with visible ones included.

    Products: 2 pairs (H + Hv) forward and 2 pairs (3 H + 2 Hv) backward. Each pair of blocks reads its keys and values
    and reads and writes the running sums of its queries; in memory are those sums and `run` blocks of logits, for
    `together` examples at once (all by default), and inputs and outputs in the loop's own layout.
    """
    heads = sizes.batch * sizes.heads
    sums = heads * (sizes.value_dim + 2) * sizes.wide
    key_reads = sizes.key_value_numbers(1) * sizes.item * pairs // query_block
    sum_moves = 2 * sums * pairs // key_block
    share = (together or sizes.batch) / sizes.batch
    block = heads * run * query_block * key_block * sizes.wide
    gradients = sizes.rows * sizes.head_dim + sizes.key_value_numbers(sizes.keys)
    outputs = sizes.rows * sizes.value_dim
    forward = Work(
        matmul=sizes.pair_products(pairs),
        other=FORWARD_OTHER * heads * pairs + outputs * (1 + 2 * pairs // (sizes.queries * key_block)),
        moved_bytes=sizes.io_bytes + key_reads + sum_moves,
        temporary_bytes=sizes.io_bytes + int(share * (sums * sizes.queries + 2 * block)),
    )
    backward = Work(
        matmul=sizes.pair_products(pairs, 3, 2),
        other=BLOCK_BACKWARD_OTHER * heads * pairs + 2 * outputs,
        moved_bytes=2 * sizes.io_bytes + 3 * key_reads + sum_moves,
        temporary_bytes=2 * sizes.io_bytes + int(share * (2 * gradients * sizes.wide + 3 * block)),
    )
    return forward, backward
