"""More tokens for a model that exists: its table and head get rows, and what it knows stays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.interop.trees import flatten, unflatten
from jaxformer.models import TaskModel, Transformer

# Parameters with an entry for each token, and the axis of it.
_TABLES = {"token_embedding/embedding": 0, "output_head/kernel": 1, "head_bias/bias": 0}


def resize_vocabulary(
    model: Transformer | TaskModel, params: Mapping[str, Any], vocab_size: int, *, rng: jax.Array
) -> tuple[Transformer | TaskModel, dict[str, Any]]:
    """A model for more tokens, such as a mask or sentinels behind those that a checkpoint knows.

    Args:
      model: whose source tokens, if any, share the table.
      params: its parameters. Entries of the old tokens stay as they are; a tied head stays tied.
      vocab_size: tokens of the new model, at least those of the old.
      rng: key of the new entries: normal, with the mean and the deviation of the old ones. New biases are 0.

    Returns:
      The model and its parameters.

    Raises:
      ValueError: fewer tokens, or a table of the source's own.
    """
    config = model.config
    if vocab_size < config.vocab_size:
        raise ValueError(f"vocab_size={vocab_size} must be at least that of the model, {config.vocab_size}")
    if not config.share_embeddings:
        raise ValueError("share_embeddings=False: the source's tokens have a table of their own, which stays small")
    resized = dataclasses.replace(config, vocab_size=vocab_size)
    flat = flatten(params)
    for number, (path, axis) in enumerate(_TABLES.items()):
        if path in flat:
            key = jax.random.fold_in(rng, number)
            known = jax.lax.slice_in_dim(jnp.asarray(flat[path]), 0, config.vocab_size, axis=axis)
            flat[path] = _extend(known, resized.vocab_rows, axis, key)
    return model.clone(config=resized), unflatten(flat)


def _extend(array: jax.Array, size: int, axis: int, rng: jax.Array) -> jax.Array:
    shape = list(array.shape)
    shape[axis] = size - shape[axis]
    if array.ndim == 1:
        new = jnp.zeros(shape, array.dtype)
    else:
        wide = array.astype(jnp.float32)
        mean, spread = wide.mean(axis, keepdims=True), wide.std(axis, keepdims=True)
        new = (mean + spread * jax.random.normal(rng, shape)).astype(array.dtype)
    return jnp.concatenate([array, new], axis)
