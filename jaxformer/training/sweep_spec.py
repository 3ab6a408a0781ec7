"""Sweeps as text: `optimizer.learning_rate=1e-4,1e-3; seed=0..3` stands for the runs of all combinations."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxformer.training.config import RunConfig, copy_config
from jaxformer.training.overrides import ConfigError, apply_overrides, flatten

MOST_RUNS = 4096
"""Runs of a sweep at most."""

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_LONGEST_NAME = 150  # letters; folders may have 255
_OPENING, _CLOSING = "([{", ")]}"


class Axis(NamedTuple):
    """A field of the config and the values that it takes in turn.

    Attributes:
      path: the field's, as `optimizer.learning_rate`.
      texts: the values as given, ranges spelled out.
    """

    path: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
      name: of its folder: the swept fields with their values as given.
      settings: value of each swept field by path.
      given: its config.
    """

    name: str
    settings: dict[str, object]
    given: RunConfig


def parse_sweep(text: str) -> list[Axis]:
    """Reads what is swept over.

    `;` stands between fields and `,` between the values of one, neither within brackets or quotes; `a..b` are the whole
    numbers from a to b, both included.

    Args:
      text: such as `optimizer.learning_rate=1e-4,1e-3; seed=0..3`.

    Returns:
      The axes in the order given.

    Raises:
      ConfigError: a field without values, or twice, or more values than `MOST_RUNS`.
    """
    axes: dict[str, Axis] = {}
    for part in filter(None, (part.strip() for part in _split(text, ";"))):
        path, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not values:
            raise ConfigError(f"sweep: {part!r} needs values: {path or 'seed'}=1,2,3 or {path or 'seed'}=0..3")
        if path in axes:
            raise ConfigError(f"sweep: {path} is given twice")
        texts = tuple(itertools.islice(_values(path, values), MOST_RUNS + 1))
        if len(texts) > MOST_RUNS:
            raise ConfigError(f"sweep: {path} has more than {MOST_RUNS} values")
        axes[path] = Axis(path, texts)
    if not axes:
        raise ConfigError("sweep is empty, must be such as 'optimizer.learning_rate=1e-4,1e-3; seed=0..3'")
    return list(axes.values())


def _values(path: str, text: str) -> Iterator[str]:
    for value in (value.strip() for value in _split(text, ",")):
        if not value:
            raise ConfigError(f"sweep: {path}={text} has an empty value")
        found = _RANGE.fullmatch(value)
        if found is None:
            yield value
            continue
        first, last = map(int, found.groups())
        if last < first:
            raise ConfigError(f"sweep: {path}={value} must go upwards")
        yield from map(str, range(first, last + 1))


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
        if letter == separator and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def plan_runs(base: RunConfig, text: str) -> list[SweepRun]:
    """The runs of a sweep: one for each combination, the last field changing fastest.

    Args:
      base: the config that all begin with.
      text: what is swept over (see `parse_sweep`).

    Returns:
      The runs. Their names are made of their settings alone, so that a sweep with further values finds those that are
      there.

    Raises:
      ConfigError: as `parse_sweep`; or an unknown field (the nearest are listed), a value that is not of its type, a
        value twice, or more runs than `MOST_RUNS`.
    """
    axes = parse_sweep(text)
    count = math.prod(len(axis.texts) for axis in axes)
    if count > MOST_RUNS:
        raise ConfigError(f"sweep: these are {count} runs, must be at most {MOST_RUNS}")
    runs: dict[str, SweepRun] = {}
    labels = _labels([axis.path for axis in axes])
    for combination in itertools.product(*(_read_values(base, axis) for axis in axes)):
        texts = [text for text, _ in combination]
        given = base.with_overrides([f"{axis.path}={text}" for axis, text in zip(axes, texts)])
        name = _name([f"{label}={text}" for label, text in zip(labels, texts)], runs)
        settings = {axis.path: value for axis, (_, value) in zip(axes, combination)}
        runs[name] = SweepRun(name, settings, given)
    return list(runs.values())


def _read_values(base: RunConfig, axis: Axis) -> list[tuple[str, object]]:
    """The values of a field, each with its text; refuses those that are not of its type, or equal."""
    config = copy_config(base.config)
    read: dict[str, tuple[str, object]] = {}
    is_text = any(field.path == axis.path and field.kind is str for field in flatten(config))
    for text in axis.texts:
        text = _unquote(text) if is_text else text
        apply_overrides(config, [f"{axis.path}={text}"])
        value = next(field.value for field in flatten(config) if field.path == axis.path)
        key = repr(value + 0.0) if isinstance(value, float) else repr(value)  # -0.0 is 0.0
        if key in read:
            first = read[key][0]
            raise ConfigError(f"sweep: {axis.path} has the value {first} twice{_as_other(text, first)}")
        read[key] = (text, value)
    return list(read.values())


def _unquote(text: str) -> str:
    """Text without the quotes around it, which kept its separators apart."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _as_other(text: str, first: str) -> str:
    return "" if text == first else f", as {text} too"


def _labels(paths: list[str]) -> list[str]:
    """The last name of each path, or the whole path where two have the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return [path if last.count(name) > 1 else name for path, name in zip(paths, last)]


def _name(parts: list[str], taken: dict[str, SweepRun]) -> str:
    """A folder's name that is not taken."""
    name = ",".join(re.sub(r"[^A-Za-z0-9_.+=-]+", "_", part) for part in parts)[:_LONGEST_NAME]
    numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)
