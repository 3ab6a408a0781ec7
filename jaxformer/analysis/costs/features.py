"""Reordered products: linear attention and the Performer, whose sums over keys are taken once for all queries."""

import dataclasses
from collections.abc import Callable

from jaxformer.analysis.costs.work import INDEX_BYTES, AttentionCost, Sizes, Work, steps
from jaxformer.attention.linear import check_feature_map
from jaxformer.attention.linear_chunks import CHUNK_SIZE, check_form, choose_form
from jaxformer.attention.random_features import check_features, num_outputs

# Operations for each weight of a pair (mask, exponential of the log weight, product, sum), and for each feature.
PAIR_OTHER, FEATURE_OTHER = 3, 5


@dataclasses.dataclass(frozen=True)
class Features:
    """How features are made.

    Attributes:
      number: F, features of a query or key.
      directions: products with so many directions of H numbers make them; 0 for functions of single numbers.
    """

    number: int
    directions: int = 0


def linear_cost(
    sizes: Sizes, *, feature_map: str | Callable = "elu", form: str | None = None, chunk_size: int = CHUNK_SIZE
) -> AttentionCost:
    """T F Hv and S F Hv products for each head instead of T S (H + Hv): linear in the length, and F = H features.

    Katharopoulos et al. 2020, arXiv:2006.16236, section 3.2.1 and equations 16 to 20. A decoded token costs the same
    whatever came before.
    """
    _, number = check_feature_map(feature_map, sizes.head_dim, sizes.dtype)
    return _cost(sizes, Features(number), form, chunk_size)


def performer_cost(
    sizes: Sizes,
    *,
    num_features: int = 128,
    features: str = "positive",
    redraw_every: int | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> AttentionCost:
    """As linear attention with F random features, and 2 (T + S) H F operations a head that make them.

    Choromanski et al. 2021, arXiv:2009.14794, section 2.2 and algorithm 1. Training has no gradient by the drawn
    directions. Where they are drawn anew, the state is the seed and the number of steps, and drawing is left out.
    """
    cost = _cost(sizes, Features(num_outputs(num_features, check_features(features)), num_features), form, chunk_size)
    directions = sizes.kv_heads * num_features * sizes.head_dim * 4
    return dataclasses.replace(cost, state_bytes=directions if redraw_every is None else 3 * INDEX_BYTES)


def _cost(sizes: Sizes, features: Features, form: str | None, chunk_size: int) -> AttentionCost:
    check_form(form, chunk_size)
    form = choose_form(form, sizes.queries, sizes.keys, chunk_size)
    if form == "quadratic":
        forward, backward = _quadratic(sizes, features)
    elif not sizes.causal:
        forward, backward = _one_sum(sizes, features)
    else:
        # The queries are filled up to the keys, so that chunks of both go together.
        whole = dataclasses.replace(sizes, queries=sizes.keys)
        if form == "chunked":
            forward, backward = _chunks(whole, features, min(chunk_size, sizes.keys))
        else:
            forward, backward = _recurrence(whole, features)
    new, one = (dataclasses.replace(sizes, queries=tokens, keys=tokens) for tokens in (sizes.queries, 1))
    state = sizes.batch * sizes.kv_heads * (features.number * (sizes.value_dim + 1) + 1) * sizes.wide
    return AttentionCost(
        forward,
        backward,
        prefill=_chunks(new, features, min(chunk_size, sizes.queries))[0],
        decode=_chunks(one, features, 1)[0],
        cache_bytes=state,
    )


def _make(sizes: Sizes, features: Features) -> tuple[int, int]:
    """(products, other operations) that make the features of all queries and keys."""
    tokens = sizes.batch * (sizes.heads * sizes.queries + sizes.kv_heads * sizes.keys)
    return 2 * tokens * sizes.head_dim * features.directions, FEATURE_OTHER * tokens * features.number


def _absorb(sizes: Sizes, features: Features, tokens: int) -> int:
    """Products that add keys and values to the state: F Hv a token and key head."""
    return 2 * sizes.batch * sizes.kv_heads * tokens * features.number * sizes.value_dim


def _read(sizes: Sizes, features: Features, tokens: int) -> int:
    """Products of queries with the state and its normaliser: F (Hv + 1) a token and head."""
    return 2 * sizes.batch * sizes.heads * tokens * features.number * (sizes.value_dim + 1)


def _pairs(sizes: Sizes, features: Features, pairs: int) -> int:
    """Products over pairs: F for the weight and Hv for the value."""
    return 2 * sizes.batch * sizes.heads * pairs * (features.number + sizes.value_dim)


def _feature_bytes(sizes: Sizes, features: Features) -> int:
    tokens = sizes.batch * (sizes.heads * sizes.queries + sizes.kv_heads * sizes.keys)
    return tokens * features.number * sizes.wide


def _quadratic(sizes: Sizes, features: Features) -> tuple[Work, Work]:
    """All pairs: every product has two operands with gradients, drawn directions having none."""
    make, other = _make(sizes, features)
    pairs = _pairs(sizes, features, sizes.queries * sizes.keys)
    weights = sizes.batch * sizes.heads * sizes.queries * sizes.keys
    kept = _feature_bytes(sizes, features) + 2 * weights * sizes.wide
    forward = Work(make + pairs, other + PAIR_OTHER * weights, sizes.io_bytes + 2 * kept, kept)
    backward = Work(
        make + 2 * pairs, other + 2 * PAIR_OTHER * weights, 2 * sizes.io_bytes + 4 * kept, kept + weights * sizes.wide
    )
    return forward, backward


def _one_sum(sizes: Sizes, features: Features) -> tuple[Work, Work]:
    """One state of all keys, read by all queries; the backward pass makes features, state and sums once more."""
    make, other = _make(sizes, features)
    products = _absorb(sizes, features, sizes.keys) + _read(sizes, features, sizes.queries)
    kept = _feature_bytes(sizes, features)
    forward = Work(make + products, other, sizes.io_bytes + 2 * kept, sizes.io_bytes + kept)
    backward = Work(2 * make + 3 * products, 3 * other, 2 * sizes.io_bytes + 5 * kept, sizes.io_bytes + 2 * kept)
    return forward, backward


def _chunks(sizes: Sizes, features: Features, size: int) -> tuple[Work, Work]:
    """The state before each chunk of `size` tokens, and pairs within it.

    The backward pass makes each chunk's features and outputs again, from states that it kept.
    """
    chunks = steps(sizes.keys, size)
    filled = dataclasses.replace(sizes, queries=chunks * size, keys=chunks * size)
    make, other = _make(filled, features)
    products = _read(sizes, features, filled.keys) + _pairs(sizes, features, filled.keys * size)
    absorb = _absorb(sizes, features, filled.keys)
    weights = sizes.batch * sizes.heads * filled.keys * size
    state = sizes.batch * sizes.kv_heads * features.number * (sizes.value_dim + 1) * sizes.wide
    in_chunk = (_feature_bytes(filled, features) + 2 * weights * sizes.wide) // chunks
    other += PAIR_OTHER * weights + 2 * chunks * state // sizes.wide  # the state fades, what is new is added
    moved = sizes.io_bytes + 2 * chunks * state
    forward = Work(make + products + absorb, other, moved, sizes.io_bytes + state + in_chunk)
    backward = Work(
        2 * make + 3 * products + 2 * absorb,
        3 * other,
        2 * sizes.io_bytes + 4 * chunks * state,
        sizes.io_bytes + chunks * state + in_chunk,
    )
    return forward, backward


def _recurrence(sizes: Sizes, features: Features) -> tuple[Work, Work]:
    """A state a token, all kept for the backward pass."""
    make, other = _make(sizes, features)
    products = _absorb(sizes, features, sizes.keys) + _read(sizes, features, sizes.keys)
    state = sizes.batch * sizes.kv_heads * features.number * (sizes.value_dim + 1) * sizes.wide
    other += 3 * sizes.keys * state // sizes.wide
    forward = Work(make + products, other, sizes.io_bytes + 2 * sizes.keys * state, 2 * state)
    backward = Work(make + 2 * products, 2 * other, 2 * sizes.io_bytes + 4 * sizes.keys * state, 2 * sizes.keys * state)
    return forward, backward
