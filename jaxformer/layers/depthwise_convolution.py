"""A depthwise convolution over length: in front of a feed-forward layer, it makes it a separable convolution."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConvolutionCache:
    """The last tokens that a causal convolution has read; a stack over depth has a leading layer axis.

    Attributes:
      x: float [B, width - 1, D], zeros where no token stands.
      segments: int32 [B, width - 1].
    """

    x: Any
    segments: Any


def init_convolution_cache(batch_size: int, width: int, embed_dim: int, dtype: Any) -> ConvolutionCache:
    """The cache of one layer before the first token."""
    shape = (batch_size, width - 1)
    return ConvolutionCache(jnp.zeros((*shape, embed_dim), dtype), jnp.zeros(shape, jnp.int32))


class DepthwiseConvolution(nn.Module):
    """Each feature by itself is mixed over ``width`` neighbouring positions.

    y(t) = bias + sum over j < width of kernel(j) * x(t + j - before), where before is width - 1 (causal) or half of it,
    rounded down. Tokens that don't exist, padding among them, and tokens of other segments count as zero. Neighbours
    are those in the row: padding between two tokens keeps them apart.

    With the two projections of ``FeedForward`` behind it: a separable convolution (Chollet 2017, arXiv:1610.02357), an
    activation and a projection, one of the two transition functions of the Universal Transformer (Dehghani et al.
    2019, arXiv:1807.03819, section 2.1); tensor2tensor's has a second depthwise convolution after the activation.

    Args:
      width: positions that an output sees, its own included.
      causal: the output sees itself and positions before only.
      use_bias: whether there is a bias.
      dtype: dtype of the computation.
      param_dtype: dtype of ``kernel`` [width, embed_dim] and ``bias`` [embed_dim].
      kernel_init: initialiser of the kernel; by default outputs have the inputs' variance.
    """

    width: int
    causal: bool
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.variance_scaling(1.0, "fan_in", "normal")

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        key_mask: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        cache: ConvolutionCache | None = None,
        layer: Any = None,
    ) -> tuple[Float[Array, "B T D"], ConvolutionCache | None]:
        """Apply the convolution.

        Args:
          x: [B, T, embed_dim].
          key_mask: bool [B, T], True = the token exists.
          segments: int [B, T]; an output sees its own segment only.
          cache: of a causal convolution: what stands before ``x``; pieces of any length equal the whole.
          layer: index into a cache stacked over depth.

        Returns:
          [B, T, embed_dim] in ``dtype`` (meaningless for padding), and the new cache.

        Raises:
          ValueError: width below 1, or a cache for a convolution that is not causal.
        """
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")
        if cache is not None and not self.causal:
            raise ValueError("a cache needs causal=True: other convolutions read tokens that are not there yet")
        kernel = self.param("kernel", self.kernel_init, (self.width, x.shape[-1]), self.param_dtype).astype(self.dtype)
        x = x.astype(self.dtype)
        if key_mask is not None:
            x = jnp.where(key_mask.astype(bool)[..., None], x, jnp.zeros_like(x))
        segments = jnp.zeros(x.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)
        before = self.width - 1 if self.causal else (self.width - 1) // 2
        if cache is None:
            wide, wide_segments = (_pad(array, before, self.width - 1 - before) for array in (x, segments))
        else:
            last = cache if layer is None else jax.tree.map(lambda leaf: leaf[layer], cache)
            wide = jnp.concatenate([last.x.astype(self.dtype), x], 1)
            wide_segments = jnp.concatenate([last.segments, segments], 1)
        out = jnp.zeros_like(x)
        for j in range(self.width):
            near = slice(j, j + x.shape[1])
            same = (wide_segments[:, near] == segments)[..., None]
            out = out + jnp.where(same, wide[:, near] * kernel[j][None, None], jnp.zeros_like(x))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.param_dtype)
            out = out + bias.astype(self.dtype)[None, None]
        return out, None if cache is None else _remember(cache, layer, wide, wide_segments, self.width - 1)


def _pad(array: Array, before: int, after: int) -> Array:
    return jnp.pad(array, ((0, 0), (before, after), *((0, 0),) * (array.ndim - 2)))


def _remember(cache: ConvolutionCache, layer: Any, wide: Array, segments: Array, count: int) -> ConvolutionCache:
    """The cache with the last ``count`` tokens."""
    first = wide.shape[1] - count
    new = ConvolutionCache(wide[:, first:].astype(cache.x.dtype), segments[:, first:])
    if layer is None:
        return new
    return jax.tree.map(lambda stored, leaf: stored.at[layer].set(leaf), cache, new)
