"""Which attention each layer has: names and arguments of a config resolved, and refused where they do not fit."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.attention import ATTENTION, PATTERNS, AttentionKind
from jaxformer.layers import argument_defaults, check_decoding, check_settings


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """The attention of one layer, and how a cache for it is made.

    Attributes:
      name: as the config says it.
      kind: the record of the function.
      args: keyword arguments of the function and of the module that makes its arrays, as sorted pairs.
      packing: whether packed documents are as alone; of a cross-attention, packed pairs.
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
          ValueError: the kind cannot decode, or not with these arguments.
        """
        check_decoding(self.kind, dict(self.args), self.name)
        make: Any = self.kind.init_cache
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


def choose_attentions(
    names: str | tuple[str, ...], args: tuple, field: str = "attention"
) -> tuple[AttentionChoice, ...]:
    """The attentions that the layers go through in turn.

    Args:
      names: a name of ``ATTENTION`` or ``PATTERNS``, or several.
      args: sorted pairs of keyword arguments; for several names, pairs of a name and such pairs, or such pairs each.
      field: of the config, where the names stand.

    Raises:
      ValueError: an unknown name or argument, arguments of a name that is not chosen, or of another number of names.
    """
    if isinstance(names, str):
        return (choose_attention(names, args, field),)
    if not names:
        raise ValueError(f"{field}=() must have at least one name")
    if any(len(entry) != 2 or not isinstance(entry[0], str) for entry in args):
        if len(args) != len(names):
            raise ValueError(f"{field}_args has {len(args)} mappings for the {len(names)} of {field}={names!r}")
        return tuple(choose_attention(name, entry, field) for name, entry in zip(names, args))
    by_name = dict(args)
    for name in by_name:
        if name not in names:
            raise ValueError(f"{field}_args has {name!r}, which is not in {field}={names!r}")
    return tuple(choose_attention(name, by_name.get(name, ()), field) for name in names)


def choose_attention(name: str, args: tuple[tuple[str, Any], ...], field: str = "attention") -> AttentionChoice:
    """One attention by name; a pattern's arguments become the pattern."""
    if name in PATTERNS:
        pattern, kind = PATTERNS[name], ATTENTION["sparse"]
        known = _parameters(pattern.constructor)
        check_settings(kind, dict(args), pattern, field)
        own = {key: value for key, value in args if key in known}
        rest = tuple((key, value) for key, value in args if key not in known)
        made = ("pattern", pattern.constructor(**own))
        packing = pattern.packing and not _excluding(kind, rest, "packing")
        return AttentionChoice(name, kind, tuple(sorted([*rest, made])), packing, pattern.causal, pattern.bidirectional)
    if name not in ATTENTION:
        raise ValueError(f"{field}={name!r} must be one of {', '.join(sorted([*ATTENTION, *PATTERNS]))}")
    kind = ATTENTION[name]
    check_settings(kind, dict(args), field=field)
    packing = kind.packing and not _excluding(kind, args, "packing")
    causal = kind.causal and not _excluding(kind, args, "causal")
    return AttentionChoice(name, kind, args, packing, causal, kind.bidirectional)


def choose_cross_attention(name: Any, args: tuple[tuple[str, Any], ...]) -> AttentionChoice:
    """The attention from a decoder to an encoder.

    Raises:
      ValueError: one that is within one sequence, or that can't be decoded as it is trained.
    """
    kinds = {**ATTENTION, **dict.fromkeys(PATTERNS, ATTENTION["sparse"])}
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        names = ", ".join(sorted(name for name, kind in ATTENTION.items() if kind.cross and not kind.mixes_queries))
        raise ValueError(f"cross_attention={name!r} must be one of {names}")
    if not kind.cross:
        raise ValueError(
            f"cross_attention={name!r} can't be between two sequences: its queries and keys are the same tokens"
        )
    if kind.mixes_queries:
        raise ValueError(
            f"cross_attention={name!r} can't be decoded: what a query gets depends on the queries after it, too"
        )
    choice = choose_attention(name, args, "cross_attention")
    for excluding in _excluding(kind, args, "cross"):
        raise ValueError(f"cross_attention={name!r} can't be between two sequences with {excluding}")
    return dataclasses.replace(choice, packing=kind.cross_segments)


def check_attentions(config: Any) -> None:
    """Refuse what the chosen attentions cannot do, with the reason, before anything is compiled.

    Raises:
      ValueError: as said.
    """
    architecture = config.architecture
    choices = choose_attentions(config.attention, config.attention_args)
    depths = {"num_layers": config.num_layers}
    if config.encoder_attention is None:
        depths["num_encoder_layers"] = config.num_encoder_layers
    _check_depths("attention", config.attention, choices, depths)
    for choice in choices:
        if architecture != "encoder" and not choice.causal:
            also = "; an encoder's own is encoder_attention" if architecture == "encoder_decoder" else ""
            given = "".join(f" with {argument}" for argument in _excluding(choice.kind, choice.args, "causal"))
            raise ValueError(f"attention={choice.name!r}{given} can't be causal, as {architecture=} needs{also}")
        if architecture != "decoder" and config.encoder_attention is None and not choice.bidirectional:
            raise ValueError(f"attention={choice.name!r} is causal only; {architecture=} is not")
        _check_support(config, "attention", choice)
    if architecture == "encoder_decoder":
        _check_other_attentions(config)
        return
    for field, default in (("encoder_attention", None), ("cross_attention", "dense")):
        if getattr(config, field) != default or getattr(config, f"{field}_args"):
            raise ValueError(f"{field}={getattr(config, field)!r} needs architecture='encoder_decoder'")


def _check_other_attentions(config: Any) -> None:
    """The encoder's own attention and the cross-attention of an encoder-decoder."""
    names = config.encoder_attention
    if names is None and config.encoder_attention_args:
        raise ValueError("encoder_attention_args needs encoder_attention, which is None: it is then as attention")
    if names is not None:
        choices = choose_attentions(names, config.encoder_attention_args, "encoder_attention")
        field = "num_layers" if config.num_encoder_layers is None else "num_encoder_layers"
        _check_depths("encoder_attention", names, choices, {field: getattr(config, field)})
        for choice in choices:
            if not choice.bidirectional:
                raise ValueError(f"encoder_attention={choice.name!r} is causal only; an encoder is not")
            _check_support(config, "encoder_attention", choice)
    across = choose_cross_attention(config.cross_attention, config.cross_attention_args)
    _check_support(config, "cross_attention", across, biased=False)


def _check_depths(field: str, names: Any, choices: tuple[AttentionChoice, ...], depths: dict[str, Any]) -> None:
    """Refuse numbers of layers that the attentions do not divide."""
    for name, depth in depths.items():
        if isinstance(depth, int) and depth % len(choices):
            raise ValueError(f"{name}={depth} must be a multiple of the {len(choices)} attentions {names!r} ({field})")


def _check_support(config: Any, field: str, choice: AttentionChoice, biased: bool = True) -> None:
    """Refuse settings of the config that the kind has no argument for; only ``biased`` ones see positions' bias."""
    kind = choice.kind
    unmet = {
        f"num_kv_heads={config.num_kv_heads}": config.num_kv_heads not in (None, config.num_heads)
        and not kind.grouped_heads,
        f"positions={config.positions!r}": biased and config.positions in ("alibi", "relative") and not kind.bias,
        f"attention_scale={config.attention_scale}": config.attention_scale is not None and not kind.scale,
        f"attention_dropout_rate={config.attention_dropout_rate}": bool(config.attention_dropout_rate)
        and not kind.dropout,
    }
    for setting, is_unmet in unmet.items():
        if is_unmet:
            raise ValueError(f"{field}={choice.name!r} does not support {setting}")


def _excluding(kind: AttentionKind, args: tuple[tuple[str, Any], ...], what: str) -> list[str]:
    """The arguments, set among these, with which the kind can't be what it can be without them."""
    given = {name for name, value in args if value is not None and value is not False}
    return [name for name, excluded in kind.excludes if excluded == what and name in given]


def _parameters(function: Callable) -> set[str]:
    return set(inspect.signature(function).parameters)
