"""Overrides of a config from text: `train.steps=1e3` is read by the type that the config's own field has."""

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from ml_collections import ConfigDict, FieldReference

from jaxformer.training.nearest import nearest

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


class ConfigError(ValueError):
    """A config, or a change to one, that cannot be used; the message says why in one sentence."""


class Field(NamedTuple):
    """A field of a config; `optional` says whether None is allowed."""

    path: str
    kind: type
    value: object
    optional: bool


def flatten(config: ConfigDict) -> Iterator[Field]:
    """Yields every field of a config, in alphabetical order.

    None is allowed where the field is a placeholder (`ml_collections.config_dict.placeholder`) or None without a type.
    """
    for key, field in config.items(preserve_field_references=True):
        value = field.get() if isinstance(field, FieldReference) else field
        if isinstance(value, ConfigDict):
            for inner in flatten(value):
                yield inner._replace(path=f"{key}.{inner.path}")
        else:
            yield Field(key, config.get_type(key), value, isinstance(field, FieldReference) or field is None)


def set_path(config: ConfigDict, path: str, value: object) -> None:
    """Sets the field at a dotted path."""
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    config[name] = value


def apply_overrides(config: ConfigDict, overrides: Sequence[str]) -> None:
    """Applies overrides in order, each `a.b=value`, in place; a later one wins.

    The value is read by the type of the field: `true`, `false`, `1` or `0` for bool; `10_000` or `1e3` for int (`2.5`
    is refused); `1` is 1.0 for float; `(3, 4)`, `3, 4` or `3` for a tuple; `None` where the field is a placeholder;
    any text for str. A bool may be set to true by its name alone.

    Args:
      config: the config to change.
      overrides: the changes, without the `--config.` of the command line.

    Raises:
      ConfigError: unknown name (the nearest ones are listed), a section instead of a field, or text that is no value of
        the field's type.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        fields = {field.path: field for field in flatten(config)}
        if path not in fields:
            raise ConfigError(_unknown(path, fields))
        if not equals and fields[path].kind is not bool:
            raise ConfigError(f"config.{path} needs a value: --config.{path}={_example(fields[path].kind)}")
        set_path(config, path, _parse(text if equals else "true", fields[path]))


def _unknown(path: str, fields: Iterable[str]) -> str:
    inside = [name for name in fields if name.startswith(f"{path}.")]
    if inside:
        return f"config.{path} is a section, not a field; its fields are {', '.join(inside)}"
    return f"config has no field {path}; {nearest(path, fields)}"


def _parse(text: str, field: Field) -> object:
    """The value that `text` means for a field."""
    if text.strip() in ("None", "none", "null") and (field.optional or field.kind is not str):
        if not field.optional:
            raise ConfigError(f"config.{field.path} cannot be None: it must be {_describe(field)}")
        return None
    try:
        if field.kind in (tuple, list):
            return field.kind(_parse_sequence(text, field.value))
        parse = _SCALARS.get(field.kind, _parse_literal)
        return parse(text if field.kind is str else text.strip())
    except ValueError:
        raise ConfigError(f"config.{field.path} must be {_describe(field)}, got {text!r}") from None


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _parse_int(text: str) -> int:
    try:
        number = Decimal(text.replace("_", "") if not text.startswith("_") else "")
    except InvalidOperation:
        raise ValueError(text) from None
    if not number.is_finite() or number != number.to_integral_value() or abs(number) >= 2**63:
        raise ValueError(text)
    return int(number)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError(text)
    return number


def _parse_literal(text: str) -> object:
    """A Python literal, or the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _unquote(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _parse_sequence(text: str, current: object) -> list[object]:
    """The items of `(3, 4)`, `[3, 4]`, `3, 4` or `3`, each read by the type of those that stand there now."""
    text = text.strip()
    kinds = {type(item) for item in current} if isinstance(current, (tuple, list)) else set()
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind not in _SCALARS:  # nothing there, mixed or nested: a literal says it all
        value = _parse_literal(text)
        if isinstance(value, (tuple, list)):
            return list(value)
        if not isinstance(value, str):
            return [value]
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip()
    items = [item.strip() for item in text.split(",")]
    if items[-1] == "":  # "(3,)" and "()"
        items.pop()
    parse = _SCALARS.get(kind, _parse_literal)
    return [parse(_unquote(item) if kind is str else item) for item in items]


def _describe(field: Field) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        tuple: "a sequence such as (3, 4) of the same kind as its default",
        list: "a sequence such as (3, 4) of the same kind as its default",
    }
    return names.get(field.kind, f"a {field.kind.__name__}") + (" or None" if field.optional else "")


def _example(kind: type) -> str:
    return {int: "10", float: "0.1", tuple: "3,4", list: "3,4"}.get(kind, "…")


_SCALARS: dict[type | None, Callable[[str], object]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: str,
}
