"""Feature maps of linear attention: phi(x) >= 0, so that phi(query) phi(key) can be a weight."""

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxformer.functional.checks import as_floating


def elu_features(inputs: ArrayLike) -> Float[Array, "..."]:
    """elu(x) + 1: x + 1 above zero and exp(x) below, positive everywhere.

    Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, equation 7. The exponential is taken as such,
    not as expm1(x) + 1, which rounds small features to zero.

    Args:
      inputs: floating [...].

    Returns:
      The same shape and dtype.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import elu_features
        >>> elu_features(jnp.array([0.0, 2.0])).tolist()
        [1.0, 3.0]
    """
    inputs = as_floating(inputs, "inputs", 0)
    positive = inputs > 0
    return jnp.where(positive, inputs + jnp.ones((), inputs.dtype), jnp.exp(jnp.where(positive, 0.0, inputs)))


def relu_features(inputs: ArrayLike) -> Float[Array, "..."]:
    """max(x, 0): sparse features; a query without one in common with any key sees nothing.

    Args:
      inputs: floating [...].

    Returns:
      The same shape and dtype.
    """
    return jax.nn.relu(as_floating(inputs, "inputs", 0))


def softplus_features(inputs: ArrayLike) -> Float[Array, "..."]:
    """log(1 + exp(x)): positive and smooth to every order.

    Args:
      inputs: floating [...].

    Returns:
      The same shape and dtype.
    """
    inputs = as_floating(inputs, "inputs", 0)
    return jnp.logaddexp(inputs, jnp.zeros((), inputs.dtype))


FEATURE_MAPS: MappingProxyType[str, Callable] = MappingProxyType(
    {"elu": elu_features, "relu": relu_features, "softplus": softplus_features}
)
