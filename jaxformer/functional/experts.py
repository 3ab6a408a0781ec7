"""Routing of tokens to experts: which experts take a token, under what capacity, and losses that balance routers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.checks import as_floating
from jaxformer.functional.masks import as_mask
from jaxformer.functional.numerics import compute_dtype


class ExpertRoutes(NamedTuple):
    """Where each token goes.

    Attributes:
      experts: int32 [B, T, K], the experts that a token chooses, likeliest first.
      gates: float32 [B, T, K], weights of their outputs; 0 for padding.
      probabilities: float32 [B, T, E], of every expert; 0 for padding.
      mask: bool [B, T], the tokens that exist.
    """

    experts: Int[Array, "B T K"]
    gates: Float[Array, "B T K"]
    probabilities: Float[Array, "B T E"]
    mask: Bool[Array, "B T"]


def route_tokens(logits: ArrayLike, *, experts_per_token: int = 1, key_mask: ArrayLike | None = None) -> ExpertRoutes:
    """Sends each token to the experts of its largest router logits; of equal ones to the first.

    probabilities = softmax(logits). With one expert a token the gate is its raw probability, through which alone the
    router learns (Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, equations 1, 2); with K of at least two,
    the chosen probabilities are divided by their sum (Lepikhin et al. 2020, "GShard", arXiv:2006.16668, algorithm 1).
    Deviation from GShard: the second expert is always used, never at random. Tokens choose, never experts: what a
    token is sent to depends on itself alone.

    Args:
      logits: floating [B, T, E], one for each of E experts.
      experts_per_token: K, between 1 and E.
      key_mask: bool or 0/1 int [B, T], True = the token exists; padding is never routed.

    Returns:
      `ExpertRoutes`, float32 (float64 for float64 logits).

    Raises:
      ValueError: logits that are not floating [B, T, E], a mask of another shape, or experts_per_token out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import route_tokens
        >>> route_tokens(jnp.array([[[0.0, 2.0], [1.0, 0.0]]])).experts.tolist()
        [[[1], [0]]]
    """
    logits = as_floating(logits, "logits")
    if logits.ndim != 3:
        raise ValueError(f"logits has shape {logits.shape}; it must be [batch, tokens, experts].")
    check_experts(logits.shape[-1], experts_per_token)
    mask = jnp.ones(logits.shape[:2], bool) if key_mask is None else as_mask(key_mask, "key_mask")
    if mask.shape != logits.shape[:2]:
        raise ValueError(f"key_mask has shape {mask.shape}; it must be [batch, tokens], {logits.shape[:2]}.")
    exists = mask[..., None]
    # Not even NaN in padding's logits may reach a gradient.
    logits = jnp.where(exists, logits, jnp.zeros_like(logits)).astype(compute_dtype(logits.dtype))
    probabilities = jnp.where(exists, jax.nn.softmax(logits, axis=-1), jnp.zeros_like(logits))
    largest, experts = jax.lax.top_k(logits, experts_per_token)
    if experts_per_token == 1:
        gates = jnp.take_along_axis(probabilities, experts, axis=-1)
    else:
        # The chosen probabilities, divided by their sum.
        gates = jax.nn.softmax(largest, axis=-1)
    gates = jnp.where(exists, gates, jnp.zeros_like(gates))
    return ExpertRoutes(experts.astype(jnp.int32), gates, probabilities, mask)


def check_experts(num_experts: int, experts_per_token: int, capacity_factor: float | None = None) -> None:
    """Refuses counts of experts that can't be.

    Raises:
      ValueError: a count below 1, more experts a token than there are, or a capacity factor that is not positive.
    """
    for name, count in {"num_experts": num_experts, "experts_per_token": experts_per_token}.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be an integer of at least 1.")
    if experts_per_token > num_experts:
        raise ValueError(f"experts_per_token is {experts_per_token}; it must be at most num_experts, {num_experts}.")
    if capacity_factor is not None and not 0.0 < capacity_factor < float("inf"):
        raise ValueError(f"expert_capacity_factor is {capacity_factor}; it must be positive, or None (nothing drops).")


def expert_capacities(
    length: int, num_experts: int, experts_per_token: int, capacity_factor: float
) -> Int[np.ndarray, "T_plus_1"]:
    """Tokens that one expert takes of a row, by the number of real tokens in it.

    ceil(factor * K * n / E), at least 1 and at most n (Fedus et al. 2021, arXiv:2101.03961, equation 3, for K = 1).
    Only real tokens count, so that padding a row changes nothing.

    Args:
      length: T, longest row in tokens.
      num_experts: E.
      experts_per_token: K.
      capacity_factor: 1 = just enough places where all experts are chosen equally often.

    Returns:
      int32 [T + 1]: entry n is for a row of n real tokens.

    Examples:
        >>> from jaxformer.functional import expert_capacities
        >>> expert_capacities(4, num_experts=2, experts_per_token=1, capacity_factor=1.0).tolist()
        [0, 1, 1, 2, 2]
    """
    real = np.arange(length + 1)
    # Rounded first: 1.1 * 10 must be 11, not 12.
    places = np.ceil(np.round(capacity_factor * experts_per_token * real / num_experts, 6))
    return np.minimum(np.maximum(places, 1), real).astype(np.int32)


def balance_loss(routes: ExpertRoutes) -> Float[Array, ""]:
    """How unevenly experts are chosen: 1 where all are equally likely and chosen, E where one takes everything.

    For each row, E * sum_e f_e P_e: f_e is the share of the real tokens' choices that fall on expert e (before any is
    dropped; no gradient), P_e the mean of its probability over the real tokens (Fedus et al. 2021, arXiv:2101.03961,
    equations 4 to 6, without alpha). With K choices a token all count, and the shares are divided by K, so that they
    still sum to 1; GShard counts first choices alone. The result is the mean over rows, the routing groups, weighted
    by their real tokens; 0 without any.

    Args:
      routes: of a batch.

    Returns:
      Scalar in the routes' dtype.
    """
    num_experts, choices = routes.probabilities.shape[-1], routes.experts.shape[-1]
    dtype = routes.probabilities.dtype
    real = routes.mask.sum(1).astype(dtype)  # [B]
    chosen = _choice_counts(routes).astype(dtype)  # [B, E]
    row = num_experts * (chosen * routes.probabilities.sum(1)).sum(-1)
    # (chosen / (K n)) * (sum / n) for each row, times its weight n.
    return (row / jnp.maximum(choices * real, 1)).sum() / jnp.maximum(real.sum(), 1)


def router_z_loss(logits: ArrayLike, key_mask: ArrayLike | None = None) -> Float[Array, ""]:
    """Mean over the real tokens of logsumexp(logits)², which keeps router logits small.

    Zoph et al. 2022, "ST-MoE", arXiv:2202.08906, equation 5.

    Args:
      logits: floating [B, T, E].
      key_mask: bool or 0/1 int [B, T], True = the token exists.

    Returns:
      float32 scalar (float64 for float64 logits); 0 without real tokens.
    """
    logits = as_floating(logits, "logits")
    logits = logits.astype(compute_dtype(logits.dtype))
    mask = jnp.ones(logits.shape[:-1], bool) if key_mask is None else as_mask(key_mask, "key_mask")
    logits = jnp.where(mask[..., None], logits, jnp.zeros_like(logits))
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    total = jnp.where(mask, squares, jnp.zeros_like(squares)).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def router_jitter(x: Float[Array, "B T D"], rng: jax.Array, amount: float) -> Float[Array, "B T D"]:
    """Multiplies each element of the router's input by a number drawn evenly from [1 - amount, 1 + amount].

    For training only; Fedus et al. 2021, arXiv:2101.03961, section 2.2 and appendix C (amount 0.01).

    Args:
      x: floating [B, T, D].
      rng: PRNG key.
      amount: in [0, 1).

    Returns:
      As `x`.
    """
    return x * jax.random.uniform(rng, x.shape, x.dtype, 1.0 - amount, 1.0 + amount)


def _choice_counts(routes: ExpertRoutes) -> Int[Array, "B E"]:
    """How often the real tokens of each row choose each expert."""
    num_experts = routes.probabilities.shape[-1]
    hits = routes.experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32).reshape(1, 1, 1, -1)
    return (hits & routes.mask[..., None, None]).sum((1, 2), dtype=jnp.int32)
