"""Examples in docstrings do what they say: each runs by itself, with nothing but its own imports."""

import ast
import doctest
import pathlib

import pytest

import jaxformer

PACKAGE = pathlib.Path(jaxformer.__file__).parent
# What compiles for seconds.
SLOW_FILES = ("beam.py", "cache.py", "generate.py", "linear.py", "linformer.py", "score.py", "sparse.py")


def documented():
    """(file and name, docstring, line) of every docstring that holds an example."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and ">>> " in text:
                    name = f"{path.relative_to(PACKAGE)}:{getattr(node, 'name', '')}"
                    marks = [pytest.mark.slow] if path.name in SLOW_FILES else []
                    yield pytest.param(name, text, id=name, marks=marks)


EXAMPLES = list(documented())


def run(name, text):
    """The failures of a docstring's examples, and how many there are."""
    test = doctest.DocTestParser().get_doctest(text, {"__name__": name}, name, name, 0)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    results = runner.run(test, out=said.append)
    return results.failed, results.attempted, "".join(said)


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_examples_of_a_docstring_hold(name, text):
    failed, attempted, said = run(name, text)
    assert not failed, said
    assert attempted >= 2


def test_the_main_functions_have_examples_and_a_wrong_one_is_found():
    assert len(EXAMPLES) >= 30
    assert run("wrong", ">>> 1 + 1\n3\n")[0] == 1
