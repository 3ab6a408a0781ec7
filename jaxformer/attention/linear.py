"""Linear attention: weights that are products of features, so that the sum over keys is taken once for all queries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.feature_state import FeatureKernel
from jaxformer.attention.inputs import check_key_mask, check_query_key, check_value, hide_missing
from jaxformer.attention.linear_chunks import (
    CHUNK_SIZE,
    attend_features,
    check_form,
    check_runs,
    check_sizes,
    feature_weights,
)
from jaxformer.functional import FEATURE_MAPS, compute_dtype


def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    feature_map: str | Callable = "elu",
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Linear attention: each query sees every key it may, O(T + S) time, O(T + S) memory.

    phi(query) (sum of phi(key) valueᵀ) / (phi(query) sum of phi(key)), over all keys or, causal, over those up to the
    query itself: the products of softmax(query keyᵀ) value in another order, which a softmax does not allow. To prefer
    for long sequences and for decoding with a state of constant size; it is not an approximation of softmax attention
    and looks things up less sharply.
    Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
    arXiv:2006.16236, equations 5 and 9. The backward pass recomputes each chunk in place of the paper's two running
    sums, and nothing is added to the denominator: where it is not positive the output is zero.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K.
      value: floating [B, S, K, Hv].
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing.
      causal: hide keys after the query, the queries being the last T of the S keys.
      query_segments, key_segments: int [B or 1, T] and [B or 1, S]: tokens see each other within a run of equal
        segments, as the state is kept for the running segment alone; a number that comes again is another segment.
        Queries are the same tokens as the last T keys (a query with another segment than its key sees nothing). One
        alone serves both if T = S.
      feature_map: phi, "elu", "relu", "softplus", or a function of [.., H] to [.., F]; static. Its results
        should not be negative: weights may be negative then, and a query whose weights sum to 0 or less gets zeros.
      form: "quadratic" (all pairs, O(T S) time and memory), "chunked" (a scan over chunks) or "recurrent" (a scan over
        tokens, whose backward pass keeps a state for each token). All mean the same; where not causal the last two are
        one sum. The default is "quadratic" up to chunk_size keys or chunk_size / 8 queries, "chunked" beyond.
      chunk_size: tokens per step of the "chunked" form.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; causal with T > S; segments with T != S that are not causal; an
        unknown feature map or form.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.attention import linear_attention
        >>> query = key = jnp.zeros((1, 3, 1, 2))  # all keys alike: outputs are means of what is seen
        >>> value = jnp.array([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> linear_attention(query, key, value, causal=True).ravel().tolist()
        [0.0, 1.5, 3.0]
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    kernel = linear_kernel(feature_map, query.shape[3])
    return attend_kernel(kernel, query, key, value, key_mask, causal, query_segments, key_segments, form, chunk_size)


def linear_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    feature_map: str | Callable = "elu",
) -> Float[Array, "B N T S"]:
    """The weights that `linear_attention` gives each value: O(T S) time and memory.

    phi(query) phi(key) over its sum on the visible keys. For plots and tests.
    Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, equation 3.

    Args:
      query, key, key_mask, causal, query_segments, key_segments, feature_map: as in `linear_attention`.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries): rows that sum to 1, or zeros for a query that sees no key.

    Raises:
      ValueError: as `linear_attention`.
    """
    query, key = check_query_key(query, key)
    kernel = linear_kernel(feature_map, query.shape[3])
    return weigh_kernel(kernel, query, key, key_mask, causal, query_segments, key_segments)


def attend_kernel(
    kernel: FeatureKernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    key_mask: ArrayLike | None,
    causal: bool,
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
    form: str | None,
    chunk_size: int,
) -> Float[Array, "B T N Hv"]:
    """Attention by any kernel of features; checks the arguments that all such kinds share."""
    batch_size, num_queries, num_keys = len(query), query.shape[1], key.shape[1]
    check_form(form, chunk_size)
    check_sizes(num_queries, num_keys, causal)
    key_mask = check_key_mask(key_mask, batch_size, num_keys)
    runs, own = check_runs(query_segments, key_segments, batch_size, num_queries, num_keys, causal)
    key, value = hide_missing(key, key_mask), hide_missing(value, key_mask)
    output = attend_features(kernel, query, key, value, key_mask, bool(causal), runs, form, chunk_size)
    return hide_missing(output, own)


def weigh_kernel(
    kernel: FeatureKernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    key_mask: ArrayLike | None,
    causal: bool,
    query_segments: ArrayLike | None,
    key_segments: ArrayLike | None,
) -> Float[Array, "B N T S"]:
    """The weights of `attend_kernel`."""
    batch_size, num_queries, num_keys = len(query), query.shape[1], key.shape[1]
    check_sizes(num_queries, num_keys, causal)
    key_mask = check_key_mask(key_mask, batch_size, num_keys)
    runs, own = check_runs(query_segments, key_segments, batch_size, num_queries, num_keys, causal)
    weights = feature_weights(kernel, query, hide_missing(key, key_mask), key_mask, bool(causal), runs)
    return weights if own is None else _hide_rows(weights, own)


def linear_kernel(feature_map: str | Callable, head_dim: int) -> FeatureKernel:
    """phi of queries and keys, divided by its largest entry, which is the key's weight."""
    apply, _ = check_feature_map(feature_map, head_dim, jnp.float32)

    def features(array: Array) -> tuple[Array, Array]:
        made = apply(array.astype(compute_dtype(array.dtype)))
        # The divisor cancels in the query, and with the log weight in the key: a constant for every derivative.
        highest = lax.stop_gradient(jnp.maximum(jnp.abs(made).max(-1), jnp.finfo(made.dtype).tiny))
        return made / highest[..., None], jnp.log(highest)

    return FeatureKernel(query=lambda query: features(query)[0], key=features)


def check_feature_map(feature_map: str | Callable, head_dim: int, dtype: DTypeLike) -> tuple[Callable, int]:
    """The function and its number of features F, refused unless it maps [.., H] to [.., F]."""
    if isinstance(feature_map, str) and feature_map in FEATURE_MAPS:
        feature_map = FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        raise ValueError(f"feature_map is {feature_map!r}; it must be a function or one of {sorted(FEATURE_MAPS)}.")
    made = jax.eval_shape(feature_map, jax.ShapeDtypeStruct((3, head_dim), compute_dtype(dtype)))
    if made.ndim != 2 or made.shape[0] != 3 or made.shape[1] == 0 or made.dtype != compute_dtype(dtype):
        raise ValueError(
            f"feature_map makes {made.dtype} {made.shape} of (3, {head_dim}); only the last axis may change its size."
        )
    return feature_map, made.shape[1]


def _hide_rows(weights: Float[Array, "B N T S"], seen: Bool[Array, "#B T"]) -> Float[Array, "B N T S"]:
    return jnp.where(seen[:, None, :, None], weights, 0.0)
