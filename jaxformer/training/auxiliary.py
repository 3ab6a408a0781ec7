"""Auxiliary losses of language models: of intermediate layers, of several future tokens, of last positions alone.

Al-Rfou et al. 2018, "Character-Level Language Modeling with Deeper Self-Attention", arXiv:1808.04444, section 2. All
are sums over supervised tokens, so that micro-batches and devices add up, and all are of training only.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional import CrossEntropy, chunked_cross_entropy

IGNORED = -100
"""Target of a token without supervision."""
SUPERVISED_POSITIONS = ("all", "last")


def vanishing_weights(num_layers: int, step: Int[Array, ""] | int, steps: int) -> Float[Array, "layers"]:
    """Weights of the layers' losses: of layer l of n, max(0, 1 - (step / steps) / (l / 2n)); 0 of the last layer.

    So lower layers fall faster, layer l contributes nothing from l / 2n of training on, and no intermediate layer after
    half of it (section 2.2 of the paper, which gives the ends but not the form of the fall: it is linear here). The
    last layer's loss is the main one.

    Args:
      num_layers: layers [n].
      step: updates made so far.
      steps: updates of the whole training.

    Returns:
      float32 [num_layers], of layers 1 to n.
    """
    # Whole numbers decide where a layer ends: quotients in float32 can miss it by a step.
    layers = np.arange(1, num_layers + 1)
    ends = layers * steps / (2 * num_layers)
    counts = jnp.asarray(step) < jnp.asarray(np.ceil(ends), jnp.int32)
    weights = jnp.where(counts, 1.0 - jnp.asarray(step, jnp.float32) / jnp.asarray(ends, jnp.float32), 0.0)
    return weights.at[-1].set(0.0)


def future_targets(
    targets: Int[Array, "B L"], offset: int, segments: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
    """Targets ``offset`` tokens later: what position t + offset of the same row and segment predicts, else -100.

    Args:
      targets: next tokens, -100 where not supervised.
      offset: further tokens, at least 1: 1 gives the token after the next.
      segments: documents of packed rows; a target is of the position's own document.
    """

    def later(rows: Array, fill: int) -> Array:
        kept = rows[:, offset:]
        return jnp.pad(kept, ((0, 0), (0, rows.shape[1] - kept.shape[1])), constant_values=fill)

    moved = later(targets, IGNORED)
    return moved if segments is None else jnp.where(later(segments, -1) == segments, moved, IGNORED)


def last_targets(targets: Int[Array, "B L"], segments: Int[Array, "B L"] | None = None) -> Int[Array, "B L"]:
    """Targets of the last supervised position of each row, or of each document of a packed row; -100 elsewhere.

    Args:
      targets: next tokens, -100 where not supervised.
      segments: documents of packed rows, each in one piece.
    """
    length = targets.shape[1]
    indices = jnp.where(targets != IGNORED, jnp.arange(length, dtype=jnp.int32), length)
    # Of each position the next supervised one, or the row's length.
    following = jnp.pad(jax.lax.cummin(indices, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    last = following == length
    if segments is not None:
        other = jnp.take_along_axis(segments, jnp.minimum(following, length - 1), axis=1) != segments
        last = last | other
    return jnp.where(last, targets, IGNORED)


def token_loss(sums: CrossEntropy) -> Float[Array, ""]:
    """The loss to differentiate, z-loss included."""
    return sums.loss_sum + sums.z_loss_sum


def auxiliary_sums(
    model: nn.Module,
    params: Any,
    batch: Any,
    *,
    chunk_size: int | None,
    options: dict[str, Any],
) -> Callable[..., tuple[CrossEntropy, ...]]:
    """Builds ``sums(hidden, first) -> (CrossEntropy, …)`` of hidden states, one for each token that they predict.

    Args:
      model: with the methods ``head_kernel`` and ``future_kernels``.
      params: its parameters.
      batch: ``targets`` [B, L], and where there are any ``segments`` [B, L].
      chunk_size: tokens whose logits exist at once; None = all.
      options: label smoothing and z-loss, of all of them.

    Returns:
      The function. Its second argument is the first token wanted: 0 = the next, 1 = the one after. Logits are computed
      again in the backward pass, so that those of one prediction exist at a time.
    """
    targets, segments = batch["targets"], batch.get("segments")
    options = {"chunk_size": chunk_size or targets.size, "vocab_size": model.config.vocab_size, **options}
    kernels: Any = [model.apply({"params": params}, method="head_kernel")]
    kernels += model.apply({"params": params}, method="future_kernels")
    wanted = [targets, *(future_targets(targets, offset, segments) for offset in range(1, len(kernels)))]

    def sums(hidden: Array, first: int = 0) -> tuple[CrossEntropy, ...]:
        pairs = zip(kernels[first:], wanted[first:])
        return tuple(chunked_cross_entropy(hidden, kernel, labels, **options) for kernel, labels in pairs)

    return sums


def make_readout(
    sums: Callable[..., tuple[CrossEntropy, ...]], weights: Float[Array, "layers"], future_weight: float
) -> Callable[[Array, Array], dict[str, Array]]:
    """Builds ``readout(layer, hidden)``, which a stack calls with the number and the output of each of its layers.

    Args:
      sums: from ``auxiliary_sums``.
      weights: of the layers; where it is 0 nothing is computed.
      future_weight: weight of each further token of a layer's predictions.

    Returns:
      The function; it returns ``loss`` (weighted, to differentiate), ``cross_entropy`` (of the next token, summed over
      tokens), ``tokens`` (how many stand behind it) and ``layers`` (1 where the layer counts), float32 scalars.
    """

    def contribute(hidden: Array, weight: Array) -> dict[str, Array]:
        main, *further = sums(hidden)
        loss = token_loss(main) + future_weight * sum((token_loss(one) for one in further), jnp.zeros(()))
        found = {"loss": weight * loss, "cross_entropy": main.loss_sum, "tokens": main.weight_sum}
        return {name: value.astype(jnp.float32) for name, value in found.items()} | {"layers": jnp.ones(())}

    def nothing(hidden: Array, weight: Array) -> dict[str, Array]:
        return {name: jnp.zeros(()) for name in ("loss", "cross_entropy", "tokens", "layers")}

    def readout(layer: Array, hidden: Array) -> dict[str, Array]:
        weight = weights[layer]
        return jax.lax.cond(weight > 0, contribute, nothing, hidden, weight)

    return readout
