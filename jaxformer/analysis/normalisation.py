"""Why sequences have layer norm: how much of a token's normalised value its batch decides, as rows and padding vary.

    print(format_figures(vary_lengths(jax.random.key(0), max_lengths=(4, 16, 64))))

Layer norm reads one token and so is the same in every batch. Batch norm reads the batch. The tokens of a row resemble
each other, so that its statistics are those of a few rows rather than of many tokens: they move from batch to batch,
the more the fewer and the shorter the rows. Where padding is in them, they also move with the share of padding: the
same token is larger in a batch of short rows, and the running averages of evaluation are of no batch's kind.

Shen et al. 2020, "PowerNorm: Rethinking Batch Normalization in Transformers", arXiv:2003.07845, section 3, found such
variation in trained Transformers.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxformer.functional import BatchStatistics, as_mask, batch_norm, batch_statistics, layer_norm, mask_from_lengths


@dataclasses.dataclass(frozen=True)
class NormFigures:
    """How the normalised values of one text change with the batch that it stands in.

    A spread is the standard deviation over batches, the root of its mean square over tokens and features; a drift the
    root mean square of how far the mean over batches is from the value by the statistics of all real tokens of all
    batches, which is what running averages come to. Normalised values are about 1, so both are in parts of their size.

    Attributes:
      max_length: of the rows in tokens.
      real_share: real tokens among all, fraction in [0, 1].
      layer_spread: of layer norm: 0.
      batch_spread: of batch norm without padding in the statistics.
      padded_spread: of batch norm with the padding in them.
      batch_drift: of batch norm without padding.
      padded_drift: of batch norm with it.
    """

    max_length: int
    real_share: float
    layer_spread: float
    batch_spread: float
    padded_spread: float
    batch_drift: float
    padded_drift: float


def compare_norms(batches: ArrayLike, masks: ArrayLike, probe: ArrayLike) -> NormFigures:
    """Normalises the same text as a part of every batch by each norm, and tells how much the results differ.

    Args:
      batches: N batches of hidden states, floating [N, B, L, D], such as what the norms of a model read; padding
        included as it stands there.
      masks: bool or 0/1 [N, B, L], true = the token is real.
      probe: hidden states of the text, floating [T, D]; in every batch it is one row more.

    Returns:
      ``NormFigures``.

    Raises:
      ValueError: shapes that don't fit, or less than two batches.
    """
    batches, masks, probe = jnp.asarray(batches), as_mask(masks, "masks"), jnp.asarray(probe)
    if batches.ndim != 4 or len(batches) < 2:
        raise ValueError(f"batches has shape {batches.shape}; it must be [batches (2 or more), B, L, D]")
    if masks.shape != batches.shape[:3]:
        raise ValueError(f"masks has shape {masks.shape}; it must be {batches.shape[:3]} for batches {batches.shape}")
    if probe.ndim != 2 or not 1 <= probe.shape[0] <= batches.shape[2] or probe.shape[1] != batches.shape[3]:
        raise ValueError(f"probe has shape {probe.shape}; it must be [1 to {batches.shape[2]}, {batches.shape[3]}]")
    figures = jax.device_get(_compare(batches, masks, probe))
    share = float(np.mean(np.asarray(masks)))
    return NormFigures(batches.shape[2], share, **{name: float(value) for name, value in figures.items()})


@jax.jit
def _compare(
    batches: Float[Array, "N B L D"], masks: Bool[Array, "N B L"], probe: Float[Array, "T D"]
) -> dict[str, Array]:
    """The figures by name."""
    length = batches.shape[2]
    row = jnp.pad(probe, ((0, length - len(probe)), (0, 0)))
    row_mask = jnp.arange(length) < len(probe)

    def normalised(statistics: BatchStatistics) -> Array:
        return batch_norm(probe, mean=statistics.mean, variance=statistics.variance)

    def one(batch: Array, mask: Array) -> dict[str, Array]:
        rows, real = jnp.concatenate([batch, row[None]]), jnp.concatenate([mask, row_mask[None]])
        return {
            "layer": layer_norm(rows)[-1, : len(probe)],
            "batch": normalised(batch_statistics(rows, mask=real)),
            "padded": normalised(batch_statistics(rows)),
        }

    found = jax.vmap(one)(batches, masks)
    settled = normalised(batch_statistics(batches, mask=masks))
    spreads = {f"{name}_spread": jnp.sqrt(values.var(0).mean()) for name, values in found.items()}
    drifts = {
        f"{name}_drift": jnp.sqrt(jnp.square(found[name].mean(0) - settled).mean()) for name in ("batch", "padded")
    }
    return spreads | drifts


def vary_lengths(
    rng: Array,
    *,
    max_lengths: Sequence[int] = (4, 16, 64),
    batch_size: int = 8,
    num_batches: int = 64,
    dim: int = 16,
    mean: float = 1.0,
    row_deviation: float = 0.5,
    token_deviation: float = 1.0,
) -> list[NormFigures]:
    """``compare_norms`` on drawn hidden states, for rows of 1 to ``max_length`` tokens, each length as likely.

    A token is mean + its row's vector + its own, both normal; padding is zeros; the probe is one token, each of its
    features one deviation above or below the mean.

    Args:
      rng: PRNG key.
      max_lengths: longest rows in tokens, one figure each.
      batch_size: rows of a batch.
      num_batches: batches, 2 or more.
      dim: features.
      mean: of every feature.
      row_deviation: standard deviation of what the tokens of a row share.
      token_deviation: standard deviation of what they don't.

    Returns:
      Figures in the order of ``max_lengths``.

    Raises:
      ValueError: a size below 1 or a negative deviation.
    """
    for name, size in (("batch_size", batch_size), ("dim", dim), *(("max_lengths", size) for size in max_lengths)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if min(row_deviation, token_deviation) < 0:
        raise ValueError(f"row_deviation={row_deviation} and token_deviation={token_deviation} must not be negative")
    sign = jnp.where(jnp.arange(dim) % 2 == 0, 1.0, -1.0)
    probe = (mean + sign * (row_deviation**2 + token_deviation**2) ** 0.5)[None]
    figures = []
    for index, length in enumerate(max_lengths):
        own = jax.random.fold_in(rng, index)
        rows, masks = _draw(own, row_deviation, token_deviation, sizes=(num_batches, batch_size, length, dim))
        figures.append(compare_norms(jnp.where(masks[..., None], mean + rows, 0), masks, probe))
    return figures


@functools.partial(jax.jit, static_argnames="sizes")
def _draw(
    rng: Array, row_deviation: ArrayLike, token_deviation: ArrayLike, *, sizes: tuple[int, int, int, int]
) -> tuple[Float[Array, "N B L D"], Bool[Array, "N B L"]]:
    """Deviations of tokens from the mean, and which of them are real."""
    num_batches, batch_size, length, dim = sizes
    lengths, rows, tokens = jax.random.split(rng, 3)
    masks = mask_from_lengths(jax.random.randint(lengths, (num_batches, batch_size), 1, length + 1), length)
    shared = jnp.asarray(row_deviation) * jax.random.normal(rows, (num_batches, batch_size, 1, dim))
    return shared + jnp.asarray(token_deviation) * jax.random.normal(tokens, sizes), masks


def format_figures(figures: Sequence[NormFigures]) -> str:
    """The figures as a text table, a line each."""
    names = [field.name for field in dataclasses.fields(NormFigures)]
    lines = ["  ".join(name.rjust(13) for name in names)]
    for one in figures:
        values = [getattr(one, name) for name in names]
        lines.append("  ".join((f"{v:d}" if isinstance(v, int) else f"{v:.3f}").rjust(13) for v in values))
    return "\n".join(lines)
