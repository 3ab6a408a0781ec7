"""What attention costs, and why: operations, memory traffic and decoding state of every kind, by formula.

**Prefill and decode.** Generating text has two phases. Prefill reads the whole prompt at once: T queries meet S keys in
large matrix products, as in training. Decode adds one token at a time: one query a head meets all that came before.
Per token both compute alike; what differs is how often a number that was fetched from memory is used. Prefill uses
each key for all T queries, decode for one.

**Arithmetic intensity** is operations per byte moved (`Work.intensity`). A machine that can do, say, 100 operations in
the time in which it reads a byte needs an intensity above 100 to be busy. Dense prefill comes near that by blocks which
stay in caches. A dense decoding step does 2 (H + Hv) operations for each cached token and query head, and reads H + Hv
numbers for each cached token and key head: about N / K operations a byte in 16 bits, whatever the length. So decoding
waits for memory, and its time is the bytes of parameters and cache divided by the bandwidth.

**Therefore cache bytes decide decoding speed**, and how many sequences fit beside each other, which is what shares the
reading of the parameters between them. What lowers them: fewer key heads (grouped and multi-query attention), narrower
numbers, a window (a ring of the last tokens), slots for pooled tokens, and a state that does not grow at all (linear
attention, Performer). Kinds that choose among all tokens by content (LSH, routing) save operations in training, but
keep and read the whole cache. Operations alone say little here: compare `AttentionCost.decode.moved_bytes` and
`cache_bytes`.

    dense = attention_cost("dense", 1, 4096, 16, 64, causal=True, dtype="bfloat16")
    local = attention_cost("local", 1, 4096, 16, 64, causal=True, dtype="bfloat16", window=255)
    dense.cache_bytes / local.cache_bytes  # about 16: a decoding step of local attention moves 1 / 16 of the bytes

Products are exact: the tests count them in each function's own program. All else is an estimate.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.analysis.costs.dense import dense_cost, shared_query_key_cost
from jaxformer.analysis.costs.features import linear_cost, performer_cost
from jaxformer.analysis.costs.hashed import clustered_cost, lsh_cost, routing_cost
from jaxformer.analysis.costs.low_rank import compressed_cost, linformer_cost
from jaxformer.analysis.costs.scores import additive_cost, bilinear_cost, concat_cost, kernel_cost
from jaxformer.analysis.costs.sinkhorn import sinkhorn_cost
from jaxformer.analysis.costs.sparse import local_cost, longformer_cost, sparse_cost
from jaxformer.analysis.costs.work import AttentionCost, Sizes
from jaxformer.attention import ATTENTION, PATTERNS, AttentionKind
from jaxformer.attention.inputs import check_count, check_dtype, check_flag

COSTS: dict[str, Callable[..., AttentionCost]] = {
    "additive": additive_cost,
    "bilinear": bilinear_cost,
    "clustered": clustered_cost,
    "compressed": compressed_cost,
    "concat": concat_cost,
    "dense": dense_cost,
    "kernel": kernel_cost,
    "linear": linear_cost,
    "linformer": linformer_cost,
    "local": local_cost,
    "longformer": longformer_cost,
    "lsh": lsh_cost,
    "performer": performer_cost,
    "routing": routing_cost,
    "shared_query_key": shared_query_key_cost,
    "sinkhorn": sinkhorn_cost,
    "sparse": sparse_cost,
}
"""The formula of each kind, from sizes and the arguments that change its cost."""

COUNTS = {
    **dict.fromkeys(("block_size", "chunk_size", "hidden_dim", "num_bits", "num_clusters", "num_features"), 1),
    **dict.fromkeys(("num_hashes", "num_iterations", "rank", "redraw_every", "sort_cut", "top_k"), 1),
    **dict.fromkeys(("num_added", "num_chunks_after", "num_chunks_before", "num_global"), 0),
}
"""The least of each argument that is a number of things."""

MOST = 2**31 - 1
"""The largest size: positions are numbers of 32 bits."""


def attention_cost(
    kind: AttentionKind | str,
    batch_size: int,
    length: int,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    key_length: int | None = None,
    causal: bool = False,
    dtype: DTypeLike = jnp.float32,
    embed_dim: int | None = None,
    param_dtype: DTypeLike = jnp.float32,
    **arguments: Any,
) -> AttentionCost:
    """The cost of one layer's attention of any kind, by formula: nothing is compiled or run.

    It is the cost without masks, segments, biases and dropout, in the form that the function itself would choose on
    this backend. See the formulas in `jaxformer.analysis.costs` for their derivations.

    Args:
      kind: an `AttentionKind`, or a name of `ATTENTION` or `PATTERNS`.
      batch_size: B.
      length: T, in tokens.
      num_heads: N, query heads.
      head_dim: H.
      num_kv_heads: K, key and value heads; num_heads by default.
      value_dim: Hv; head_dim by default.
      key_length: S, keys, and slots of the cache while decoding; length by default.
      causal: hide keys behind the query.
      dtype: of queries, keys, values and the cache.
      embed_dim: width of the layer's input, for kinds whose arrays are made from it; num_heads * head_dim by default.
      param_dtype: of the kind's own parameters.
      arguments: static arguments of the kind's function, and of the module that makes its arrays
        (`jaxformer.layers.ATTENTION_ARGUMENTS`), that change the cost; a pattern's are its constructor's.

    Returns:
      `AttentionCost`.

    Raises:
      ValueError: an unknown kind, or one without a formula; an argument that the kind's cost doesn't depend on, or one
        that is missing or out of range; a size that is no integer of at least 1; a dtype that is not floating; what the
        kind can't be: causal, other than causal, of other keys than queries, or with fewer key heads.
    """
    record, formula, arguments = _find(kind, arguments)
    check_count(num_heads, "num_heads")
    check_count(head_dim, "head_dim")
    sizes = Sizes(
        batch=batch_size,
        queries=length,
        keys=length if key_length is None else key_length,
        heads=num_heads,
        kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        causal=check_flag(causal, "causal"),
        dtype=check_dtype(dtype),
        embed_dim=num_heads * head_dim if embed_dim is None else embed_dim,
        param_dtype=check_dtype(param_dtype, "param_dtype"),
    )
    _check_sizes(sizes, record)
    return formula(sizes, **arguments)


def overtaking_length(
    kind: AttentionKind | str,
    num_heads: int,
    head_dim: int,
    *,
    causal: bool = False,
    longest: int = 2**17,
    **arguments: Any,
) -> int | None:
    """The length from which on a kind needs fewer operations than dense attention for one forward pass.

    Found by bisection, with all operations counted: rounding to blocks may cross the line a few more times near by.
    Operations aren't time; the crossing of measured times lies further up, where products are smaller.

    Args:
      kind, num_heads, head_dim, causal, arguments: as in `attention_cost`.
      longest: the last length that is looked at, in tokens.

    Returns:
      A length in tokens, or None if the kind needs no fewer operations at `longest`.

    Raises:
      ValueError: as `attention_cost`.
    """

    def is_less(length: int) -> bool:
        own = attention_cost(kind, 1, length, num_heads, head_dim, causal=causal, **arguments)
        dense = attention_cost("dense", 1, length, num_heads, head_dim, causal=causal)
        return own.forward.total < dense.forward.total

    check_count(longest, "longest")
    high = 1
    while not is_less(high):
        if high >= longest:
            return None
        high = min(2 * high, longest)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_less(middle) else (middle, high)
    return high


def growth_exponent(lengths: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """The p of values that grow as length^p: the slope of the least-squares line through their logarithms.

    Args:
      lengths: positive numbers, at least two different ones.
      values: a positive number (seconds, bytes, operations) for each.

    Raises:
      ValueError: numbers that are not positive, of different count, or of one length alone.
    """
    x, y = np.asarray(lengths, float), np.asarray(values, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"lengths has shape {x.shape} and values {y.shape}; they must be two lists of equal length.")
    if not all(((part > 0) & np.isfinite(part)).all() for part in (x, y)) or len(np.unique(x)) < 2:
        raise ValueError(
            f"lengths is {lengths} and values {values}; all must be positive and finite, and two lengths differ."
        )
    x, y = np.log(x), np.log(y)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def _find(
    kind: AttentionKind | str, arguments: dict[str, Any]
) -> tuple[AttentionKind, Callable[..., AttentionCost], dict[str, Any]]:
    """Record and formula of the kind, and the formula's arguments; a pattern's become the pattern."""
    name = kind.name if isinstance(kind, AttentionKind) else kind
    if name in PATTERNS:
        pattern = PATTERNS[name]
        of_pattern, of_sparse = inspect.signature(pattern.constructor).parameters, formula_arguments("sparse")
        of_sparse = {key: parameter for key, parameter in of_sparse.items() if key != "pattern"}
        _check_arguments(name, arguments, {**of_pattern, **of_sparse})
        _check_counts(arguments, of_sparse)
        own = {key: value for key, value in arguments.items() if key in of_pattern}
        rest = {key: value for key, value in arguments.items() if key not in of_pattern}
        record = dataclasses.replace(
            ATTENTION["sparse"], name=name, causal=pattern.causal, bidirectional=pattern.bidirectional
        )
        return record, COSTS["sparse"], {"pattern": pattern.constructor(**own), **rest}
    if name not in ATTENTION:
        raise ValueError(f"kind is {name!r}; it must be one of {', '.join(sorted([*ATTENTION, *PATTERNS]))}.")
    if name not in COSTS:
        raise ValueError(f"kind is {name!r}, which has no formula of its cost.")
    _check_arguments(name, arguments, formula_arguments(name))
    _check_counts(arguments, formula_arguments(name))
    return ATTENTION[name], COSTS[name], arguments


def formula_arguments(name: str) -> dict[str, inspect.Parameter]:
    """What the formula of a kind takes beside sizes."""
    return dict(list(inspect.signature(COSTS[name]).parameters.items())[1:])


def _check_arguments(name: str, arguments: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    for argument in arguments:
        if argument not in known:
            raise ValueError(
                f"{argument} is given; the cost of attention {name!r} depends on {', '.join(known) or 'sizes'} only."
            )
    for argument, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and argument not in arguments:
            raise ValueError(f"{argument} is missing; the cost of attention {name!r} depends on it.")


def _check_counts(arguments: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """Refuses what is no number of things; None stands for what the formula makes of it."""
    for name, least in COUNTS.items():
        if name in known and name in arguments and (arguments[name] is not None or known[name].default is not None):
            check_count(arguments[name], name, least)


def _check_sizes(sizes: Sizes, record: AttentionKind) -> None:
    names = {
        "batch_size": sizes.batch,
        "length": sizes.queries,
        "key_length": sizes.keys,
        "num_kv_heads": sizes.kv_heads,
        "value_dim": sizes.value_dim,
        "embed_dim": sizes.embed_dim,
    }
    for name, size in names.items():
        if check_count(size, name) > MOST:
            raise ValueError(f"{name} is {size}; it must be at most {MOST}.")
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"num_kv_heads is {sizes.kv_heads}; it must divide num_heads, {sizes.heads}.")
    unfit = {
        "it can't be causal": sizes.causal and not record.causal,
        "it is causal only": not sizes.causal and not record.bidirectional,
        f"its keys are the {sizes.queries} queries' tokens, not {sizes.keys} others": sizes.keys != sizes.queries
        and not record.cross,
        f"it needs as many key heads as query heads, {sizes.heads}": sizes.kv_heads != sizes.heads
        and not record.grouped_heads,
        f"causal queries are among the keys, and {sizes.queries} are more than {sizes.keys}": sizes.causal
        and sizes.queries > sizes.keys,
    }
    for reason, holds in unfit.items():
        if holds:
            raise ValueError(f"attention {record.name!r}: {reason}.")
