"""A module imports only from the layers above its own, and the two lowest layers know nothing of Flax."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "jaxformer"
ORDER = ["functional", "attention", "layers", "models", "data", "inference", "interop", "analysis", "training", "cli"]
THIRD_PARTY_OF_THE_LOWEST = {"jax", "jaxtyping", "numpy"}
STANDARD_LIBRARY = set(sys.stdlib_module_names)


def _sources() -> list[pathlib.Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py")
    ]


def _layer(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return found


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    rank = ORDER.index(_layer(path))
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "jaxformer" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= rank, f"{path.relative_to(ROOT)} imports {name} from a layer above its own"


def test_the_lowest_layers_need_jax_only():
    checked = 0
    for path in _sources():
        if _layer(path) in ("functional", "attention"):
            outside = {name.split(".")[0] for name in _imports(path)} - STANDARD_LIBRARY - {"jaxformer"}
            assert outside <= THIRD_PARTY_OF_THE_LOWEST, f"{path.relative_to(ROOT)} imports {outside}"
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("jaxformer", ["jax", "flax"]),
        ("jaxformer.attention", ["flax", "optax", "orbax", "grain", "tokenizers"]),
        ("jaxformer.models", ["optax", "orbax", "grain", "tokenizers", "ml_collections"]),
    ],
)
def test_importing_a_layer_loads_nothing_else(module, unwanted):
    code = f"import {module}, sys; print([n for n in {unwanted} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert result.stdout.strip() == "[]"
