"""Masks from lengths, positions and segments. True means: may attend. All compare positions, never indices."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxformer.functional.checks import as_integers, token_pairs


def as_mask(mask: ArrayLike, name: str = "mask") -> Bool[Array, "..."]:
    """A mask as booleans: True, or a non-zero integer, means that the entry counts.

    Args:
      mask: bool or integer, any shape; 0 hides, and any other number, commonly 1, shows.
      name: what the caller calls it, for the error message.

    Returns:
      bool array of the same shape.

    Raises:
      ValueError: the mask is no array, floating (an additive mask belongs in a bias) or complex.
    """
    try:
        mask = jnp.asarray(mask)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {mask!r}; it must be an array of bool or 0/1 integers.") from None
    if mask.dtype == jnp.bool_:
        return mask
    if not jnp.issubdtype(mask.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {mask.dtype} {mask.shape}; it must be bool or 0/1 integers (True = may attend). "
            "Additive values (0 and -inf) go into a bias."
        )
    return mask != 0


def mask_from_lengths(lengths: ArrayLike, max_length: int) -> Bool[Array, "..."]:
    """Marks the first `length` of `max_length` entries: one length per example, or one per query.

    Args:
      lengths: int [B] (tokens per example) or [B, T] (keys that each query may see); any further axes work alike.
        A length of 0 or less marks nothing, one above max_length marks everything.
      max_length: S, the number of entries (tokens), at least 0.

    Returns:
      bool [B, S] or [B, T, S]: True at entry s where s < length.

    Raises:
      ValueError: lengths are not integers, or max_length is negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import mask_from_lengths
        >>> mask_from_lengths(jnp.array([2, 0]), 3).tolist()
        [[True, True, False], [False, False, False]]
    """
    lengths = as_integers(lengths, "lengths")
    if max_length < 0:
        raise ValueError(f"max_length is {max_length}; it must be at least 0 tokens.")
    entries = jnp.arange(max_length, dtype=jnp.int32).reshape((1,) * lengths.ndim + (max_length,))
    return entries < lengths[..., None]


def causal_mask(query_positions: ArrayLike, key_positions: ArrayLike) -> Bool[Array, "B 1 T S"]:
    """Each query sees the keys at its own position and before it.

    Args:
      query_positions: int [B, T] or [1, T], position of each query in its sequence (tokens).
      key_positions: int [B, S] or [1, S], position of each key.

    Returns:
      bool [B, 1, T, S]: True where key position <= query position.

    Raises:
      ValueError: not integers, not of rank 2, or batch sizes that differ (neither being 1).

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import causal_mask
        >>> keys = jnp.arange(4)[None]
        >>> causal_mask(keys[:, 2:], keys)[0, 0].tolist()  # the last two of four
        [[True, True, True, False], [True, True, True, True]]
    """
    queries, keys = token_pairs(query_positions, key_positions, "positions")
    return _causal(queries, keys)


def segment_mask(query_segments: ArrayLike, key_segments: ArrayLike) -> Bool[Array, "B 1 T S"]:
    """Each query sees the keys of its own segment, so that documents packed into one row never see each other.

    Equality is all: padding, usually numbered 0, is one more segment that no real token sees.

    Args:
      query_segments: int [B, T] or [1, T], number of the document that each query belongs to.
      key_segments: int [B, S] or [1, S].

    Returns:
      bool [B, 1, T, S]: True where the two numbers are equal.

    Raises:
      ValueError: not integers, not of rank 2, or batch sizes that differ (neither being 1).

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import segment_mask
        >>> documents = jnp.array([[1, 1, 2]])
        >>> segment_mask(documents, documents)[0, 0].tolist()
        [[True, True, False], [True, True, False], [False, False, True]]
    """
    queries, keys = token_pairs(query_segments, key_segments, "segments")
    return _same(queries, keys)


def padding_mask(key_mask: ArrayLike) -> Bool[Array, "B 1 1 S"]:
    """Hides padding keys from every head and query.

    Args:
      key_mask: bool or 0/1 int [B, S], True where the key is a real token.

    Returns:
      bool [B, 1, 1, S], ready to broadcast against logits [B, N, T, S].

    Raises:
      ValueError: not of rank 2, or floating.
    """
    key_mask = as_mask(key_mask, "key_mask")
    if key_mask.ndim != 2:
        raise ValueError(f"key_mask has shape {key_mask.shape}; it must be [batch, keys].")
    return key_mask[:, None, None, :]


def combine_masks(*masks: ArrayLike | None) -> Bool[Array, "..."] | None:
    """The masks that all agree on: AND with broadcasting; None stands for "everything is visible".

    Args:
      *masks: bool or 0/1 int arrays of shapes that broadcast against each other, or None.

    Returns:
      bool array of the common shape, or None if every mask is None.

    Raises:
      ValueError: the shapes do not broadcast (all are named), or a mask is floating.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import combine_masks
        >>> combine_masks(jnp.array([True, True]), None, jnp.array([0, 1])).tolist()
        [False, True]
    """
    present = [as_mask(mask) for mask in masks if mask is not None]
    if not present:
        return None
    shapes = [mask.shape for mask in present]
    try:
        rank = len(np.broadcast_shapes(*shapes))
    except ValueError:
        raise ValueError(
            f"masks of shapes {', '.join(map(str, shapes))} do not broadcast against each other."
        ) from None
    combined, *others = [mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in present]
    for mask in others:
        combined = jnp.logical_and(combined, mask)
    return combined


def _causal(query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]) -> Bool[Array, "B 1 T S"]:
    return key_positions[:, None, None, :] <= query_positions[:, None, :, None]


def _same(query_segments: Int[Array, "#B T"], key_segments: Int[Array, "#B S"]) -> Bool[Array, "B 1 T S"]:
    return key_segments[:, None, None, :] == query_segments[:, None, :, None]
