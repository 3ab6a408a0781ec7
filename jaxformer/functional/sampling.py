"""Rules that choose the next token from its logits: temperature, filters, penalties, and the draw itself."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.checks import as_floating
from jaxformer.functional.masks import as_mask
from jaxformer.functional.numerics import compute_dtype, first_argmax

# Rounding of float32 sums: probabilities that add up to top_p on paper must reach it here, too.
_ROUNDING = 1e-6
# Tokens are drawn in two steps, a block of so many and then one in it.
_BLOCK = 256


def sample_logits(
    rng: Array | None,
    logits: ArrayLike,
    *,
    temperature: float | Array = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    vocab_size: int | None = None,
) -> Int[Array, "B"]:
    """Draws one token per row from softmax(logits / temperature), cut by top_k, then top_p, then min_p.

    Args:
      rng: typed PRNG key (`jax.random.key`), or [B] of them, one per row; may be None at temperature 0.
      logits: floating [B, V]; -inf excludes a token.
      temperature: 0 takes the most likely token (the first one of equals); as it grows, the choice tends to uniform.
        A scalar JAX array, which may be traced so that a new value does not compile anew, must be above 0.
      top_k: number of most likely tokens to choose from, at least 1; above V it cuts nothing. None = no cut.
      top_p: see `top_p_filter`. None = no cut.
      min_p: see `min_p_filter`. None = no cut.
      vocab_size: number of real tokens where V is padded: later ones are never drawn. None = V.

    Returns:
      int32 [B], each in [0, vocab_size).

    Raises:
      ValueError: an argument out of its range, or at a temperature above 0 no rng, or other than 1 or B typed keys.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import sample_logits
        >>> sample_logits(None, jnp.array([[1.0, 3.0, 2.0]]), temperature=0.0).tolist()
        [1]
    """
    fixed_temperature = 1.0 if isinstance(temperature, jax.Array) else temperature
    check_sampling(temperature=fixed_temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = _real_tokens(logits, vocab_size)
    if fixed_temperature == 0:
        return first_argmax(scores)
    rng = _checked_keys(rng, scores.shape[0])
    scores = _below_highest(scores) / jnp.maximum(jnp.asarray(temperature, jnp.float32), jnp.finfo(jnp.float32).tiny)
    tokens = None
    if top_k is not None and top_k < scores.shape[-1]:
        scores, tokens = jax.lax.top_k(scores, top_k)
    if top_p is not None:
        scores = top_p_filter(scores, top_p)
    if min_p is not None:
        scores = min_p_filter(scores, min_p)
    choice = _draw(rng, scores)
    return choice if tokens is None else jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0]


def top_k_filter(logits: ArrayLike, top_k: int) -> Float[Array, "... V"]:
    """Keeps the top_k highest logits of each row (the first ones of equals) and sets the others to -inf.

    Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation", arXiv:1805.04833, section 5.2.

    Args:
      logits: floating [..., V].
      top_k: how many to keep, at least 1; V or more keeps all.

    Returns:
      [..., V] in logits.dtype.

    Raises:
      ValueError: top_k is not an integer of at least 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import top_k_filter
        >>> top_k_filter(jnp.array([1.0, 3.0, 2.0]), 2).tolist()
        [-inf, 3.0, 2.0]
    """
    check_sampling(top_k=top_k)
    logits = as_floating(logits, "logits")
    if top_k >= logits.shape[-1]:
        return logits
    values, tokens = jax.lax.top_k(logits, top_k)
    return jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), tokens, values, axis=-1, inplace=False)


def top_p_filter(logits: ArrayLike, top_p: float) -> Float[Array, "... V"]:
    """Keeps the nucleus: the smallest set of most likely tokens whose probabilities reach top_p, at least one.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751, section 4. The edge of the
    nucleus is found by bisection, which costs a fraction of sorting a vocabulary; of equals at the edge the first are
    kept.

    Args:
      logits: floating [..., V].
      top_p: probability to reach, in (0, 1]; 1 keeps all.

    Returns:
      [..., V] in logits.dtype, -inf outside the nucleus.

    Raises:
      ValueError: top_p outside (0, 1].

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import top_p_filter
        >>> top_p_filter(jnp.log(jnp.array([0.125, 0.5, 0.375])), 0.75).tolist()[0]
        -inf
    """
    check_sampling(top_p=top_p)
    logits = as_floating(logits, "logits")
    if top_p == 1:
        return logits
    return jnp.where(_nucleus(logits, top_p), logits, -jnp.inf)


def min_p_filter(logits: ArrayLike, min_p: float) -> Float[Array, "... V"]:
    """Keeps the tokens at least min_p times as likely as the most likely one.

    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling", arXiv:2407.01082, section 3.

    Args:
      logits: floating [..., V].
      min_p: share of the highest probability, in [0, 1]; 0 keeps all.

    Returns:
      [..., V] in logits.dtype, -inf where a token is less likely.

    Raises:
      ValueError: min_p outside [0, 1].
    """
    check_sampling(min_p=min_p)
    logits = as_floating(logits, "logits")
    if min_p == 0:
        return logits
    return jnp.where(_below_highest(logits) >= math.log(min_p) - _ROUNDING, logits, -jnp.inf)


def apply_repetition_penalty(logits: ArrayLike, seen: ArrayLike, penalty: float) -> Float[Array, "... V"]:
    """Makes tokens that occurred less likely: positive logits are divided by the penalty, negative ones multiplied.

    Keskar et al. 2019, "CTRL", arXiv:1909.05858, section 4.1, which divides negative logits as well and so makes
    them more likely; multiplying is what its authors and later libraries settled on.

    Args:
      logits: floating [..., V].
      seen: bool or 0/1 int [..., V], True for tokens that occurred.
      penalty: above 0; 1 changes nothing, 1.2 is usual.

    Returns:
      [..., V] in logits.dtype.

    Raises:
      ValueError: a penalty that is not above 0, or shapes that differ.
    """
    check_sampling(repetition_penalty=penalty)
    logits, seen = as_floating(logits, "logits"), as_mask(seen, "seen")
    if seen.shape != logits.shape:
        raise ValueError(f"seen has shape {seen.shape}; it must be {logits.shape}, that of the logits.")
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def check_sampling(
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> None:
    """Refuses values that no sampling rule can follow, before anything is compiled.

    Args:
      temperature: finite, at least 0.
      top_k: integer of at least 1, or None.
      top_p: in (0, 1], or None.
      min_p: in [0, 1], or None.
      repetition_penalty: finite, above 0.

    Raises:
      ValueError: naming the argument, its value and its range.
    """
    if not 0 <= _number(temperature, "temperature") < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be finite and at least 0.")
    if top_k is not None and _integer(top_k, "top_k") < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for no cut.")
    if top_p is not None and not 0 < _number(top_p, "top_p") <= 1:
        raise ValueError(f"top_p is {top_p}; it must be within (0, 1], or None for no cut.")
    if min_p is not None and not 0 <= _number(min_p, "min_p") <= 1:
        raise ValueError(f"min_p is {min_p}; it must be within [0, 1], or None for no cut.")
    if not 0 < _number(repetition_penalty, "repetition_penalty") < math.inf:
        raise ValueError(f"repetition_penalty is {repetition_penalty}; it must be finite and above 0.")


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        raise ValueError(f"{name} is {value!r}; it must be a number.") from None


def _integer(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer.") from None


def _checked_keys(rng: Array | None, batch: int) -> Array:
    if rng is None or not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.shape not in ((), (batch,)):
        found = "None" if rng is None else f"{rng.dtype} {rng.shape}"
        raise ValueError(f"rng is {found}; a temperature above 0 needs one jax.random.key, or {batch}, one per row.")
    return rng


def _real_tokens(logits: ArrayLike, vocab_size: int | None) -> Float[Array, "B vocab_size"]:
    logits = as_floating(logits, "logits")
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {logits.shape}; they must be [batch, vocabulary].")
    if vocab_size is not None and not 1 <= vocab_size <= logits.shape[-1]:
        raise ValueError(f"vocab_size is {vocab_size}; it must be within 1 and the {logits.shape[-1]} columns.")
    return logits[:, :vocab_size]


def _below_highest(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Logits minus the highest of their row, in float32: at most 0, so that neither exp nor a division overflows."""
    logits = logits.astype(compute_dtype(logits.dtype))
    highest = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(logits.dtype).min)
    return (logits - highest).astype(jnp.float32)


@jax.jit
def _nucleus(logits: Float[Array, "*rows V"], top_p: float | Array) -> Bool[Array, "*rows V"]:
    """Which tokens are in it. Compiled once for all values of top_p, also where it is called outside of a jit."""
    gaps = -_below_highest(logits)
    probabilities = jnp.exp(-gaps)
    target = (top_p - _ROUNDING) * probabilities.sum(-1, keepdims=True)
    edge = _nucleus_edge(gaps, probabilities, target)
    inside, at_edge = gaps < edge, gaps == edge
    missing = (target - jnp.where(inside, probabilities, 0).sum(-1, keepdims=True)) / jnp.exp(-edge)
    return inside | _first_of(at_edge, jnp.maximum(jnp.ceil(missing), 1).astype(jnp.int32))


def _nucleus_edge(
    gaps: Float[Array, "*rows V"], probabilities: Float[Array, "*rows V"], target: Float[Array, "*rows 1"]
) -> Float[Array, "*rows 1"]:
    """The smallest gap such that the tokens within it reach the target, exactly.

    Floats of at least 0 are ordered like their bits, so 31 halvings of the range of bits find it.
    """

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        reached = _within(gaps, probabilities, middle) >= target
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    low = jnp.zeros(target.shape, jnp.int32)
    infinity = jax.lax.bitcast_convert_type(jnp.full(target.shape, jnp.inf, jnp.float32), jnp.int32)
    edge = jax.lax.fori_loop(0, 31, halve, (low, infinity))[1]
    return jax.lax.bitcast_convert_type(edge, jnp.float32)


def _within(gaps: Array, probabilities: Array, bits: Int[Array, "*rows 1"]) -> Float[Array, "*rows 1"]:
    limit = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(gaps <= limit, probabilities, 0).sum(-1, keepdims=True)


def _first_of(candidates: Bool[Array, "*rows V"], count: Int[Array, "*rows 1"]) -> Bool[Array, "*rows V"]:
    """The first `count` candidates of each row. Counting along a row is slow, so only where there is a surplus."""
    surplus = (candidates.sum(-1, keepdims=True, dtype=jnp.int32) > count).any()
    return jax.lax.cond(
        surplus,
        lambda: candidates & (jnp.cumsum(candidates, axis=-1, dtype=jnp.int32) <= count),
        lambda: candidates,
    )


@jax.jit
def _draw(rng: Array, scores: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token per row with probability softmax(scores): a block of the vocabulary first, then a token in it.

    Two uniform numbers a row replace the V random numbers of the Gumbel method, which cost more than the rest of the
    sampling; each choice is among few, so the resolution of float32 suffices.
    """
    batch, columns = scores.shape
    masses = jnp.exp(_below_highest(scores))
    size = min(_BLOCK, columns)
    masses = jnp.pad(masses, ((0, 0), (0, -columns % size))).reshape(batch, -1, size)
    uniform = _uniform(rng, batch)
    block = _invert(masses.sum(-1), uniform[:, 0])
    within = jnp.take_along_axis(masses, block[:, None, None], axis=1)[:, 0]
    return block * size + _invert(within, uniform[:, 1])


def _uniform(rng: Array, batch: int) -> Float[Array, "B 2"]:
    if rng.ndim:
        return jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(rng)
    return jax.random.uniform(rng, (batch, 2), jnp.float32)


def _invert(masses: Float[Array, "B M"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """First entry at which the running sum exceeds the given share of the total; never one of mass 0.

    Rounding may leave no such entry: then the heaviest one.
    """
    running = jnp.cumsum(masses, axis=-1)
    hit = (running > uniform[:, None] * running[:, -1:]) & (masses > 0)
    return jnp.where(hit.any(-1), first_argmax(hit), first_argmax(masses))
