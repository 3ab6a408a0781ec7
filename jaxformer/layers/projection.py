"""A linear projection whose arrays can be taken out, so that it may run inside a scan or be joined with others."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


def project(
    x: Float[Array, "*batch I"], kernel: Float[Array, "I O"], bias: Float[Array, "O"] | None, *, dtype: Any
) -> Array:
    """``x @ kernel + bias`` computed in ``dtype``: [..., inputs] -> [..., outputs]."""
    out = jnp.matmul(x.astype(dtype), kernel.astype(dtype))
    if bias is None:
        return out
    return out + jnp.expand_dims(bias.astype(dtype), tuple(range(out.ndim - 1)))


class Projection(nn.Module):
    """Parameters of one projection: ``kernel`` [inputs, outputs] and, if wanted, ``bias`` [outputs].

    Args:
      inputs: input width.
      outputs: output width.
      use_bias: whether there is a bias.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of the kernel; biases begin at zero.
    """

    inputs: int
    outputs: int
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)

    def setup(self) -> None:
        """Declare the parameters."""
        self.kernel = self.param("kernel", self.kernel_init, (self.inputs, self.outputs), self.param_dtype)
        self.bias = (
            self.param("bias", nn.initializers.zeros, (self.outputs,), self.param_dtype) if self.use_bias else None
        )

    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
        """Project the last axis of ``x``."""
        return project(x, self.kernel, self.bias, dtype=self.dtype)

    def arrays(self) -> tuple[Array, Array | None]:
        """The kernel and the bias (None without one)."""
        return self.kernel, self.bias
