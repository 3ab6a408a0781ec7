"""Transformations that look at a whole parameter, told which axes are stacks: each layer and expert by itself."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Number = float | jax.Array


def over_layers(transformation: optax.GradientTransformation, stack_axes: Any) -> optax.GradientTransformation:
    """Applies a transformation without state to every parameter of every layer by itself.

    Args:
      transformation: looks at one parameter at a time, and keeps nothing.
      stack_axes: tree like the parameters: how many leading axes are those of stacks.
    """

    def of_layer(update: jax.Array, param: jax.Array) -> jax.Array:
        return transformation.update(update, optax.EmptyState(), param)[0]

    def of_parameter(axes: int, update: Any, param: Any) -> Any:
        if isinstance(update, optax.MaskedNode):
            return update
        function = of_layer
        for _ in range(axes):
            function = jax.vmap(function)
        return function(update, param)

    def update(updates, state, params=None):
        return jax.tree.map(of_parameter, stack_axes, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


class FactoredState(NamedTuple):
    """Second moments, of matrices as means over rows and columns.

    Attributes:
      num_updates: updates made.
      full: moments of the parameters that aren't factored, at the parameters' own paths.
      factored: of each that is, ``rows`` [..., rows] and ``columns`` [..., columns].
    """

    num_updates: jax.Array
    full: Any
    factored: Any


def scale_by_factored_moments(
    decay_exponent: Number, epsilon: Number, smallest_factored: int, stack_axes: Any
) -> optax.GradientTransformation:
    """Divides gradients by the root of second moments that are kept, for matrices, by rows and columns only.

    Adafactor's: with g the gradient, s = g^2 + epsilon and the decay d_t = 1 - t^-decay_exponent of update t = 1, 2, …

        R_t = d_t R_(t-1) + (1 - d_t) mean_columns(s)      C_t = d_t C_(t-1) + (1 - d_t) mean_rows(s)
        V_t = R_t C_t^T / mean(R_t)                        direction = g / sqrt(V_t)

    Shazeer and Stern 2018, "Adafactor", arXiv:1804.04235, algorithms 2 and 4. Unlike ``optax.scale_by_factored_rms``,
    which factors the two largest axes of an array, it factors the last two, so that a stack is as many matrices.

    Args:
      decay_exponent: above.
      epsilon: added to squares.
      smallest_factored: a matrix is factored if it has so many rows and columns.
      stack_axes: tree like the parameters: how many leading axes are those of stacks.
    """

    def is_factored(axes: int, leaf: Any) -> bool:
        return leaf.ndim - axes >= 2 and min(leaf.shape[-2:]) >= smallest_factored

    def init(params):
        def full(axes, leaf):
            masked = isinstance(leaf, optax.MaskedNode) or is_factored(axes, leaf)
            return optax.MaskedNode() if masked else jnp.zeros_like(leaf)

        def factored(axes, leaf):
            if isinstance(leaf, optax.MaskedNode) or not is_factored(axes, leaf):
                return optax.MaskedNode()
            return {"rows": jnp.zeros_like(leaf[..., 0]), "columns": jnp.zeros_like(leaf[..., 0, :])}

        trees = (jax.tree.map(function, stack_axes, params) for function in (full, factored))
        return FactoredState(jnp.zeros((), jnp.int32), *trees)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.num_updates)
        decay = 1.0 - count.astype(jnp.float32) ** -decay_exponent

        def mix(old, new):
            return (decay * old.astype(jnp.float32) + (1.0 - decay) * new).astype(old.dtype)

        def square(leaf):
            return jnp.square(leaf.astype(jnp.float32)) + epsilon

        def mix_full(_, leaf, old):
            return old if isinstance(old, optax.MaskedNode) else mix(old, square(leaf))

        def mix_factored(_, leaf, old):
            if isinstance(old, optax.MaskedNode):
                return old
            means = {"rows": square(leaf).mean(-1), "columns": square(leaf).mean(-2)}
            return {name: mix(old[name], mean) for name, mean in means.items()}

        def divide(_, leaf, full, factored):
            if isinstance(leaf, optax.MaskedNode):
                return leaf
            if isinstance(factored, optax.MaskedNode):
                return leaf * jax.lax.rsqrt(full).astype(leaf.dtype)
            # The two roots apart: their product underflows.
            rows = jax.lax.rsqrt(factored["rows"] / factored["rows"].mean(-1, keepdims=True))[..., :, None]
            columns = jax.lax.rsqrt(factored["columns"])[..., None, :]
            return leaf * rows.astype(leaf.dtype) * columns.astype(leaf.dtype)

        full = jax.tree.map(mix_full, stack_axes, updates, state.full)
        factored = jax.tree.map(mix_factored, stack_axes, updates, state.factored)
        return jax.tree.map(divide, stack_axes, updates, full, factored), FactoredState(count, full, factored)

    return optax.GradientTransformation(init, update)


MATRIX_SCALES = ("rms", "width")


def scale_matrices(muon_scale: str) -> optax.GradientTransformation:
    """Multiplies orthogonal matrices [..., inputs, outputs] by a factor of their shape.

    Args:
      muon_scale: "rms": 0.2 sqrt(max(inputs, outputs)), which makes elements as large as AdamW's usually are, so that
        one rate serves both: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, equation 4;
        "width": sqrt(max(1, outputs / inputs)), of the first implementation (Jordan et al. 2024, "Muon").

    Raises:
      ValueError: another name.
    """
    if muon_scale not in MATRIX_SCALES:
        raise ValueError(f"muon_scale is {muon_scale!r}, must be one of {', '.join(MATRIX_SCALES)}")

    def factor(inputs: int, outputs: int) -> float:
        return 0.2 * math.sqrt(max(inputs, outputs)) if muon_scale == "rms" else math.sqrt(max(1.0, outputs / inputs))

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda leaf: factor(*leaf.shape[-2:]) * leaf, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
