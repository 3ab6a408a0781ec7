"""Which attention each layer has: names and arguments of a config resolved, and refused where they do not fit."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.attention import ATTENTION, PATTERNS, AttentionKind
from jaxformer.layers import argument_defaults, check_settings


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """The attention of one layer, and how a cache for it is made.

    Attributes:
      name: as the config says it.
      kind: the record of the function.
      args: keyword arguments of the function and of the module that makes its arrays, as sorted pairs.
      packing: whether packed documents are as alone.
      causal: whether it can be causal.
      bidirectional: whether it can be other than causal.
    """

    name: str
    kind: AttentionKind
    args: tuple[tuple[str, Any], ...]
    packing: bool
    causal: bool
    bidirectional: bool

    def init_cache(self, batch_size: int, max_length: int, num_kv_heads: int, head_dim: int, dtype: Any) -> Any:
        """An empty cache for one layer.

        Raises:
          ValueError: the kind cannot decode.
        """
        make = self.kind.init_cache
        if make is None:
            raise ValueError(f"attention={self.name!r} can't decode with a cache")
        args = {**argument_defaults(self.kind.name), **dict(self.args)}
        known = {name: value for name, value in args.items() if name in _parameters(make)}
        return make(batch_size, max_length, num_kv_heads, head_dim, dtype=dtype, **known)


def freeze(value: Any) -> Any:
    """Mappings as sorted pairs and lists as tuples, all the way down."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, freeze(entry)) for name, entry in value.items()))
    if isinstance(value, list | tuple):
        return tuple(freeze(entry) for entry in value)
    return value


def choose_attentions(names: str | tuple[str, ...], args: tuple) -> tuple[AttentionChoice, ...]:
    """The attentions that the layers go through in turn.

    Args:
      names: a name of ``ATTENTION`` or ``PATTERNS``, or several.
      args: sorted pairs of keyword arguments; for several names, pairs of a name and such pairs, or such pairs each.

    Raises:
      ValueError: an unknown name or argument, arguments of a name that is not chosen, or of another number of names.
    """
    if isinstance(names, str):
        return (choose_attention(names, args),)
    if not names:
        raise ValueError("attention=() must have at least one name")
    if any(len(entry) != 2 or not isinstance(entry[0], str) for entry in args):
        if len(args) != len(names):
            raise ValueError(f"attention_args has {len(args)} mappings for the {len(names)} of attention={names!r}")
        return tuple(choose_attention(name, entry) for name, entry in zip(names, args))
    by_name = dict(args)
    for name in by_name:
        if name not in names:
            raise ValueError(f"attention_args has {name!r}, which is not in attention={names!r}")
    return tuple(choose_attention(name, by_name.get(name, ())) for name in names)


def choose_attention(name: str, args: tuple[tuple[str, Any], ...]) -> AttentionChoice:
    """One attention by name; a pattern's arguments become the pattern."""
    if name in PATTERNS:
        pattern, kind = PATTERNS[name], ATTENTION["sparse"]
        known = _parameters(pattern.constructor)
        check_settings(kind, dict(args), pattern)
        own = {key: value for key, value in args if key in known}
        rest = tuple((key, value) for key, value in args if key not in known)
        made = ("pattern", pattern.constructor(**own))
        return AttentionChoice(
            name, kind, tuple(sorted([*rest, made])), pattern.packing, pattern.causal, pattern.bidirectional
        )
    if name not in ATTENTION:
        raise ValueError(f"attention={name!r} must be one of {', '.join(sorted([*ATTENTION, *PATTERNS]))}")
    kind = ATTENTION[name]
    check_settings(kind, dict(args))
    return AttentionChoice(name, kind, args, kind.packing, kind.causal, kind.bidirectional)


def check_attentions(config: Any) -> None:
    """Refuse what the chosen attentions cannot do, with the reason, before anything is compiled.

    Raises:
      ValueError: as said.
    """
    choices = choose_attentions(config.attention, config.attention_args)
    depths = {"num_layers": config.num_layers, "num_encoder_layers": config.num_encoder_layers}
    for field, depth in depths.items():
        if depth is not None and isinstance(depth, int) and depth % len(choices):
            raise ValueError(
                f"{field}={depth} must be a multiple of the {len(choices)} attentions {config.attention!r}"
            )
    for choice in choices:
        kind = choice.kind
        if config.architecture != "encoder" and not choice.causal:
            raise ValueError(
                f"attention={choice.name!r} can't be causal, as architecture={config.architecture!r} needs"
            )
        if config.architecture != "decoder" and not choice.bidirectional:
            raise ValueError(f"attention={choice.name!r} is causal only; architecture={config.architecture!r} is not")
        unmet = {
            f"num_kv_heads={config.num_kv_heads}": config.num_kv_heads not in (None, config.num_heads)
            and not kind.grouped_heads,
            f"positions={config.positions!r}": config.positions in ("alibi", "relative") and not kind.bias,
            f"attention_scale={config.attention_scale}": config.attention_scale is not None and not kind.scale,
            f"attention_dropout_rate={config.attention_dropout_rate}": bool(config.attention_dropout_rate)
            and not kind.dropout,
        }
        for field, is_unmet in unmet.items():
            if is_unmet:
                raise ValueError(f"attention={choice.name!r} does not support {field}")


def _parameters(function: Callable) -> set[str]:
    return set(inspect.signature(function).parameters)
