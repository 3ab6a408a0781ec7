"""Parts of attention maps, so that a long text can be looked at: some layers, some heads, a window of its tokens."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.layers import AttentionOutput


class Part(NamedTuple):
    """What is kept of a model's weights.

    Attributes:
      layers: numbers of layers; None = all.
      heads: numbers of heads; None = all.
      window: the first of the tokens that look and the one behind the last; None = all.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    window: tuple[int, int] | None = None

    def rows(self, length: int) -> tuple[int, int]:
        """First and end of the rows of a text of that many tokens."""
        if self.window is None:
            return 0, length
        first, end = self.window
        return span(first, end - first, 0, length)


EVERYTHING = Part()


def make_part(layers: Any, heads: Any, window: Any) -> Part:
    """Arguments of that name, checked as far as they can be without weights.

    Raises:
      ValueError: numbers that are none, or a window that is not two of them in order.
    """
    return Part(as_numbers(layers, "layers"), as_numbers(heads, "heads"), as_window(window))


def as_numbers(given: Any, name: str) -> tuple[int, ...] | None:
    """Numbers of layers or heads from 0 on as a tuple.

    Raises:
      ValueError: something else, or none.
    """
    if given is None:
        return None
    try:
        numbers = tuple(operator.index(number) for number in given)
    except TypeError:
        raise ValueError(f"{name}={given!r} must be a sequence of whole numbers from 0 on") from None
    if not numbers or min(numbers) < 0:
        raise ValueError(f"{name}={given!r} must be numbers from 0 on, at least one")
    return numbers


def as_window(given: Any) -> tuple[int, int] | None:
    """The first token and the one behind the last as a tuple.

    Raises:
      ValueError: something else, or an empty window.
    """
    if given is None:
        return None
    try:
        first, end = (operator.index(number) for number in given)
    except (TypeError, ValueError):
        first, end = 0, 0
    if not 0 <= first < end:
        raise ValueError(f"window={given!r} must be the first token and the one behind the last, in order")
    return first, end


def check_numbers(numbers: tuple[int, ...] | None, known: Sequence[int], name: str, place: str) -> None:
    """Refuse layers or heads that are not there.

    Raises:
      ValueError: as said.
    """
    missing = [number for number in numbers or () if number not in known]
    if missing:
        held = f"in [{known[0]}, {known[-1]}]" if list(known) == list(range(known[0], known[-1] + 1)) else f"of {known}"
        raise ValueError(f"{name}={numbers} must be numbers {held} {place}")


def span(first: int, size: int, low: int, high: int) -> tuple[int, int]:
    """So many of the tokens [low, high) from the first on; the last ones of a text that is too short for it."""
    start = max(low, min(first, high - size))
    return start, min(start + size, high)


def cut(weights: Array, part: Part) -> Array:
    """The heads and the rows of weights [..., N, T, S]."""
    if part.heads is not None:
        weights = weights[..., jnp.array(part.heads), :, :]
    first, end = part.rows(weights.shape[-2])
    return weights[..., first:end, :]


def cutting(part: Part) -> Callable[..., Any]:
    """For ``flax.linen.intercept_methods``: every layer gives the part alone, so that the rest is never stacked."""

    def intercept(call: Callable, args: tuple, given: dict, context: Any) -> Any:
        output = call(*args, **given)
        if isinstance(output, AttentionOutput) and output.weights is not None:
            return output._replace(weights=cut(output.weights, part))
        return output

    return intercept
