"""Configs of runs: found by path or bundled name, changed by overrides, stored in a run directory and rebuilt from it.

run = load_config("language_model:size=tiny", ["train.steps=20"])
run.config.optimizer.learning_rate = 1e-3
train_and_evaluate(run, "runs/a")
"""

import dataclasses
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxformer.training.nearest import nearest
from jaxformer.training.overrides import ConfigError, apply_overrides, flatten, set_path

# What may differ between a run and its continuation: the length, and what only looks on. The rest is structure, or
# would make the continued run another experiment.
RESUMABLE = ("train.steps", "log.", "eval.", "checkpoint.", "sample.", "mesh.", "data.prefetch")

_KINDS = {kind.__name__: kind for kind in (bool, int, float, str, tuple, list)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A config with where it came from.

    Attributes:
      config: the values; locked, so that a misspelt name raises.
      source: path of the config file or bundled name; None for a config made in Python.
      arg: what was given to `get_config`; None for nothing.
      overrides: the changes made by text, in order, each `a.b=value`.
    """

    config: ConfigDict
    source: str | None = None
    arg: str | None = None
    overrides: tuple[str, ...] = ()

    def with_overrides(self, overrides: Sequence[str]) -> "RunConfig":
        """A copy with further overrides applied."""
        config = copy_config(self.config)
        apply_overrides(config, overrides)
        return dataclasses.replace(self, config=config, overrides=(*self.overrides, *overrides))


def load_config(spec: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads the config that a config file gives, with overrides; needs no command line.

    Args:
      spec: path of a Python file with `get_config(arg=None)`, or the name of a bundled one (`language_model`), and
        after a colon the argument that decides structure: `language_model:size=tiny`.
      overrides: changes of values, each `a.b=value` (see `apply_overrides`).

    Returns:
      The config with its source, argument and overrides.

    Raises:
      ConfigError: no such file or name, an argument that the file refuses, or an override that cannot be applied.
    """
    source, arg = split_spec(spec)
    config = _call(_load_module(source).get_config, source, arg)
    apply_overrides(config, overrides)
    return RunConfig(config.lock(), source, arg, tuple(overrides))


def split_spec(spec: str) -> tuple[str, str | None]:
    """Splits `path-or-name[:arg]`."""
    if Path(spec).is_file():
        return spec, None
    head, colon, tail = spec.partition(".py:")
    if colon:
        return f"{head}.py", tail or None
    source, _, arg = spec.partition(":")
    return source, arg or None


def bundled_configs() -> dict[str, Path]:
    """The config files that ship with the package, by name."""
    spec = importlib.util.find_spec("jaxformer.experiments")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    # In a checkout that is not installed the folder stands beside the package.
    folders.append(str(Path(__file__).parents[2] / "experiments"))
    for folder in map(Path, folders):
        files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
        if files:
            return {path.stem: path for path in files}
    return {}


def _find(source: str) -> Path:
    if source.endswith(".py") or os.sep in source:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"config file {source} does not exist; bundled configs: {', '.join(bundled_configs())}")
        return path
    bundled = bundled_configs()
    if source not in bundled:
        raise ConfigError(f"no bundled config is named {source!r}; {nearest(source, bundled)}")
    return bundled[source]


def _load_module(source: str) -> ModuleType:
    path = _find(source)
    spec = importlib.util.spec_from_file_location(f"jaxformer_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {source} must be a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"config file {source} is not valid Python: {error}") from error
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"config file {source} has no function get_config(arg=None)")
    return module


def _call(get_config: Callable[..., ConfigDict], source: str, arg: str | None) -> ConfigDict:
    if arg is not None and not inspect.signature(get_config).parameters:
        raise ConfigError(f"config {source} takes no argument, got {arg!r}")
    config = get_config(arg) if arg is not None else get_config()
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config of {source} must return a ConfigDict, got {type(config).__name__}")
    return config


def parse_arg(arg: str | None, **choices: Sequence[str]) -> dict[str, str]:
    """Reads the argument of a config file, `name=choice,name=choice`.

    Args:
      arg: the text, or None.
      **choices: by name, the choices allowed; the first is the default.

    Returns:
      The choice of each name.

    Raises:
      ConfigError: a name or choice that is not among those allowed; the nearest ones are listed.
    """
    chosen = {name: options[0] for name, options in choices.items()}
    for part in filter(None, (arg or "").split(",")):
        name, equals, value = (text.strip() for text in part.partition("="))
        if name not in choices:
            raise ConfigError(f"config argument has no part {name!r}; {nearest(name, choices)}")
        if not equals or value not in choices[name]:
            raise ConfigError(f"config argument {name} must be one of {', '.join(choices[name])}, got {value!r}")
        chosen[name] = value
    return chosen


def optional(kind: type, default: Any = None) -> Any:
    """A config field of a type that may also be None.

    Args:
      kind: int, float, bool, str or tuple.
      default: the value at first.
    """
    field = placeholder(kind)
    field.set(default)
    return field


# --- storing -----------------------------------------------------------------------------------------------------


def to_json(config: ConfigDict) -> dict[str, Any]:
    """The values of a config and the types that JSON would lose (tuples, placeholders), as plain dictionaries."""
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    for field in flatten(config):
        if field.value is not None and field.kind not in _KINDS.values():
            raise ConfigError(f"config.{field.path} must be a number, text, bool or tuple, got {field.kind.__name__}")
        *sections, name = field.path.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = field.value
        if field.optional or field.kind is tuple:
            types[field.path] = field.kind.__name__ + ("?" if field.optional else "")
    return {"config": values, "types": types}


def from_json(stored: Mapping[str, Any]) -> ConfigDict:
    """The config that `to_json` stored, with its tuples and placeholders; locked.

    Raises:
      ConfigError: what is stored is not such a config.
    """
    try:
        return ConfigDict(_restore_types(stored["config"], stored["types"])).lock()
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the stored config cannot be read: {error!r}") from error


def _restore_types(values: Mapping[str, Any], types: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    restored = {}
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, dict):
            restored[name] = _restore_types(value, types, f"{path}.")
            continue
        kind = types.get(path, "")
        value = _to_tuples(value) if kind.startswith("tuple") else value
        if kind.endswith("?") and kind != "NoneType?":
            value = optional(_KINDS[kind[:-1]], value)
        restored[name] = value
    return restored


def _to_tuples(value: object) -> object:
    if isinstance(value, dict):
        return {name: _to_tuples(inner) for name, inner in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, (list, tuple)) else value


def copy_config(config: ConfigDict) -> ConfigDict:
    """A copy that keeps placeholders and changes apart from the original; locked."""
    return from_json(to_json(config))


def write_config(path: Path, run: RunConfig, resolved: Mapping[str, object]) -> None:
    """Writes a run's config: to read, to rebuild from, and with the values that the run itself decided (`resolved`)."""
    stored = {"source": run.source, "arg": run.arg, "overrides": list(run.overrides)}
    text = json.dumps({**stored, **to_json(run.config), "resolved": dict(resolved)}, indent=2)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def read_config(path: Path) -> tuple[RunConfig, dict[str, object]]:
    """Reads what `write_config` wrote: the run's config, and the values that the run decided.

    Raises:
      ConfigError: the file is missing or cannot be read as a config.
    """
    try:
        stored = json.loads(path.read_text())
        run = RunConfig(from_json(stored), stored["source"], stored["arg"], tuple(stored["overrides"]))
        return run, {path: _to_tuples(value) for path, value in stored["resolved"].items()}
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is not a run directory: it has no {path.name}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a run's config: {error}") from error


def continue_config(workdir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the run in a run directory, with overrides, to go on with it.

    Raises:
      ConfigError: no run was started there, or an override cannot be applied.
    """
    if not (workdir / "config.json").is_file():
        raise ConfigError(f"{workdir} holds no run to go on with: begin one with --config")
    return read_config(workdir / "config.json")[0].with_overrides(overrides)


def resolve(config: ConfigDict, resolved: Mapping[str, object]) -> ConfigDict:
    """A copy of a config with the values that a run decided in place of None, or of a whole section."""
    config = copy_config(config)
    for path, value in resolved.items():
        if isinstance(value, Mapping):
            with config.unlocked(), config.ignore_type():
                config[path] = ConfigDict(value)
        else:
            set_path(config, path, value)
    return config.lock()


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """What stands in the way of continuing a run of config `old` with config `new`, a line for each field.

    A field that is absent and one that is None are equal, and so are optimizers that train alike.
    """
    before, after = _meant(old), _meant(new)
    return [
        f"{path}: {_show(path, before)} before, {_show(path, after)} now"
        for path in {**before, **after}
        if repr(before.get(path)) != repr(after.get(path)) and not path.startswith(RESUMABLE)
    ]


def _meant(config: ConfigDict) -> dict[str, object]:
    """The values of a config by path; of its optimizer what they mean."""
    from jaxformer.training.optimizer_config import meant_optimizer

    values = {field.path: field.value for field in flatten(config)}
    if not isinstance(config.get("optimizer"), ConfigDict):
        return values
    kept = {path: value for path, value in values.items() if not path.startswith("optimizer.")}
    return kept | {f"optimizer.{name}": value for name, value in meant_optimizer(config.optimizer).items()}


def _show(path: str, values: Mapping[str, object]) -> str:
    return repr(values[path]) if path in values else "absent"
