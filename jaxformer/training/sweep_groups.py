"""Which runs of a sweep are trained by one program: those whose configs differ in numbers that may be traced."""

import itertools
import json
from collections.abc import Iterable, Sequence

from ml_collections import ConfigDict

from jaxformer.training.config import to_json
from jaxformer.training.overrides import ConfigError, Field, flatten
from jaxformer.training.sweep_spec import SweepRun

_SECTIONS = ("optimizer.", "schedule.")
_SHAPING = ("optimizer.layer_decay",)  # numbers that tables of the host are made from


def may_be_traced(field: Field) -> bool:
    """Whether runs with different values of a field can be one program: the seed, and rates and their like.

    None is another structure than a number, and whole numbers count steps or layers.
    """
    if field.path == "seed":
        return True
    return field.path.startswith(_SECTIONS) and isinstance(field.value, float) and field.path not in _SHAPING


def traced_paths(config: ConfigDict, swept: Iterable[str]) -> tuple[str, ...]:
    """Those of the swept fields that are numbers of one program, the seed apart."""
    fields = {field.path: field for field in flatten(config)}
    return tuple(path for path in swept if path != "seed" and may_be_traced(fields[path]))


def make_groups(runs: Sequence[SweepRun], max_together: int | None = None) -> list[list[SweepRun]]:
    """Sorts runs into groups, each of which one program trains.

    Args:
      runs: all of one sweep.
      max_together: runs of a group at most, which bounds the memory; None = any number. Larger groups are cut into
        parts as equal as can be.

    Returns:
      The groups, in the order of their first runs.

    Raises:
      ConfigError: `max_together` is below 1.
    """
    if max_together is not None and max_together < 1:
        raise ConfigError(f"max_together is {max_together}, must be at least 1")
    groups: dict[str, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(_structure(run), []).append(run)
    return [part for group in groups.values() for part in _cut(group, max_together or len(group))]


def _structure(run: SweepRun) -> str:
    """The config without the swept numbers that may be traced, as text."""
    stored = to_json(run.given.config)
    for path in (*traced_paths(run.given.config, run.settings), "seed"):
        *sections, name = path.split(".")
        values = stored["config"]
        for section in sections:
            values = values[section]
        values[name] = "a number"
    return json.dumps(stored, sort_keys=True)


def _cut(group: list[SweepRun], most: int) -> list[list[SweepRun]]:
    count = -(-len(group) // most)
    borders = [len(group) * part // count for part in range(count + 1)]
    return [group[first:last] for first, last in itertools.pairwise(borders)]
