"""Bytes that attention moves beside the cores at least: its inputs and outputs, and the cache, once each."""

from typing import Any

import jax

from jaxformer.analysis.model_costs.phases import Inputs
from jaxformer.models import TransformerConfig


def array_bytes(tree: Any) -> int:
    """Memory of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def attention_traffic(config: TransformerConfig, inputs: Inputs, cache: Any) -> dict[str, int]:
    """Bytes by phase, as a kernel moves them that keeps its logits in the core.

    Forward: queries, keys, values and outputs. Backward: these with the output's gradient read, three gradients
    written: twice as much. Prefill: as forward, and the cache written. Decode: the whole cache read, and one token's.

    Args:
      config: the model's.
      inputs: sizes.
      cache: shapes of the decoding cache; None = the model does not generate.
    """
    rows, length, source = inputs.batch_size, inputs.length, inputs.source_length
    encoder = 0
    if source is not None:
        side = config.encoder_side
        encoder = side.num_layers * _arrays(side, rows, source, source)

    def decoder(queries: int, keys: int) -> int:
        own = _arrays(config, rows, queries, keys)
        if source is not None:
            own += _arrays(config, rows, queries, source)
        return config.num_layers * own

    forward = encoder + decoder(length, length)
    phases = {"forward": forward, "backward": 2 * forward}
    if cache is not None:
        kept = array_bytes(cache)
        prompt = decoder(length, length) if source is None else encoder + decoder(1, 1)
        phases |= {"prefill": prompt + kept, "decode": config.num_layers * _arrays(config, rows, 1, 1) + kept}
    return phases


def _arrays(config: TransformerConfig, rows: int, queries: int, keys: int) -> int:
    heads = queries * config.num_heads + keys * config.kv_heads
    return 2 * rows * heads * config.width_of_head * config.compute_dtype.itemsize
