"""How noisy minibatch gradients are: their mean and variance against the batch size, and the gradient noise scale."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Shaped

ExampleLoss = Callable[[Any, Any], Array]


class NoiseScale(NamedTuple):
    """Noise of the gradient of one example, beside the gradient itself.

    Attributes:
      noise_scale: trace / squared_gradient, in examples: the batch size at which noise and gradient are equally large.
        Well below it twice the batch saves half the steps, well above it next to nothing.
      squared_gradient: unbiased estimate of the squared norm of the true gradient [|G|²]; may be negative by chance.
      trace: unbiased estimate of the sum of the variances of one example's gradient [tr Σ].
    """

    noise_scale: Float[Array, ""]
    squared_gradient: Float[Array, ""]
    trace: Float[Array, ""]


class MinibatchStatistics(NamedTuple):
    """Minibatch gradients of several batch sizes against the gradient over all examples.

    Attributes:
      batch_sizes: int [S].
      bias: float [S], the norm of (mean of the drawn gradients - full gradient). An unbiased estimate has about
        sqrt(variance / num_draws), which goes to 0 with more draws.
      variance: float [S], mean squared distance of the drawn gradients from the full one.
      expected_variance: float [S], what sampling theory says it is.
    """

    batch_sizes: Int[Array, "S"]
    bias: Float[Array, "S"]
    variance: Float[Array, "S"]
    expected_variance: Float[Array, "S"]


def noise_scale_of_batches(
    small_squares: Float[Array | np.ndarray, "..."],
    big_squares: Float[Array | np.ndarray, "..."],
    *,
    small_size: int,
    big_size: int,
) -> NoiseScale:
    """The gradient noise scale from squared norms of gradients at two batch sizes.

    A gradient over B examples has E|g|² = |G|² + tr Σ / B; two sizes b < B give both unknowns:

        |G|² = (B |g_B|² - b |g_b|²) / (B - b),    tr Σ = (|g_b|² - |g_B|²) / (1/b - 1/B)

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1. Their ratio,
    the paper's B_simple, is biased, so give the squares of many batches: means come before the ratio. Data-parallel
    training has both for nothing: the devices' gradients before their mean, and the mean.

    Args:
      small_squares: squared norms of gradients over small_size examples each, of any number of batches.
      big_squares: the same over big_size.
      small_size: examples, at least 1.
      big_size: examples, above small_size.

    Returns:
      The noise scale and what it is made of.

    Raises:
      ValueError: sizes out of range.
    """
    if not 1 <= small_size < big_size:
        raise ValueError(f"small_size is {small_size} and big_size {big_size}, must be 1 <= small_size < big_size")
    small, big = (jnp.asarray(squares).mean() for squares in (small_squares, big_squares))
    squared_gradient = (big_size * big - small_size * small) / (big_size - small_size)
    trace = (small - big) / (1 / small_size - 1 / big_size)
    return NoiseScale(trace / squared_gradient, squared_gradient, trace)


def noise_scale_of_examples(loss: ExampleLoss, params: Any, examples: Any) -> NoiseScale:
    """The gradient noise scale from the gradients of single examples, drawn independently.

    tr Σ = sum over i of |g_i - mean|² / (n - 1), and |G|² = |mean|² - tr Σ / n (McCandlish et al. 2018,
    arXiv:1812.06162, whose B_simple is their ratio). The gradients are taken one after another, twice: memory for two
    of them is enough.

    Args:
      loss: of parameters and one example, to a scalar.
      params: tree of floating arrays.
      examples: tree of arrays, with a leading axis of n >= 2 examples.

    Returns:
      The noise scale and what it is made of.

    Raises:
      ValueError: fewer than two examples, or leaves that disagree on their number.
    """
    count = _num_examples(examples)
    if count < 2:
        raise ValueError(f"examples has {count}, must have at least 2 for a variance")
    mean, spread = _mean_and_spread(loss, params, examples)
    trace = spread / (count - 1)
    squared_gradient = mean @ mean - trace / count
    return NoiseScale(trace / squared_gradient, squared_gradient, trace)


def expected_variance(trace: Any, batch_size: Any, num_examples: int, *, replacement: bool = False) -> Any:
    """Mean squared distance of a minibatch's mean gradient from the mean over all N examples.

    With tr S = sum over i of |g_i - mean|² / (N - 1), a batch of B without replacement has (tr S / B) (1 - B / N),
    which is 0 for the whole set; with replacement it has (tr S / B) (1 - 1 / N).

    Args:
      trace: tr S.
      batch_size: B, a number or an array of them.
      num_examples: N.
      replacement: whether an example may be drawn twice.

    Returns:
      Like ``batch_size``.
    """
    left = 1 / num_examples if replacement else batch_size / num_examples
    return trace / batch_size * (1 - left)


def minibatch_statistics(
    loss: ExampleLoss,
    params: Any,
    examples: Any,
    batch_sizes: Sequence[int],
    *,
    num_draws: int = 200,
    replacement: bool = False,
    rng: Shaped[Array, "..."] | None = None,
) -> MinibatchStatistics:
    """Draws minibatches of each size, and says how their gradients scatter about the gradient over all examples.

    Args:
      loss: of parameters and one example, to a scalar; that of a batch is the mean.
      params: tree of floating arrays.
      examples: tree of arrays, with a leading axis of N >= 2 examples.
      batch_sizes: examples; without replacement at most N.
      num_draws: minibatches of each size.
      replacement: whether one minibatch may have an example twice.
      rng: of the draws; None = ``jax.random.key(0)``.

    Returns:
      A row for each size.

    Raises:
      ValueError: a number out of range, or leaves that disagree on the number of examples.
    """
    count = _num_examples(examples)
    if count < 2 or num_draws < 1:
        raise ValueError(f"examples has {count}, must have at least 2; num_draws is {num_draws}, must be at least 1")
    for size in batch_sizes:
        if size < 1 or (size > count and not replacement):
            raise ValueError(f"batch_sizes has {size}, must be from 1 to the {count} examples")
    rng = jax.random.key(0) if rng is None else rng
    full, spread = _mean_and_spread(loss, params, examples)

    def draw(rng: Array, size: int) -> Float[Array, "P"]:
        rows = jax.random.choice(rng, count, (size,), replace=replacement)
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], examples)
        return ravel_pytree(jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, batch).mean())(params))[0]

    def scatter(rng: Array, size: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
        apart = jax.lax.map(lambda rng: draw(rng, size) - full, jax.random.split(rng, num_draws))
        return jnp.linalg.norm(apart.mean(0)), (apart**2).sum(1).mean()

    found = [
        jax.jit(scatter, static_argnums=1)(jax.random.fold_in(rng, place), size)
        for place, size in enumerate(batch_sizes)
    ]
    bias, variance = (jnp.stack(part) for part in zip(*found))
    sizes = jnp.asarray(batch_sizes, jnp.int32)
    wanted = expected_variance(spread / (count - 1), sizes.astype(variance.dtype), count, replacement=replacement)
    return MinibatchStatistics(sizes, bias, variance, wanted)


def _mean_and_spread(loss: ExampleLoss, params: Any, examples: Any) -> tuple[Float[Array, "P"], Float[Array, ""]]:
    """Mean of the examples' gradients, and the sum of their squared distances from it."""

    @jax.jit
    def compute(params: Any, examples: Any) -> tuple[Float[Array, "P"], Float[Array, ""]]:
        def gradient(example: Any) -> Float[Array, "P"]:
            flat = ravel_pytree(jax.grad(loss)(params, example))[0]
            return flat.astype(jnp.promote_types(flat.dtype, jnp.float32))

        def total(function: Callable[[Any], Array]) -> Array:
            start = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], examples)))
            return jax.lax.scan(lambda sum, example: (sum + function(example), None), start, examples)[0]

        mean = total(gradient) / _num_examples(examples)
        return mean, total(lambda example: ((gradient(example) - mean) ** 2).sum())

    return compute(params, jax.tree.map(jnp.asarray, examples))


def _num_examples(examples: Any) -> int:
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(examples)}
    if len(counts) != 1 or () in counts:
        raise ValueError(f"examples has leading axes of {sorted(counts)}, must have one number of examples")
    return counts.pop()[0]
