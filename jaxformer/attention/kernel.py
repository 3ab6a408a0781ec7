"""Kernel attention: the average of values weighted by distance, attention sixty years before its name."""

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.attention.cache import KeyValueCache
from jaxformer.attention.inputs import check_flag, check_query_key, check_value
from jaxformer.attention.scores import (
    BLOCK_SIZE,
    Score,
    attend_scores,
    check_array,
    core_terms,
    hide_keys,
    score_weights,
    step_scores,
)
from jaxformer.attention.terms import Terms
from jaxformer.functional import compute_dtype

# The least width and the most widths between two features: in float32 the derivatives of squares are finite for all
# that lies between them, so that a key without weight passes on 0, not 0 times infinity.
NARROWEST, FARTHEST = 1e-10, 1e12


def kernel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: str | Callable = "gaussian",
    width: ArrayLike = 1.0,
    leave_one_out: bool = False,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    block_size: int = BLOCK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Kernel attention: each query sees the keys near it, O(T S H) time, O(T + S) memory.

    sum of K(u) value / sum of K(u) over the visible keys, u = |query - key| / width: the Nadaraya-Watson regression of
    values on keys, read at the queries. With the "gaussian" kernel it is softmax(-u²/2) value, which for keys of equal
    length is dense attention with scale 1 / width². To prefer for interpolation and to show where attention comes from.
    Nadaraya 1964, "On Estimating Regression", doi:10.1137/1109020; Watson 1964, "Smooth Regression Analysis".

    Kernels: "gaussian" exp(-u²/2); "boxcar" 1 for u <= 1; "epanechnikov" 0.75 (1 - u²) for u <= 1; "triangular" 1 - u
    for u <= 1; "constant" 1. All but the first and last see nothing beyond the width; a query with no key in reach gets
    zeros. The Gaussian is computed from its logarithm, so a query far from all keys takes the nearest one's value.
    More than 1e12 widths in one feature count as 1e12, with the gradient 0 to query and key.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      kernel: a name, or a function of u [..] to weights [..] >= 0, differentiable where they are positive; static.
      width: number or floating array of at least 1e-10, a scalar or [N] for each head, in the units of query and key.
        Gets gradients where the kernel depends on it. Where it is traced, what is less counts as 1e-10.
      leave_one_out: hide from each query the key at its own position, as one must to learn the width from the keys'
        own values: otherwise each is best told by itself and the width shrinks to 0. Needs T = S.
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys after the query, the queries being the last T of the S keys.
      query_segments, key_segments: int [B or 1, T] and [B or 1, S]: only tokens of equal segments see each other. One
        alone serves both if T = S.
      block_size: tokens on each side of a block of pairs.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit, causal with T > S, leave_one_out with T != S, an unknown kernel, or
        a width below 1e-10.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import kernel_attention
        >>> x = jnp.array([0.0, 1.0, 2.0, 9.0]).reshape(1, 4, 1, 1)
        >>> kernel_attention(x, x, 2 * x, kernel="boxcar", width=1.5).ravel().tolist()  # means within 1.5
        [1.0, 2.0, 3.0, 18.0]
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    terms = core_terms(query, key, key_mask, causal, query_segments, key_segments)
    _check_leave_one_out(leave_one_out, terms)
    key, value = hide_keys(key, value, terms)
    score = _score(query, kernel, width)
    return attend_scores(score, query, key, value, terms, block_size, others_only=leave_one_out)


def kernel_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    kernel: str | Callable = "gaussian",
    width: ArrayLike = 1.0,
    leave_one_out: bool = False,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The weights that `kernel_attention` gives each value: O(T S H) time, O(T S) memory. For plots and tests.

    Nadaraya 1964, "On Estimating Regression", doi:10.1137/1109020.

    Args:
      query, key, kernel, width, leave_one_out, key_mask, causal, query_segments, key_segments: as in
        `kernel_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `kernel_attention`.
    """
    query, key = check_query_key(query, key)
    terms = core_terms(query, key, key_mask, causal, query_segments, key_segments)
    _check_leave_one_out(leave_one_out, terms)
    key, _ = hide_keys(key, key, terms)
    return score_weights(_score(query, kernel, width), query, key, terms, others_only=leave_one_out)


def kernel_step(
    cache: KeyValueCache,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    kernel: str | Callable = "gaussian",
    width: ArrayLike = 1.0,
    leave_one_out: bool = False,
    layer: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
) -> tuple[Float[Array, "B T N Hv"], KeyValueCache]:
    """Writes T tokens into a cache from `init_cache` and attends from them, causally by position: O(T S H) time.

    Equals the last T rows of causal `kernel_attention` over all tokens so far.
    Nadaraya 1964, "On Estimating Regression", doi:10.1137/1109020.

    Args:
      cache: of one layer, or stacked over depth with `layer`.
      query: floating [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, Hv].
      kernel, width: as in `kernel_attention`.
      leave_one_out: hide from each query the key at its own position, as `kernel_attention` does; two real tokens of a
        row and segment then never have one position.
      layer, positions, key_mask, segments: as in `dense_step`; positions order the tokens, distances are of features.

    Returns:
      [B, T, N, Hv] in value.dtype, zeros for a query that sees nothing, and the new cache.

    Raises:
      ValueError: shapes or dtypes that do not fit each other or the cache, or more tokens than free slots.
    """
    query, key = check_query_key(query, key)
    check_flag(leave_one_out, "leave_one_out")

    def prepare(query: Array, key: Array) -> tuple[Score, Array, Array]:
        return _score(query, kernel, width), query, key

    return step_scores(
        prepare, cache, query, key, value, layer, positions, key_mask, segments, others_only=leave_one_out
    )


def _logarithm(weights: Array) -> Array:
    """log(weights), -inf where they are not positive, without a gradient there."""
    positive = weights > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, weights, 1.0)), -jnp.inf)


def _root(squares: Array) -> Array:
    """Square root with the gradient 0 at 0."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1.0)), 0.0)


# Logarithms of the kernels as functions of u².
KERNELS: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gaussian": lambda squares: -0.5 * squares,
        "boxcar": lambda squares: jnp.where(squares <= 1, jnp.zeros((), squares.dtype), -jnp.inf),
        "epanechnikov": lambda squares: _logarithm(0.75 * (1 - squares)),
        "triangular": lambda squares: _logarithm(1 - _root(squares)),
        "constant": jnp.zeros_like,
    }
)


def _score(query: Float[Array, "B T N H"], kernel: str | Callable, width: ArrayLike) -> Score:
    """The logarithm of the kernel at the distances of a block."""
    if not callable(kernel) and kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; it must be a function or one of {sorted(KERNELS)}.")

    def logarithm(squares: Array) -> Array:
        return _logarithm(kernel(_root(squares))) if callable(kernel) else KERNELS[kernel](squares)

    num_heads = query.shape[2]
    dtype = compute_dtype(query.dtype)
    given = float(width) if isinstance(width, int | np.integer) and not isinstance(width, bool) else width
    width = check_array(given, "width", (), (num_heads,)).astype(dtype)
    # A number is known while all else is traced.
    known = not isinstance(given, jax.core.Tracer)
    if known and not np.all(np.asarray(given).astype(dtype) >= np.asarray(NARROWEST, dtype)):
        raise ValueError(f"width is {given}; it must be at least {NARROWEST}.")
    width = jnp.where(width < NARROWEST, jnp.asarray(NARROWEST, dtype), width)
    widths = jnp.broadcast_to(width, (num_heads,)) if width.ndim == 0 else width

    def score(queries: Float[Array, "B t N H"], keys: Float[Array, "B s K H"]) -> Float[Array, "B N t s"]:
        batch_size, num_queries, _, head_dim = queries.shape
        num_kv_heads = keys.shape[2]
        queries = queries.astype(dtype).reshape(batch_size, num_queries, num_kv_heads, -1, 1, head_dim)
        queries = queries.transpose(0, 2, 3, 1, 4, 5)
        keys = keys.astype(dtype).swapaxes(1, 2)[:, :, None, None]
        # Widths before squares, and no distance whose square or its derivative would overflow.
        by_head = widths.reshape(1, num_kv_heads, -1, 1, 1, 1)
        fixed = lax.stop_gradient(by_head)
        reach = jnp.minimum(fixed * FARTHEST, jnp.finfo(dtype).max)
        # The factor is 1, and carries the derivatives to the width without its square.
        apart = jnp.clip(queries - keys, -reach, reach) / fixed * jnp.exp(jnp.log(fixed) - jnp.log(by_head))
        return logarithm(jnp.square(apart).sum(-1).reshape(batch_size, num_heads, num_queries, -1))

    return score


def _check_leave_one_out(leave_one_out: bool, terms: Terms) -> None:
    if check_flag(leave_one_out, "leave_one_out") and terms.num_queries != terms.num_keys:
        raise ValueError(
            f"leave_one_out with {terms.num_queries} queries over {terms.num_keys} keys: it hides the key at the "
            "query's own position, so queries and keys must be the same tokens."
        )
