"""Recurrent layers over sequences with padding: a cell scanned over time whose state stands still at padding."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def make_cell(cell: str, features: int, dtype: jnp.dtype, param_dtype: jnp.dtype, name: str | None = None) -> Any:
    """Flax's cell of that name: "gru" (Cho et al. 2014, arXiv:1406.1078) or "lstm" (Hochreiter, Schmidhuber 1997)."""
    make: Any = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}[cell]
    return make(features, dtype=dtype, param_dtype=param_dtype, name=name)


def where_real(real: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """The new state of rows whose token exists, else the old one."""
    return jax.tree.map(lambda new, old: jnp.where(real[:, None], new, old), new, old)


class RecurrentLayer(nn.Module):
    """One direction of one layer.

    Args:
      cell: gru or lstm.
      features: of a state.
      reverse: from the last token to the first.
      dtype: of the computation.
      param_dtype: of the parameters.
    """

    cell: str
    features: int
    reverse: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> tuple[Any, Float[Array, "B T F"]]:
        """Apply the layer.

        Args:
          x: inputs [B, T, D].
          mask: True = the token exists; others change no state, wherever they stand.

        Returns:
          The last state (h of a GRU, (c, h) of an LSTM), and h behind every token, [B, T, features].
        """
        cell = make_cell(self.cell, self.features, self.dtype, self.param_dtype, name="cell")
        start = cell.initialize_carry(jax.random.key(0), (x.shape[0], x.shape[2]))
        start = jax.tree.map(lambda leaf: leaf.astype(self.dtype), start)

        def step(cell: Any, state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
            x, real = inputs
            new, _ = cell(state, x)
            state = where_real(real, new, state)
            return state, hidden_of(state)

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            reverse=self.reverse,
        )
        return scan(cell, start, (x.astype(self.dtype), mask))


def hidden_of(state: Any) -> Float[Array, "B F"]:
    """What a state shows: h of a GRU, and of an LSTM's (c, h)."""
    return state[1] if isinstance(state, tuple) else state
