"""Adaptive computation time: every position decides after how many steps it halts.

Graves 2016, "Adaptive Computation Time for Recurrent Neural Networks", arXiv:1603.08983, section 2. With the halting
probability p(n) of step n = 1, 2, …, a position makes N = min{n : p(1) + … + p(n) >= threshold} steps, at most
max_steps; step n < N weighs p(n), step N weighs the remainder R = 1 - p(1) - … - p(N - 1). The weights sum to 1 at
every position, also where max_steps ends it, and N + R is what thinking cost it. Only R has a gradient: N is constant
but for jumps. Positions that don't exist never run: they weigh 0 and cost 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.checks import as_floating, as_integers
from jaxformer.functional.masks import as_mask
from jaxformer.functional.numerics import compute_dtype

MIXES = ("weighted", "exponential")


class Halting(NamedTuple):
    """Where every position stands.

    Attributes:
      running: bool [...], the position makes a further step.
      total: float [...], sum of its halting probabilities so far.
      num_steps: int32 [...], steps made: N once it has halted.
      remainder: float [...], R once it has halted, 0 before.
    """

    running: Bool[Array, "..."]
    total: Float[Array, "..."]
    num_steps: Int[Array, "..."]
    remainder: Float[Array, "..."]


class HaltingWeights(NamedTuple):
    """How much each step counts.

    Attributes:
      weights: float [S, ...], of each of S steps; they sum to 1 over the steps (to 0 where a position doesn't exist).
      num_steps: int32 [...], N.
      remainder: float [...], R.
    """

    weights: Float[Array, "S ..."]
    num_steps: Int[Array, "..."]
    remainder: Float[Array, "..."]


class AdaptiveOutput(NamedTuple):
    """What a loop over steps returns.

    Attributes:
      output: [..., D] in the state's dtype, the mix of all steps' states.
      state: [..., D], every position's state after its last step.
      carry: what the steps handed on.
      halting: of every position, after its last step.
      weights: float [max_steps, ...], or None after an early exit.
      outputs: what the steps gave out, stacked, or None after an early exit.
      executed: int32 [], steps that were computed.
    """

    output: Array
    state: Array
    carry: Any
    halting: Halting
    weights: Array | None
    outputs: Any
    executed: Array


def start_halting(mask: ArrayLike, dtype: Any = jnp.float32) -> Halting:
    """Nobody has made a step.

    Args:
      mask: bool or 0/1 int [...], True = the position exists.
      dtype: floating dtype of the sums.

    Returns:
      ``Halting``.
    """
    running = as_mask(mask)
    zeros = jnp.zeros(running.shape, dtype)
    return Halting(running, zeros, jnp.zeros(running.shape, jnp.int32), zeros)


def halt(
    halting: Halting, probability: Float[Array, "..."], is_last: ArrayLike, threshold: float
) -> tuple[Float[Array, "..."], Halting]:
    """One step of all positions that still run.

    Args:
      halting: before the step.
      probability: float [...], p of this step, in [0, 1].
      is_last: bool [], nobody may go on.
      threshold: 1 - epsilon, in (0, 1].

    Returns:
      The step's weights [...] (0 for positions that had halted) and ``Halting`` after it.
    """
    probability = probability.astype(halting.total.dtype)
    total = halting.total + probability
    halts = halting.running & ((total >= threshold) | jnp.asarray(is_last, bool))
    goes_on = halting.running & ~halts
    zeros = jnp.zeros_like(total)
    # Gradients go through the chosen branches alone; which branch that is, is a constant.
    remainder = jnp.where(halts, 1.0 - halting.total, zeros)
    weights = jnp.where(goes_on, probability, remainder)
    return weights, Halting(
        running=goes_on,
        total=jnp.where(halting.running, total, halting.total),
        num_steps=halting.num_steps + halting.running.astype(jnp.int32),
        remainder=halting.remainder + remainder,
    )


def halting_weights(
    probabilities: ArrayLike, *, threshold: float = 0.99, mask: ArrayLike | None = None
) -> HaltingWeights:
    """Weights of the steps from the halting probabilities that each step would give.

    Graves 2016, equations 5 to 10. At most S steps are made; the last one gets the remainder whatever its probability.

    Args:
      probabilities: floating [S, ...], in [0, 1]; those behind a position's last step are not read.
      threshold: 1 - epsilon, in (0, 1].
      mask: bool or 0/1 int [...], True = the position exists (None: all do).

    Returns:
      ``HaltingWeights``, at least float32.

    Raises:
      ValueError: probabilities without steps or not floating, or a threshold out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxformer.functional import halting_weights
        >>> halting = halting_weights(jnp.array([0.25, 0.25, 0.75]))
        >>> halting.weights.tolist(), int(halting.num_steps), float(halting.remainder)
        ([0.25, 0.25, 0.5], 3, 0.5)
    """
    probabilities = as_floating(probabilities, "probabilities")
    _check(len(probabilities), threshold, "weighted")
    exists = jnp.ones(probabilities.shape[1:], bool) if mask is None else jnp.asarray(mask)

    def body(halting: Halting, step: tuple[Array, Array]) -> tuple[Halting, Array]:
        weights, halting = halt(halting, step[0], step[1], threshold)
        return halting, weights

    is_last = jnp.arange(len(probabilities)) == len(probabilities) - 1
    start = start_halting(exists, compute_dtype(probabilities.dtype))
    halting, weights = jax.lax.scan(body, start, (probabilities, is_last))
    return HaltingWeights(weights, halting.num_steps, halting.remainder)


def ponder_cost(num_steps: ArrayLike, remainder: ArrayLike, *, mask: ArrayLike | None = None) -> Float[Array, ""]:
    """Mean of N + R over the positions that exist.

    Graves 2016, equations 11 to 14: the gradient is R's alone.

    Args:
      num_steps: int [...], N.
      remainder: floating [...], R.
      mask: bool or 0/1 int [...], True = the position exists (None: all do); padding enters neither sum nor count.

    Returns:
      A scalar in steps; 0 where no position exists.

    Raises:
      ValueError: shapes that differ, num_steps not integer or remainder not floating.
    """
    num_steps, remainder = as_integers(num_steps, "num_steps"), as_floating(remainder, "remainder", 0)
    if num_steps.shape != remainder.shape or (mask is not None and jnp.shape(mask) != remainder.shape):
        raise ValueError(
            f"num_steps {num_steps.shape}, remainder {remainder.shape} and mask "
            f"{None if mask is None else jnp.shape(mask)} must have one shape."
        )
    cost = num_steps.astype(remainder.dtype) + remainder
    if mask is None:
        return cost.mean()
    exists = as_mask(mask)
    count = jnp.maximum(exists.sum(), 1).astype(cost.dtype)
    return jnp.where(exists, cost, jnp.zeros_like(cost)).sum() / count


def adaptive_steps(
    step: Callable[[Any, Array, Any], tuple[Array, Array, Any, Any]],
    state: Float[Array, "*batch D"],
    max_steps: int,
    *,
    carry: Any = None,
    mask: ArrayLike | None = None,
    threshold: float = 0.99,
    mix: str = "weighted",
    early_exit: bool = False,
    unroll: bool = False,
) -> AdaptiveOutput:
    """Repeats a step until every position has halted; a halted position's state is copied from step to step.

    ``weighted``, Graves's equation 11: the output is the sum over n of weight(n) * state(n). ``exponential``, as in
    tensor2tensor: output(n) = weight(n) * state(n) + (1 - weight(n)) * output(n - 1) from output(0) = 0, in which
    later steps fade the earlier ones; there too the last step gets the remainder here, which tensor2tensor leaves out.
    Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819, section 2.2: halting of every position by itself.

    Args:
      step: (index int32 [], state [..., D], carry) -> (halting probability [...], new state [..., D], carry, outputs).
        It sees the copied states of halted positions; what it makes of them is dropped.
      state: floating [..., D], before the first step.
      max_steps: steps at most.
      carry: pytree, handed from step to step by all positions together.
      mask: bool or 0/1 int [...], True = the position exists (None: all do). Others never run: their output is 0.
      threshold: 1 - epsilon, in (0, 1]: a position halts once its probabilities sum to that.
      mix: ``weighted`` or ``exponential``.
      early_exit: stop when nobody runs any more. Same output, but a loop of unknown length: without reverse-mode
        gradient and stacked outputs, and ``carry`` as the last step that was computed left it.
      unroll: write the steps of a loop without early exit out one after the other.

    Returns:
      ``AdaptiveOutput``.

    Raises:
      ValueError: max_steps below 1, a threshold out of range, or an unknown mix.
    """
    _check(max_steps, threshold, mix)
    state = as_floating(state, "state")
    dtype = compute_dtype(state.dtype)
    exists = jnp.ones(state.shape[:-1], bool) if mask is None else jnp.asarray(mask)
    start: Any = (state, jnp.zeros(state.shape, dtype), start_halting(exists, dtype), carry)

    def advance(index: Any, looped: Any) -> tuple[Any, Any]:
        state, output, halting, carry = looped
        probability, proposed, carry, outputs = step(index, state, carry)
        weights, after = halt(halting, probability, index == max_steps - 1, threshold)
        running = halting.running[..., None]
        state = jnp.where(running, proposed, state)
        kept = output if mix == "weighted" else (1.0 - weights)[..., None] * output
        output = jnp.where(running, kept + weights[..., None] * proposed.astype(dtype), output)
        return (state, output, after, carry), (weights, outputs)

    if early_exit:

        def unfinished(loop: tuple[Array, tuple]) -> Array:
            return (loop[0] < max_steps) & loop[1][2].running.any()

        def body(loop: tuple[Array, tuple]) -> tuple[Array, tuple]:
            return loop[0] + 1, advance(loop[0], loop[1])[0]

        executed, looped = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), start))
        weights, outputs = None, None
    else:
        indices = jnp.arange(max_steps, dtype=jnp.int32)
        looped, (weights, outputs) = jax.lax.scan(lambda c, i: advance(i, c), start, indices, unroll=unroll)
        executed = jnp.asarray(max_steps, jnp.int32)
    state, output, halting, carry = looped
    return AdaptiveOutput(output.astype(state.dtype), state, carry, halting, weights, outputs, executed)


def _check(max_steps: int, threshold: float, mix: str) -> None:
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}; it must be at least 1.")
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; it must be in (0, 1].")
    if mix not in MIXES:
        raise ValueError(f"mix is {mix!r}; it must be one of {', '.join(MIXES)}.")
