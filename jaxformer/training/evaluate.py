"""Evaluation: loss, perplexity and bits per byte or dimension over all tokens exactly once."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxformer.training.sharding import data_shard, shard_batch

EvalStep = Callable[[Any, Any, Mapping[str, Any]], dict[str, jax.Array]]


def evaluate(
    eval_step: EvalStep,
    params: Any,
    model_state: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    bits_per: Mapping[str, int],
) -> dict[str, float]:
    """Evaluates over all supervised tokens of some batches, each once; a mean over tokens, never over batches.

    Args:
      eval_step: jitted, from `make_eval_step`.
      params: the parameters.
      model_state: the model's other variables.
      batches: this process's part of each batch, all of one shape; what only fills up has target -100.
      mesh: the mesh.
      bits_per: what the bits of all these tokens are divided by, by the figure's name: ``bits_per_byte``, the bytes of
        the text.

    Returns:
      loss (nats per token), perplexity, the figures of ``bits_per``, tokens (how many), and the objective's own means.

    Raises:
      ValueError: there is no supervised token.
    """
    sums: dict[str, float] = {}
    for batch in batches:
        for name, value in jax.device_get(eval_step(params, model_state, shard_batch(batch, mesh))).items():
            sums[name] = sums.get(name, 0.0) + float(value)  # in Python, so in float64
    return figures_of(sums, bits_per)


def figures_of(sums: dict[str, float], bits_per: Mapping[str, int]) -> dict[str, float]:
    """The figures of `evaluate` from the evaluation step's sums over all batches.

    Raises:
      ValueError: there is no supervised token.
    """
    sums = dict(sums)
    if not sums.get("weight_sum"):
        raise ValueError("the evaluation data hold no token to predict")
    loss_sum, tokens = sums.pop("loss_sum"), sums.pop("weight_sum")
    loss = loss_sum / tokens
    means = {
        name.removesuffix("_sum"): total / max(sums[f"{name.removesuffix('_sum')}_count"], 1.0)
        for name, total in sums.items()
        if name.endswith("_sum")
    }
    perplexity = math.exp(loss) if loss < 700.0 else math.inf
    bits = {name: loss_sum / math.log(2.0) / count for name, count in bits_per.items()}
    return {"loss": loss, "perplexity": perplexity, **bits, "tokens": int(tokens), **means}


def batches_of(rows: Any, config: ConfigDict, mesh: Mesh) -> Iterable[Mapping[str, np.ndarray]]:
    """This process's part of all rows once, in batches of one shape."""
    from jaxformer.data import eval_batches

    index, count = data_shard(mesh)
    return eval_batches(rows, batch_size=config.eval.batch_size, process_index=index, process_count=count)
