"""How generation runs a model: logits of the next token from new tokens and a cache, whatever the model is.

A model that generates has ``config.vocab_size``, ``init_cache(batch_size, max_length)`` and ``apply(variables, tokens,
positions=, key_mask=, cache=, select=)`` returning ``.logits`` and ``.aux.cache``. Caches are pytrees that only the
model looks into: keys and values, with an encoder's output beside them, or a recurrent state.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.models import Transformer, unstack_layers
from jaxformer.models.position_settings import TABLES


def next_logits(
    model: nn.Module,
    variables: Any,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"],
    cache: Any,
    key_mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Any]:
    """Feed T tokens a row and return the logits of what follows the last one, and the new cache.

    Args:
      model: see above.
      variables: its parameters and other collections.
      tokens: int [B, T]; in column T - 1 every row has a real token.
      positions: int [B, T], in tokens from each row's first real one.
      cache: of the tokens so far.
      key_mask: bool [B, T], True = the token exists.

    Returns:
      Logits float32 [B, vocab_size] and the cache.
    """
    last = jnp.full((tokens.shape[0], 1), tokens.shape[1] - 1, jnp.int32)
    out: Any = model.apply(variables, tokens, positions=positions, key_mask=key_mask, cache=cache, select=last)
    return out.logits[:, 0].astype(jnp.float32), out.aux.cache


def left_padded_positions(
    lengths: Int[Array, "B"], width: int
) -> tuple[Int[Array, "B {width}"], Bool[Array, "B {width}"]]:
    """Positions 0, 1, … of rows that stand at the right end of ``width`` columns, and which columns hold a token."""
    positions = jnp.arange(width, dtype=jnp.int32)[None] - (width - lengths[:, None])
    return jnp.maximum(positions, 0), positions >= 0


def position_limit(model: nn.Module) -> int | None:
    """How many positions the model has; None where it computes them."""
    if isinstance(model, Transformer) and model.config.positions in TABLES:
        return model.config.max_length
    return None


def for_single_tokens(model: nn.Module, variables: Any, batch_size: int) -> tuple[nn.Module, Any]:
    """The same function arranged for one token a row at a time, which is bound by reading the weights.

    A scan over layers copies each layer's slice of the stacked weights before it is used; separate arrays are read
    where they lie. On CPUs a single row reads a tied output head faster from a transposed copy. Both are made once,
    and take the memory of what they copy. Steps end where all tokens have halted.

    Args:
      model: a model.
      variables: its parameters and other collections.
      batch_size: rows.

    Returns:
      A model and its variables; a model that is no ``Transformer`` comes back as it is.
    """
    if not isinstance(model, Transformer):
        return model, variables
    changes: dict[str, Any] = {}
    if model.config.scan_layers and model.config.stack == "plain":
        changes["scan_layers"] = False
    if model.config.tie_embeddings and batch_size == 1 and jax.default_backend() == "cpu":
        changes |= {"tie_embeddings": False, "scale_logits": False}
    if model.config.halting == "act":
        changes["early_exit"] = True
    if not changes:
        return model, variables
    arranged = model.clone(config=dataclasses.replace(model.config, **changes))
    periods = [("decoder", len(model.config.attentions))]
    if model.config.architecture == "encoder_decoder":
        periods.append(("encoder", len(model.config.encoder_side.attentions)))
    scale = model.config.embed_dim**-0.5 if model.config.scale_logits else None
    return arranged, _arrange(tuple(changes), tuple(periods), scale, variables)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _arrange(
    changes: tuple[str, ...], periods: tuple[tuple[str, int], ...], scale: float | None, variables: Any
) -> Any:
    """Variables of a model in which the named fields have been changed; ``scale`` goes into an untied head."""
    if "scan_layers" in changes:
        by_side = dict(periods)
        variables = {
            name: {side: unstack_layers(part, by_side.get(side, 1)) for side, part in tree.items()}
            for name, tree in variables.items()
        }
    if "tie_embeddings" in changes:
        params = variables["params"]
        kernel = params["token_embedding"]["embedding"].T
        head = {"kernel": kernel if scale is None else kernel * scale}
        variables = {**variables, "params": {**params, "output_head": head}}
    return variables
