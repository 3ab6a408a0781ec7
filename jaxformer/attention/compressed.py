"""Memory-compressed attention: keys and values are pooled over windows, the newest tokens stay as they are."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.attention.compressed_pool import Windows, check_kernel, pool, take_blocks
from jaxformer.attention.inputs import (
    check_key_mask,
    check_query_key,
    check_scale,
    check_value,
    hide_missing,
    scale_query,
)
from jaxformer.attention.products import einsum
from jaxformer.functional import compute_dtype, masked_softmax


def compressed_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    stride: int,
    window_size: int | None = None,
    key_kernel: ArrayLike | None = None,
    value_kernel: ArrayLike | None = None,
    recent: bool = True,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B T N Hv"]:
    """Memory-compressed attention: each query sees one pooled key per `stride` tokens, O(T S / stride) time and memory.

    softmax(scale * query slot_keyᵀ) slot_value, where slot c pools the positions c stride .. c stride + window_size - 1
    by a strided convolution, or by the mean of the tokens that exist. For long contexts where the distant past may be
    coarse.
    Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198, section 4.2.3 (there a
    convolution of stride and window 3).

    Causal: a slot holds its whole window, so a query sees it only when no token of the window is later. With `recent`
    the slots end before the query, and the tokens since the end of the last one, up to the query itself, are seen as
    they are, in the same softmax: at most window_size of them (not in the paper, where a query misses what its own
    window holds). Without it slots may end at the query, and the first window_size - 1 queries see nothing. What a
    query sees depends on its position alone. Both ways, every slot is seen, the last windows being cut at the end.

    Args:
      query: floating [B, T, N, H].
      key: [B, S, K, H] in query.dtype, N being a multiple of K. Causal: the queries are the last T of the S positions.
      value: floating [B, S, K, Hv].
      stride: tokens from one window to the next.
      window_size: tokens of a window, at least `stride`, which is the default.
      key_kernel: floating weights of the convolution of keys: [window_size] (one for all channels), [window_size, H]
        (one a channel) or [window_size, K, H, H] (input channels to output channels in each head); None = the mean of
        the window's tokens that exist.
      value_kernel: the same for values, with Hv.
      recent: causal queries see the tokens that no visible slot covers.
      key_mask: bool or 0/1 int [B or 1, S], True = the key exists. What key and value hold elsewhere, NaN included,
        changes nothing: convolutions see zeros there. A window without any key is not seen.
      causal: hide what is later than the query.
      scale: factor on the logits; 1 / sqrt(H) by default.

    Returns:
      [B, T, N, Hv] in value.dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes that do not fit; a stride below 1 or a window_size below the stride; T > S if causal.
    """
    query, key = check_query_key(query, key)
    value = check_value(value, key)
    windows = Windows.checked(stride, window_size, recent, causal)
    key_kernel = check_kernel(key_kernel, "key_kernel", windows, *key.shape[2:])
    value_kernel = check_kernel(value_kernel, "value_kernel", windows, *value.shape[2:])
    key_mask = _check_tokens(key_mask, query, key, windows)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    weights, near_weights = _weights(query, hide_missing(key, key_mask), key_kernel, key_mask, windows)
    value = hide_missing(value, key_mask)
    slots, _ = pool(value, value_kernel, key_mask, windows)
    output = einsum("bkgntc,bckv->bntkgv", weights.astype(slots.dtype), slots, slots.dtype)
    near = _near(value, query.shape[1], windows)
    output = output + einsum("bkgntr,bnrkv->bntkgv", near_weights.astype(value.dtype), near, slots.dtype)
    return _ungroup(output, query.shape[1], key.shape[1], windows).astype(value.dtype)


def compressed_attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    stride: int,
    window_size: int | None = None,
    key_kernel: ArrayLike | None = None,
    value_kernel: ArrayLike | None = None,
    recent: bool = True,
    key_mask: ArrayLike | None = None,
    causal: bool = False,
    scale: ArrayLike | None = None,
) -> Float[Array, "B N T S"]:
    """The factor that `compressed_attention` gives each value: O(T S) memory.

    A slot's weight is spread over its window's tokens: evenly for means, by the weights of `value_kernel` otherwise.
    For plots and tests.
    Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198, section 4.2.3.

    Args:
      query, key, stride, window_size, key_kernel, recent, key_mask, causal, scale: as in `compressed_attention`.
      value_kernel: None or [window_size]: other kernels treat channels differently, so that no one matrix exists.

    Returns:
      float32 [B, N, T, S] (float64 for float64 queries). With means, rows that sum to 1, or zeros for a query that sees
      no key.

    Raises:
      ValueError: as `compressed_attention`, and a value_kernel with channels.
    """
    query, key = check_query_key(query, key)
    windows = Windows.checked(stride, window_size, recent, causal)
    key_kernel = check_kernel(key_kernel, "key_kernel", windows, *key.shape[2:])
    if value_kernel is not None and jnp.ndim(value_kernel) > 1:
        raise ValueError("value_kernel treats channels differently, so that no one matrix of weights exists.")
    value_kernel = check_kernel(value_kernel, "value_kernel", windows, *key.shape[2:])
    key_mask = _check_tokens(key_mask, query, key, windows)
    query = scale_query(query, check_scale(scale, query.shape[3]))
    weights, near_weights = _weights(query, hide_missing(key, key_mask), key_kernel, key_mask, windows)
    # Pooling the tokens' own unit vectors tells what each slot is made of.
    num_keys = key.shape[1]
    units = jnp.eye(num_keys, dtype=weights.dtype)[None, :, None, :]
    if key_mask is not None:
        units = jnp.where(key_mask[:, :, None, None], units, jnp.zeros((), units.dtype))
    spread, _ = pool(units, value_kernel, key_mask, windows)
    spread = jnp.broadcast_to(spread, (key.shape[0], *spread.shape[1:]))
    result = einsum("bkgntc,bcs->bntkgs", weights, spread[:, :, 0], weights.dtype)
    near = _near(jnp.eye(num_keys, dtype=weights.dtype)[None, :, None, :], query.shape[1], windows)
    result = result + einsum("bkgntr,nrs->bntkgs", near_weights, near[0, :, :, 0], weights.dtype)
    return _ungroup(result, query.shape[1], num_keys, windows).swapaxes(1, 2)


def _check_tokens(
    key_mask: ArrayLike | None, query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], windows: Windows
) -> Bool[Array, "#B S"] | None:
    num_queries, num_keys = query.shape[1], key.shape[1]
    if windows.causal and num_queries > num_keys:
        raise ValueError(
            f"{num_queries} queries over {num_keys} keys: causal queries are the last of the keys, so there can be no "
            "more of them."
        )
    return check_key_mask(key_mask, key.shape[0], num_keys)


def _weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    key_kernel: Float[Array, "..."] | None,
    key_mask: Bool[Array, "#B S"] | None,
    windows: Windows,
) -> tuple[Float[Array, "B K G n t C"], Float[Array, "B K G n t R"]]:
    """Weights of the slots and of the recent tokens, for the queries in n blocks of t."""
    num_queries, num_keys, num_kv_heads = query.shape[1], *key.shape[1:3]
    dtype = compute_dtype(query.dtype)
    slots, exists = pool(key, key_kernel, key_mask, windows)
    first, num_blocks, block = windows.query_blocks(num_queries, num_keys)
    query = take_blocks(query, first - (num_keys - num_queries), num_blocks, block, block).astype(dtype)
    query = query.reshape(*query.shape[:3], num_kv_heads, query.shape[3] // num_kv_heads, query.shape[4])
    near = _near(key, num_queries, windows).astype(dtype)
    logits = jnp.concatenate(
        [
            einsum("bntkgh,bckh->bkgntc", query, slots, dtype),
            einsum("bntkgh,bnrkh->bkgntr", query, near, dtype),
        ],
        -1,
    )
    positions = first + jnp.arange(num_blocks * block, dtype=jnp.int32).reshape(1, num_blocks, block)
    all_keys = jnp.ones((1, num_keys), bool) if key_mask is None else key_mask
    near_exists = _near(all_keys, num_queries, windows)
    near_positions = _near(jnp.arange(num_keys, dtype=jnp.int32)[None], num_queries, windows)
    seen = jnp.concatenate(
        [
            windows.sees_slot(positions, slots.shape[1]) & exists[:, None, None],
            windows.sees_token(positions[..., None], near_positions[:, :, None]) & near_exists[:, :, None],
        ],
        -1,
    )
    weights = masked_softmax(logits, seen[:, None, None])
    return weights[..., : slots.shape[1]], weights[..., slots.shape[1] :]


def _near(array: Array, num_queries: int, windows: Windows) -> Array:
    """[B, n, R, ..]: of each block of queries the keys that may be recent."""
    first, num_blocks, block = windows.query_blocks(num_queries, array.shape[1])
    return take_blocks(array, first - windows.reach, num_blocks, block, windows.reach + block if windows.near else 0)


def _ungroup(
    output: Float[Array, "B n t K G V"], num_queries: int, num_keys: int, windows: Windows
) -> Float[Array, "B T N V"]:
    """The queries in one row again, without what fills the blocks up before and after them."""
    batch_size, num_blocks, block, num_kv_heads, group, size = output.shape
    output = output.reshape(batch_size, num_blocks * block, num_kv_heads * group, size)
    before = num_keys - num_queries - windows.query_blocks(num_queries, num_keys)[0]
    return output[:, before : before + num_queries]
