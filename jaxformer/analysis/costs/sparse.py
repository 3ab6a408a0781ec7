"""Patterns: the pairs that their blocks compute, with global tokens' columns and rows."""

import dataclasses

from jaxformer.analysis.costs.dense import all_pairs, examples_together
from jaxformer.analysis.costs.softmax import running_softmax, whole_matrix
from jaxformer.analysis.costs.work import INDEX_BYTES, AttentionCost, Sizes, Work, steps
from jaxformer.attention.components import Component
from jaxformer.attention.global_tokens import columns
from jaxformer.attention.patterns import Pattern, Window, dilated, local
from jaxformer.attention.slot_attention import CHUNK
from jaxformer.attention.sparse_slots import find_regions
from jaxformer.attention.sparse_terms import check_patterns


def sparse_cost(
    sizes: Sizes, *, pattern: Pattern | tuple[Pattern, ...], num_added: int = 0, num_global: int = 0
) -> AttentionCost:
    """2 P (H + Hv) operations a head for the P pairs that the pattern's blocks compute.

    Child et al. 2019, arXiv:1904.10509, section 4.2: the cost is the number of connections; blocks compute at most
    about twice as many (`Pattern.executed_pairs`, against `num_pairs`). `num_added` learned tokens that every query
    sees add T pairs each, and `num_global` chosen ones T for their column and T for their row. A decoded token reads
    the slots that the pattern can still come back to, and the learned tokens; it can't have chosen ones.
    """
    patterns = check_patterns(pattern, sizes.heads, sizes.kv_heads)
    forward, backward = _attend(sizes, patterns, num_added, num_global)
    parameters = num_added * sizes.kv_heads * (sizes.head_dim + sizes.value_dim)
    cost = AttentionCost(forward, backward, parameters=parameters, parameter_bytes=sizes.param_bytes(parameters))
    if num_global:
        return cost
    prefill, decode = (_step(sizes, patterns, tokens, num_added) for tokens in (sizes.queries, 1))
    return dataclasses.replace(cost, prefill=prefill, decode=decode, cache_bytes=_cache_bytes(sizes, patterns))


def local_cost(sizes: Sizes, *, window: Window) -> AttentionCost:
    """T (before + after + 1) pairs, rounded up to blocks; a decoded token reads the last before + 1.

    Beltagy et al. 2020, arXiv:2004.05150, section 3.1: linear in the length.
    """
    return sparse_cost(sizes, pattern=local(window))


def longformer_cost(
    sizes: Sizes,
    *,
    window: Window,
    dilation: int = 1,
    global_indices: tuple[int, ...] = (),
    num_global: int | None = None,
) -> AttentionCost:
    """The window's pairs, and T for the column and T for the row of each of M global tokens.

    Beltagy et al. 2020, arXiv:2004.05150, section 3.1. Parameters are the global tokens' three projections from
    embed_dim, whose products belong to the layer, as those of all projections.
    """
    chosen = num_global or sum(index < sizes.queries for index in global_indices)
    forward, backward = _attend(sizes, (dilated(window, dilation),), 0, chosen)
    widths = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim)
    parameters = sum((sizes.embed_dim + 1) * width for width in widths)
    return AttentionCost(forward, backward, parameters=parameters, parameter_bytes=sizes.param_bytes(parameters))


def _attend(sizes: Sizes, patterns: tuple[Pattern, ...], added: int, chosen: int) -> tuple[Work, Work]:
    """Forward and backward: each group of heads with its own pattern, then the rows of chosen tokens."""
    chosen = min(chosen, sizes.queries)
    forward, backward = Work(0), Work(0)
    for pattern in patterns:
        group = _group(sizes, len(patterns))
        parts = list(pattern.components(sizes.queries, sizes.causal))
        parts += [columns(sizes.queries, count, None) for count in (chosen, added) if count]
        for part in parts:
            one, back = _component(group, part)
            forward, backward = forward + one, backward + back
    if chosen:
        rows = dataclasses.replace(sizes, queries=chosen, keys=sizes.keys + added, causal=False)
        one, back = all_pairs(rows, rows.terms())
        forward, backward = forward + one, backward + back
    return forward, backward


def _group(sizes: Sizes, count: int) -> Sizes:
    """One of `count` groups of heads."""
    return dataclasses.replace(sizes, heads=sizes.heads // count, kv_heads=max(1, sizes.kv_heads // count))


def _component(sizes: Sizes, part: Component) -> tuple[Work, Work]:
    return running_softmax(
        sizes, part.executed, part.query_block, part.key_block, examples_together(sizes), part.run or 1
    )


def _slots(patterns: tuple[Pattern, ...], max_length: int) -> list[int]:
    """Slots of each group of heads: what the causal pattern can still come back to."""
    return [sum(region.size for region in find_regions(pattern, max_length)) for pattern in patterns]


def _step(sizes: Sizes, patterns: tuple[Pattern, ...], tokens: int, added: int) -> Work:
    """One token attends to its slots; chunks of several attend to the slots as they were and to each other.

    All attend to the added tokens, too.
    """
    chunk = min(tokens, CHUNK)
    work = Work(0)
    for slots in _slots(patterns, sizes.keys):
        seen = added + (slots if tokens == 1 else slots + chunk)
        now = dataclasses.replace(_group(sizes, len(patterns)), queries=chunk, keys=seen)
        one = whole_matrix(now, chunk * seen)[0]
        for _ in range(steps(tokens, CHUNK)):
            work = work + one
    return work


def _cache_bytes(sizes: Sizes, patterns: tuple[Pattern, ...]) -> int:
    """Keys, values and positions of the slots, and the number of tokens."""
    group = _group(sizes, len(patterns))
    slots = _slots(patterns, sizes.keys)
    numbers = sum(group.key_value_numbers(count) for count in slots) * sizes.item
    return numbers + (sum(slots) * sizes.batch + 1) * INDEX_BYTES
