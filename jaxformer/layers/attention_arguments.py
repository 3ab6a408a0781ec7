"""The arrays that kinds of attention need beside query, key and value: parameters, random structure and running state.

What is learned is a parameter; what is drawn once or follows the data (rotations, features, centroids) is a variable of
the collection "state": saved with a run, changed in training only, the same in evaluation, recomputation and decoding.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Arrays = tuple[dict[str, Any], dict[str, Array]]


class AttentionArguments(nn.Module):
    """Makes the array arguments of one kind of attention; further fields are set through ``attention_args``.

    ``makes`` names all arguments of the function that it may make, whatever its fields; they can't be set themselves.

    Args:
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: width of a head.
      max_length: longest sequence in tokens, or None where it is not known.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of projections.
    """

    makes: ClassVar[tuple[str, ...]] = ()

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        *,
        key_mask: Bool[Array, "#B S"] | None,
        causal: bool,
        deterministic: bool,
    ) -> Arrays:
        """The arrays by argument name, and auxiliary losses by name.

        Args:
          x: the layer's input.
          query: projected queries (or shared queries and keys).
          key: projected keys.
          key_mask: True = the key exists.
          causal: whether the attention is causal.
          deterministic: False in training, where state may change.
        """
        raise ValueError(f"{type(self).__name__} makes no arrays")
