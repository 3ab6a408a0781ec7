"""Parameters by their paths: the path as text, what patterns find, and which leading axes are those of stacks."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxformer.training.overrides import ConfigError

_STACKS = re.compile(r"(?:^|/)(?:layers|experts)(?=/)")


def parameter_path(path: tuple[Any, ...]) -> str:
    """Returns a tree path as text: keys joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(params: Any, value: Callable[[str], Any]) -> Any:
    """A tree like the parameters, with what a function says of each path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: value(parameter_path(path)), params)


def shapes_by_path(params: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by path, in the tree's order."""
    return {parameter_path(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def stack_axes(path: str) -> int:
    """How many leading axes of a parameter count parameters rather than belong to one: layers (or periods), experts.

    ``decoder/layers/…`` has one, ``decoder/layers/period_1/mlp/experts/…`` two, ``decoder/layers_3/…`` none.
    """
    return len(_STACKS.findall(path))


def compile_pattern(field: str, pattern: Any, paths: Iterable[str]) -> re.Pattern[str]:
    """A regular expression that finds at least one parameter.

    Args:
      field: what the pattern was given as.
      pattern: the expression's text.
      paths: of all parameters.

    Raises:
      ValueError: the pattern is no regular expression, or finds no parameter; then the message lists the paths.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{field} pattern {pattern!r} is not a regular expression: {error}") from error
    paths = list(paths)
    if not any(map(compiled.search, paths)):
        raise ValueError(f"{field} pattern {pattern!r} matches no parameter; there are: {', '.join(paths)}")
    return compiled
