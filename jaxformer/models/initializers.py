"""How the parameters of a Transformer begin, as its config says."""

import math
from collections.abc import Callable

import flax.linen as nn

from jaxformer.models.config import TransformerConfig


def make_kernel_init(config: TransformerConfig, residual_additions: int | None = None) -> Callable:
    """The configured initialiser, scaled down for a projection into the residual stream.

    Args:
      config: with ``kernel_init``, ``init_stddev`` and ``scale_residual_init``.
      residual_additions: of the whole stack, for a projection into the residual stream; None = another projection.

    Returns:
      A function (key, shape, dtype) -> kernel.
    """
    scaled = config.scale_residual_init and residual_additions is not None
    factor = 1.0 / math.sqrt(residual_additions) if scaled and residual_additions else 1.0
    if config.kernel_init == "normal":
        return nn.initializers.normal(config.init_stddev * factor)
    if config.kernel_init == "fan_in":
        return nn.initializers.variance_scaling(factor**2, "fan_in", "normal")
    return nn.initializers.variance_scaling(factor**2, "fan_avg", "uniform")


def make_query_init(config: TransformerConfig) -> Callable:
    """The initialiser of queries' kernels: with ``kernel_init="fan_in"`` logits begin alike whatever their scale is.

    Where ``attention_scale`` is s, the standard deviation is that of other kernels times 1 / (s sqrt(head_dim)): T5,
    whose s is 1, begins with the factor 1 / sqrt(head_dim) inside its queries (Raffel et al. 2020, arXiv:1910.10683, in
    its code, mesh-tensorflow).
    """
    if config.kernel_init != "fan_in" or config.attention_scale is None:
        return make_kernel_init(config)
    return nn.initializers.variance_scaling(
        1.0 / (config.attention_scale**2 * config.width_of_head), "fan_in", "normal"
    )


def make_relative_bias_init(config: TransformerConfig) -> Callable:
    """The initialiser of the table of relative positions: with ``kernel_init="fan_in"`` of deviation embed_dim^-1/2."""
    stddev = config.embed_dim**-0.5 if config.kernel_init == "fan_in" else config.init_stddev
    return nn.initializers.normal(stddev)
