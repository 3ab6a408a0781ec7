"""Flags: `--name=value` for a command, `--config.a.b=value` for its config, `--flagfile=F` for flags in a file."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jaxformer.training.nearest import nearest

_OVERRIDE = "--config."
_FLAGFILE = "--flagfile"
_DEEPEST = 8


class UsageError(ValueError):
    """A command line that cannot be understood."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help shows the flags)")


def make_parser(commands: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """The parser of all commands; each is a module with SUMMARY, add_arguments(parser) and run(arguments)."""
    import jaxformer

    parser = _Parser(prog="jaxformer", description="Train, evaluate and sample Transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=jaxformer.__version__)
    parser.add_argument(_FLAGFILE, metavar="F", help="read further flags from a file, one a line")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=_Parser)
    for name, module in commands.items():
        subparser = subparsers.add_parser(
            name, help=module.SUMMARY, description=module.__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(subparser)
        needed = [action for action in subparser._actions if action.required and action.option_strings]
        for action in needed:  # asked for after the flags that do not exist, which may be the needed one misspelt
            action.required = False
        subparser.set_defaults(run=module.run, parser=subparser, needed=needed)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; its config overrides are in `overrides`, each `a.b=value`.

    Raises:
      UsageError: unknown command or flag (the nearest ones are listed), or a value that is missing or wrong.
    """
    rest, overrides = split_overrides(expand_flagfiles(arguments))
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [name for action in parsed.parser._actions for name in action.option_strings if name.startswith("--")]
        name = unknown[0].partition("=")[0]
        raise UsageError(f"{parsed.command} has no argument {unknown[0]}; {nearest(name, known)}")
    missing = [action.option_strings[0] for action in parsed.needed if getattr(parsed, action.dest) is None]
    if missing:
        raise UsageError(f"{parsed.command} needs {', '.join(missing)} ({parsed.parser.prog} --help shows the flags)")
    if overrides and not getattr(parsed, "takes_overrides", False):
        raise UsageError(f"{parsed.command} takes no config, got {_OVERRIDE}{overrides[0]}")
    parsed.overrides = overrides
    return parsed


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--config.a.b=value` and `--config.a.b value` out of a command line.

    Returns:
      The other arguments, and the overrides without `--config.`; a lone `--config.a.b` stays without a value.
    """
    rest, overrides = [], []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if not argument.startswith(_OVERRIDE):
            rest.append(argument)
            continue
        override = argument.removeprefix(_OVERRIDE)
        if "=" not in override and queue and not queue[0].startswith("--"):
            override += f"={queue.pop(0)}"
        overrides.append(override)
    return rest, overrides


def expand_flagfiles(arguments: Sequence[str], depth: int = 0) -> list[str]:
    """Puts the flags of each `--flagfile=F` in its place: one a line, taken as it stands, without the quotes that
    a shell would need; `#` and `//` begin a comment line.

    Raises:
      UsageError: a file cannot be read, or files name each other in a circle.
    """
    if depth > _DEEPEST:
        raise UsageError(f"flag files are nested more than {_DEEPEST} deep")
    expanded: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, value = argument.partition("=")
        if name != _FLAGFILE:
            expanded.append(argument)
            continue
        if not equals and not queue:
            raise UsageError(f"{_FLAGFILE} needs a file: {_FLAGFILE}=F")
        expanded += expand_flagfiles(_read_flagfile(value if equals else queue.pop(0)), depth + 1)
    return expanded


def _read_flagfile(name: str) -> list[str]:
    try:
        lines = Path(name).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"flag file {name} cannot be read: {error}") from error
    flags = (line.strip() for line in lines)
    return [line for line in flags if line and not line.startswith(("#", "//"))]
