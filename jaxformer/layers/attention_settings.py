"""The settings of each kind of attention: which module makes its arrays, and what ``attention_args`` may hold."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from jaxformer.attention import AttentionKind, PatternKind
from jaxformer.layers.attention_arguments import AttentionArguments
from jaxformer.layers.attention_arrays import (
    AdditiveArguments,
    BilinearArguments,
    ClusteredArguments,
    CompressedArguments,
    ConcatArguments,
    KernelArguments,
    LinformerArguments,
    LongformerArguments,
    LshArguments,
    PerformerArguments,
    RoutingArguments,
    SinkhornArguments,
    SparseArguments,
)

ATTENTION_ARGUMENTS: dict[str, type[AttentionArguments]] = {
    "additive": AdditiveArguments,
    "bilinear": BilinearArguments,
    "clustered": ClusteredArguments,
    "compressed": CompressedArguments,
    "concat": ConcatArguments,
    "kernel": KernelArguments,
    "linformer": LinformerArguments,
    "longformer": LongformerArguments,
    "lsh": LshArguments,
    "performer": PerformerArguments,
    "routing": RoutingArguments,
    "sinkhorn": SinkhornArguments,
    "sparse": SparseArguments,
}
"""The module of each kind that needs arrays, or can be given some."""


def argument_defaults(kind: str) -> dict[str, Any]:
    """What ``attention_args`` may set of the module of a kind, with its defaults; nothing where it needs no arrays."""
    if kind not in ATTENTION_ARGUMENTS:
        return {}
    common = {field.name for field in dataclasses.fields(AttentionArguments)}
    fields = dataclasses.fields(ATTENTION_ARGUMENTS[kind])
    return {field.name: field.default for field in fields if field.name not in common}


def check_settings(
    kind: AttentionKind, settings: Mapping[str, Any], pattern: PatternKind | None = None, field: str = "attention"
) -> None:
    """Refuses settings that nothing of the kind knows, and the lack of needed ones.

    Args:
      kind: the record.
      settings: keyword arguments by name, as in ``attention_args``.
      pattern: of sparse attention by a pattern's name: settings are the constructor's too.
      field: what the choice of the kind is called.

    Raises:
      ValueError: as said, with the names that there are.
    """
    name = kind.name if pattern is None else pattern.name
    parameters = dict(inspect.signature(kind.function).parameters)
    if pattern is not None:
        del parameters["pattern"]
        parameters |= inspect.signature(pattern.constructor).parameters
    optional = set(argument_defaults(kind.name))
    own = set(parameters) - {"query", "key", "query_key", "value", *kind.arguments} | optional
    for setting in settings:
        if setting not in own:
            raise ValueError(
                f"{field}_args has {setting!r}, which {field}={name!r} does not know; it knows {', '.join(sorted(own))}"
            )
    needed = {key for key in own - optional if parameters[key].default is inspect.Parameter.empty}
    if needed - set(settings):
        raise ValueError(f"{field}={name!r} needs {', '.join(sorted(needed - set(settings)))} in {field}_args")
