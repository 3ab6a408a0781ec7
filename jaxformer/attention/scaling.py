"""Why logits are divided by sqrt(head_dim): what softmax makes of dot products, measured on random vectors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.attention.inputs import check_count, check_rng


class LogitStatistics(NamedTuple):
    """Figures of one head size, each a float32 scalar.

    Attributes:
      variance: of scale * query key over all pairs.
      highest_weight: the largest weight of a query, averaged over queries; 1 / num_keys where all are equal.
      gradient: the sum of |d weight / d logit| over all pairs of keys, averaged over queries: 2 (1 - sum of squared
        weights), near 2 where many keys share the weight, and near 0 where one takes all.
    """

    variance: Float[Array, ""]
    highest_weight: Float[Array, ""]
    gradient: Float[Array, ""]


def logit_statistics(
    rng: Array, head_dim: int, *, scale: float | None = None, num_queries: int = 256, num_keys: int = 256
) -> LogitStatistics:
    """What softmax makes of the logits of normal queries and keys: the reason for the factor 1 / sqrt(head_dim).

    A dot product of two vectors of head_dim independent entries of variance 1 has variance head_dim. Without the factor
    one key takes nearly all of the weight in large heads, where the softmax has next to no gradient.
    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.1 and its footnote.

    Args:
      rng: one typed key, as `jax.random.key(seed)` makes it.
      head_dim: H.
      scale: factor on query keyᵀ; 1 / sqrt(H) by default, 1.0 for none.
      num_queries, num_keys: vectors that are drawn.

    Returns:
      LogitStatistics.

    Raises:
      ValueError: a size below 1, or an rng that is not one typed key.
    """
    for name, size in {"head_dim": head_dim, "num_queries": num_queries, "num_keys": num_keys}.items():
        check_count(size, name)
    query_rng, key_rng = jax.random.split(check_rng(rng))
    query = jax.random.normal(query_rng, (num_queries, head_dim), jnp.float32)
    key = jax.random.normal(key_rng, (num_keys, head_dim), jnp.float32)
    logits = (query @ key.T) * (head_dim**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(logits, axis=-1)
    gradient = 2 * (1 - jnp.square(weights).sum(-1))
    return LogitStatistics(logits.var(), weights.max(-1).mean(), gradient.mean())
