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

# What the layer gives the function by its own fields and call.
_GIVEN = {"key_mask", "causal", "query_positions", "key_positions", "query_segments", "key_segments", "mask", "bias"}
_GIVEN |= {"scale", "dropout_rate", "rng"}


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
    """Refuses settings that nothing of the kind knows or that the layer makes itself, and the lack of needed ones.

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
    module = ATTENTION_ARGUMENTS.get(kind.name)
    made = {*kind.arguments, *(module.makes if module else ())} - optional
    own = set(parameters) - {"query", "key", "query_key", "value", *made, *_GIVEN} | optional
    for setting in settings:
        if setting in parameters and setting in made:
            raise ValueError(f"{field}_args has {setting!r}, which {field}={name!r} makes itself")
        if setting in parameters and setting in _GIVEN:
            raise ValueError(f"{field}_args has {setting!r}, which the layer gives {field}={name!r} itself")
        if setting not in own:
            raise ValueError(
                f"{field}_args has {setting!r}, which {field}={name!r} does not know; it knows {', '.join(sorted(own))}"
            )
    needed = {key for key in own - optional if parameters[key].default is inspect.Parameter.empty}
    if needed - set(settings):
        raise ValueError(f"{field}={name!r} needs {', '.join(sorted(needed - set(settings)))} in {field}_args")


def check_decoding(kind: AttentionKind, settings: Mapping[str, Any], name: str, field: str = "attention") -> None:
    """Refuses decoding with settings that change what whole sequences get and that no step can honour.

    Args:
      kind: the record.
      settings: keyword arguments by name, as in ``attention_args``; one that is None or False is not set.
      name: what the choice is called.
      field: what the choice of the kind is called.

    Raises:
      ValueError: a kind that can't decode, or such a setting, by name.
    """
    if kind.step is None or kind.init_cache is None:
        raise ValueError(f"{field}={name!r} can't decode with a cache")
    honoured = {*kind.whole_only, *argument_defaults(kind.name)}
    for function in (kind.step, kind.init_cache):
        honoured |= set(inspect.signature(function).parameters)
    known = set(inspect.signature(kind.function).parameters)
    for setting in sorted(known & set(settings) - honoured):
        if settings[setting] is not None and settings[setting] is not False:
            raise ValueError(f"{field}={name!r} can't decode with a cache with {setting} in {field}_args")
