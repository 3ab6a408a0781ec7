"""Sources of an encoder-decoder: texts of unequal length as one padded array, and caches that begin with them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxformer.inference.prompts import bucket, check_rows
from jaxformer.models import Transformer
from jaxformer.models.source_settings import source_limit


class SourceBatch(NamedTuple):
    """What the encoder reads, padded at the right.

    Attributes:
      tokens: int32 [B, S], 0 in the padding.
      mask: bool [B, S], True = the token exists.
    """

    tokens: Int[np.ndarray | Array, "B S"]
    mask: Bool[np.ndarray | Array, "B S"]


def has_encoder(model: nn.Module) -> bool:
    """Whether a model (``jaxformer.models``) generates from sources, which an encoder of its own reads."""
    return hasattr(model, "start") and getattr(model.config, "architecture", "encoder_decoder") == "encoder_decoder"


def pad_sources(sources: Iterable[Any] | ArrayLike | None, model: nn.Module, batch_size: int) -> SourceBatch | None:
    """Check sources and put them into one array whose width is one of few.

    Args:
      sources: token ids, one sequence a row, or int [B, S]; None for a model without an encoder.
      model: whose sources they are.
      batch_size: rows of the prompts.

    Returns:
      ``SourceBatch``, or None.

    Raises:
      ValueError: sources where there is no encoder or none where there is one, as many as there are no prompts, an
        empty one, ids out of range, or more tokens than the model has positions.
    """
    if sources is None:
        if has_encoder(model):
            raise ValueError("sources is None; an encoder-decoder needs one for each prompt.")
        return None
    if not has_encoder(model):
        raise ValueError("sources were given, but the model has no separate encoder.")
    vocab_size = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size
    rows = check_rows(sources, "sources", vocab_size)
    if len(rows) != batch_size:
        raise ValueError(f"sources has {len(rows)} rows; it must have {batch_size}, one for each prompt.")
    lengths = np.array([row.size for row in rows])
    limit = source_limit(model.config) if isinstance(model, Transformer) else None
    if limit is not None and lengths.max() > limit:
        row = int(lengths.argmax())
        raise ValueError(f"sources[{row}] has {lengths[row]} tokens; the model has max_length={limit} positions.")
    width = bucket(int(lengths.max()), limit)
    tokens = np.zeros((batch_size, width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : ids.size] = ids
    return SourceBatch(tokens, np.arange(width)[None] < lengths[:, None])


def begin_cache(model: nn.Module, variables: Any, sources: SourceBatch | None, batch_size: int, size: int) -> Any:
    """An empty cache of ``size`` slots a row; with sources, these encoded once."""
    if sources is None:
        return model.init_cache(batch_size, size)
    return model.apply(variables, sources.tokens, size, source_mask=sources.mask, method="start")


def batch_axes(begin: Callable[[int], Any]) -> list[int | None]:
    """Which axis of each leaf of a cache is the batch's; None for a leaf that all rows share.

    Args:
      begin: from a batch size to a cache.
    """

    def axis(one: Any, two: Any) -> int | None:
        differ = [axis for axis, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
        return differ[0] if differ else None

    one, two = (jax.eval_shape(lambda count=count: jax.tree.leaves(begin(count))) for count in (1, 2))
    return [axis(*leaves) for leaves in zip(one, two)]


def by_row(function: Callable[[Array, int], Array], cache: Any, axes: list[int | None]) -> Any:
    """The cache with function(leaf, axis) in place of each leaf that has an axis for the rows."""
    leaves, tree = jax.tree.flatten(cache)
    changed = [leaf if axis is None else function(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(tree, changed)
