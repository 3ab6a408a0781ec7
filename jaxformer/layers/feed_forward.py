"""The position-wise feed-forward layer: plain or gated, whole or in chunks over length with identical results."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.layers.norms import make_norm_layer
from jaxformer.layers.projection import Projection, project
from jaxformer.layers.state import STATE

# name -> (activation, gated): a gated layer multiplies the activation by a second projection of the input.
ACTIVATIONS: dict[str, tuple[Callable, bool]] = {
    "relu": (jax.nn.relu, False),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), False),
    "gelu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), False),
    "swiglu": (jax.nn.silu, True),
    "geglu": (lambda x: jax.nn.gelu(x, approximate=False), True),
    "geglu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), True),
}

HIDDEN_NORM_PLACEMENTS = ("before", "after")
"""Where the hidden layer's norm stands: before the activation or after it."""


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
    With ``norm`` the hidden layer is normalised: before the activation what this reads (the gate alone, where there is
    one), as Ioffe & Szegedy 2015, arXiv:1502.03167, section 3.2; or after it what W_down reads (Shleifer et al. 2021,
    "NormFormer", arXiv:2110.09456, section 2.1).

    Args:
      mlp_dim: hidden width (d_ff).
      activation: a name of ``ACTIVATIONS``.
      use_bias: whether projections have biases.
      dropout_rate: dropout of the hidden layer, fraction in [0, 1).
      chunk_size: positions computed at a time (Kitaev et al. 2020, arXiv:2001.04451, section 3); None = all. Memory
        for the hidden layer falls from length to chunk_size; results are the same, dropout included. Not with batch
        norm, whose statistics need all positions.
      norm: of the hidden layer: a name of ``jaxformer.layers.NORMS``, or None.
      norm_placement: ``before`` or ``after`` the activation.
      norm_epsilon: added to the variance or mean square.
      norm_momentum: share of batch norm's running averages that a training step keeps.
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
    norm: str | None = None
    norm_placement: str = "before"
    norm_epsilon: float = 1e-5
    norm_momentum: float = 0.9
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)
    out_kernel_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(
        self, x: Float[Array, "B L D"], *, mask: Bool[Array, "B L"] | None = None, deterministic: bool = True
    ) -> Float[Array, "B L D"]:
        """Apply the layer to every position of ``x``.

        ``deterministic`` switches dropout off and makes batch norm use its running averages; ``mask``, True where a
        token exists, is for batch norm alone.
        """
        self._check()
        activation, gated = ACTIVATIONS[self.activation]
        features = x.shape[-1]
        up = self._projection("up", features, self.mlp_dim, self.kernel_init)
        gate = self._projection("gate", features, self.mlp_dim, self.kernel_init) if gated else None
        down = self._projection("down", self.mlp_dim, features, self.out_kernel_init)
        rng = None if deterministic or not self.dropout_rate else self.make_rng("dropout")
        variables, normalise = self._norm(mask, deterministic)

        # Recomputing the activation keeps one array of the hidden width for the backward pass instead of several.
        @jax.checkpoint
        def contract(raised: Array, gated: Array | None, arrays: Any, start: Any) -> tuple[Array, dict[str, Array]]:
            down, variables = arrays
            read, state = normalise("before", variables, raised if gated is None else gated)
            hidden = activation(read) if gated is None else activation(read) * raised
            hidden, later = normalise("after", variables, hidden)
            if rng is not None:
                hidden = dropout_by_position(rng, hidden, self.dropout_rate, start)
            return project(hidden, *down, dtype=self.dtype), state | later

        def apply(chunk: Array, start: Any) -> tuple[Array, dict[str, Array]]:
            gated = None if gate is None else project(chunk, *gate, dtype=self.dtype)
            return contract(project(chunk, *up, dtype=self.dtype), gated, (down, variables), start)

        if self.chunk_size is None or self.chunk_size >= x.shape[1]:
            out, state = apply(x, 0)
            if state:
                self.put_variable(STATE, "norm", state)
            return out
        return _map_over_length(lambda chunk, start: apply(chunk, start)[0], x, self.chunk_size)

    def _check(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} must be one of {sorted(ACTIVATIONS)}")
        if self.norm_placement not in HIDDEN_NORM_PLACEMENTS:
            choices = ", ".join(HIDDEN_NORM_PLACEMENTS)
            raise ValueError(f"norm_placement={self.norm_placement!r} must be one of {choices}")
        if self.norm == "batch" and self.chunk_size is not None:
            raise ValueError(f"chunk_size={self.chunk_size} can't be with norm='batch', which needs all positions")

    def _norm(self, mask: Array | None, deterministic: bool) -> tuple[Any, Callable]:
        """The hidden layer's norm: its variables, and (placement, variables, hidden) -> (hidden, new state)."""
        if self.norm is None:
            return {}, lambda placement, variables, hidden: (hidden, {})
        norm: Any = make_norm_layer(
            self.norm,
            epsilon=self.norm_epsilon,
            momentum=self.norm_momentum,
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
        ).clone(parent=None)
        drawn: dict[str, Any] = {}

        def draw(key: Array) -> Any:
            drawn.update(norm.init(key, jnp.zeros((1, 1, self.mlp_dim), self.dtype)))
            return drawn["params"]

        params, first = self.param("norm", draw), self.is_initializing()
        state = drawn.get(STATE, {}) if first else self.get_variable(STATE, "norm", {})
        if first and state:
            self.put_variable(STATE, "norm", state)
        mutable = [STATE] if self.is_mutable_collection(STATE) and not first else []

        def normalise(placement: str, variables: Any, hidden: Array) -> tuple[Array, dict[str, Array]]:
            if placement != self.norm_placement:
                return hidden, {}
            if self.norm != "batch":
                return norm.apply(variables, hidden), {}
            hidden, changed = norm.apply(
                variables, hidden, mask=mask, deterministic=deterministic or first, mutable=mutable
            )
            return hidden, changed.get(STATE, {})

        return {"params": params, STATE: state} if state else {"params": params}, normalise

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
