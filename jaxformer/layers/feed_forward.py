"""The position-wise feed-forward layer: plain or gated, whole or in chunks over length with identical results."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.layers.projection import Projection, project

# name -> (activation, gated): a gated layer multiplies the activation by a second projection of the input.
ACTIVATIONS: dict[str, tuple[Callable, bool]] = {
    "relu": (jax.nn.relu, False),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), False),
    "gelu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), False),
    "swiglu": (jax.nn.silu, True),
    "geglu": (lambda x: jax.nn.gelu(x, approximate=False), True),
    "geglu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), True),
}


def dropout_by_position(rng: jax.Array, x: Float[Array, "B L D"], rate: float, start: Any = 0) -> Float[Array, "B L D"]:
    """Dropout whose mask is a function of (rng, position), so that any split over length drops the same elements.

    Args:
      rng: PRNG key.
      x: values, float [B, L, D].
      rate: probability of dropping an element, in [0, 1).
      start: position of the first column of ``x``, int.

    Returns:
      ``x`` with dropped elements zero and kept ones divided by 1 - rate, same shape and dtype.
    """
    keys = jax.vmap(lambda position: jax.random.fold_in(rng, position))(start + jnp.arange(x.shape[1]))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], x.shape[2])), out_axes=1)(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


class FeedForward(nn.Module):
    """Two (or three, when gated) projections around an activation, applied to each position alone.

    FFN(x) = activation(x W_up + b) W_down + b (Vaswani et al. 2017, arXiv:1706.03762, section 3.3); gated:
    (activation(x W_gate) * x W_up) W_down (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202).

    Args:
      mlp_dim: hidden width (d_ff).
      activation: a name of ``ACTIVATIONS``.
      use_bias: whether projections have biases.
      dropout_rate: dropout of the hidden layer, fraction in [0, 1).
      chunk_size: positions computed at a time (Kitaev et al. 2020, arXiv:2001.04451, section 3); None = all. Memory
        for the hidden layer falls from length to chunk_size; results are the same, dropout included.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of the projections into the hidden layer.
      out_kernel_init: initialiser of the projection out of it.
    """

    mlp_dim: int
    activation: str = "gelu_tanh"
    use_bias: bool = True
    dropout_rate: float = 0.0
    chunk_size: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)
    out_kernel_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"], *, deterministic: bool = True) -> Float[Array, "B L D"]:
        """Apply the layer to every position of ``x``; ``deterministic`` switches dropout off."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} must be one of {sorted(ACTIVATIONS)}")
        activation, gated = ACTIVATIONS[self.activation]
        features = x.shape[-1]
        up = self._projection("up", features, self.mlp_dim, self.kernel_init)
        gate = self._projection("gate", features, self.mlp_dim, self.kernel_init) if gated else None
        down = self._projection("down", self.mlp_dim, features, self.out_kernel_init)
        rng = None if deterministic or not self.dropout_rate else self.make_rng("dropout")

        # Recomputing the activation keeps one array of the hidden width for the backward pass instead of several.
        @jax.checkpoint
        def contract(raised: Array, gated: Array | None, down: tuple[Array, Array | None], start: Any) -> Array:
            hidden = activation(raised) if gated is None else activation(gated) * raised
            if rng is not None:
                hidden = dropout_by_position(rng, hidden, self.dropout_rate, start)
            return project(hidden, *down, dtype=self.dtype)

        def apply(chunk: Array, start: Any) -> Array:
            gated = None if gate is None else project(chunk, *gate, dtype=self.dtype)
            return contract(project(chunk, *up, dtype=self.dtype), gated, down, start)

        if self.chunk_size is None or self.chunk_size >= x.shape[1]:
            return apply(x, 0)
        return _map_over_length(apply, x, self.chunk_size)

    def _projection(self, name: str, inputs: int, outputs: int, init: Callable) -> tuple[Array, Array | None]:
        """Declare one projection and return its arrays, which a scan may use where a module may not be called."""
        return Projection(
            inputs, outputs, self.use_bias, self.dtype, self.param_dtype, kernel_init=init, name=name
        ).arrays()


def _map_over_length(apply: Callable, x: Array, chunk_size: int) -> Array:
    """Apply ``apply(chunk, start)`` over chunks of axis 1 in a scan; the last partial chunk is padded and cut off."""
    batch, length, features = x.shape
    num_chunks = -(-length // chunk_size)
    padded = jnp.pad(x, ((0, 0), (0, num_chunks * chunk_size - length), (0, 0)))
    chunks = padded.reshape(batch, num_chunks, chunk_size, features).swapaxes(0, 1)
    starts = jnp.arange(num_chunks) * chunk_size
    body = jax.checkpoint(lambda chunk_start: apply(*chunk_start), prevent_cse=False)
    out = jax.lax.map(body, (chunks, starts))
    return out.swapaxes(0, 1).reshape(batch, -1, features)[:, :length]
