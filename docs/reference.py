"""Pages of the reference: one a package, made from what the package itself names as public."""

import ast
import io
import json
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("functional", "attention", "layers", "models", "data", "inference", "interop", "analysis", "training")


def reference_pages() -> dict[str, str]:
    """Markdown of each page, by its path inside docs/."""
    pages = {f"reference/{package}.md": package_page(package) for package in PACKAGES}
    pages["reference/patterns.md"] = names_page("jaxformer.attention.patterns", module("attention", "patterns"))
    pages["reference/index.md"] = index_page()
    pages["reference/commands.md"] = commands_page()
    pages["reference/experiments.md"] = experiments_page()
    pages["reference/names.md"] = config_names_page()
    return pages


def module(package: str, name: str = "__init__") -> ast.Module:
    """A module's syntax tree: nothing is imported."""
    return ast.parse((ROOT / "jaxformer" / package / f"{name}.py").read_text())


def public_names(tree: ast.Module) -> list[str]:
    """What a module lists in its `__all__`; an empty list if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def package_page(package: str) -> str:
    """All public names of a package; where it lists none, all its modules."""
    tree = module(package)
    if public_names(tree):
        return names_page(f"jaxformer.{package}", tree)
    return modules_page(package, tree)


def names_page(path: str, tree: ast.Module) -> str:
    """One entry for each name of `__all__`, functions and classes before constants, as `__all__` has them."""
    names = [name for name in public_names(tree) if f"{path}.{name}" != "jaxformer.attention.patterns"]
    names.sort(key=lambda name: (name.isupper(), name.lower()))
    lines = [f"# `{path}`", "", ast.get_docstring(tree) or "", ""]
    for name in names:
        lines += [f"::: {entry_path(path, tree, name)}", ""]
    return "\n".join(lines)


def entry_path(path: str, tree: ast.Module, name: str) -> str:
    """Where a name of a package is documented: by the package, or by its own module where that has the same name."""
    if (ROOT / path.replace(".", "/") / f"{name}.py").exists():
        for node in tree.body:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module != path
                and name in (alias.name for alias in node.names)
            ):
                return f"{node.module}.{name}"
    return f"{path}.{name}"


def modules_page(package: str, tree: ast.Module) -> str:
    """Each module of a package with its public functions and classes."""
    lines = [f"# `jaxformer.{package}`", "", ast.get_docstring(tree) or "", ""]
    for name in module_names(package):
        first = (ast.get_docstring(module(package, name)) or "").splitlines()[0]
        lines += [f"- [`{name}`](#jaxformer.{package}.{name}): {first}"]
    lines += [""]
    for name in module_names(package):
        lines += [f"::: jaxformer.{package}.{name}", "    options:", "      show_root_full_path: true", ""]
    return "\n".join(lines)


def module_names(package: str) -> list[str]:
    """Modules of a package, its own `__init__` apart."""
    return sorted(path.stem for path in (ROOT / "jaxformer" / package).glob("*.py") if path.stem != "__init__")


def linkable_names() -> dict[str, str]:
    """The reference of each public name that is written the same nowhere else in prose: with `_` or a capital."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        tree = module(package)
        for name in public_names(tree):
            if "_" in name or name != name.lower():
                names.setdefault(name, entry_path(f"jaxformer.{package}", tree, name))
    return names


def index_page() -> str:
    """What each package holds, by its first line."""
    lines = ["# Reference", "", "Made from the docstrings. A package imports only from those above it.", ""]
    lines += ["| package | holds |", "|---|---|"]
    for package in PACKAGES:
        first = (ast.get_docstring(module(package)) or "").splitlines()[0]
        lines.append(f"| [`jaxformer.{package}`]({package}.md) | {first} |")
    lines += [
        "",
        "[Commands](commands.md) has the flags of `jaxformer`, [Experiments](experiments.md) the configs,",
    ]
    lines += ["[Names](names.md) what they may name."]
    return "\n".join(lines)


def commands_page() -> str:
    """Every command's own help."""
    lines = ["# Commands", "", "`jaxformer COMMAND --help` prints the same.", ""]
    for name, text in command_helps():
        lines += [f"## {name}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def command_helps() -> Iterator[tuple[str, str]]:
    """Name and help of each command."""
    import argparse

    from jaxformer.cli import COMMANDS
    from jaxformer.cli.parsing import make_parser

    parser = make_parser(COMMANDS)
    choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name in COMMANDS:
        stream = io.StringIO()
        choices[name].print_help(stream)
        yield name, stream.getvalue()


def experiments_page() -> str:
    """The docstring of every bundled config."""
    lines = [
        "# Experiments",
        "",
        "One file a task: a `--config` by its name, with an argument for structure.",
        "",
    ]
    for path in sorted((ROOT / "experiments").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()))
        if path.stem != "__init__" and text:
            lines += [f"## {path.stem}", "", text.splitlines()[0], "", "```text", *text.splitlines()[2:], "```", ""]
    return "\n".join(lines)


def config_names_page() -> str:
    """What `jaxformer list` prints, but for attentions, which have pages of their own."""
    from jaxformer.training.catalogue import catalogue

    lines = ["# Names", "", "What a config may name, as `jaxformer list` shows it.", ""]
    for title in catalogue():
        if title == "attentions":
            lines += ["## attentions", "", "[Attention](../attention/index.md) has them with all they honour.", ""]
        else:
            lines += [f"## {title}", "", names_table(title), ""]
    return "\n".join(lines)


def names_table(title: str) -> str:
    """One part of the catalogue as a table."""
    from jaxformer.training.catalogue import catalogue

    lines = ["| name | what |", "|---|---|"]
    lines += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in catalogue()[title].items()]
    return "\n".join(lines)


def notebooks_table(_: str) -> str:
    """The notebooks with their titles."""
    lines = ["| notebook, in Colab | in a clone |", "|---|---|"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "markdown"))
        title, colab = text.strip().splitlines()[0].lstrip("# "), re.search(r"https://colab[^)\s]+\.ipynb", text)
        assert colab is not None, path
        lines.append(f"| [{title}]({colab[0]}) | `notebooks/{path.name}` |")
    return "\n".join(lines)
