"""The documentation: nothing public is forgotten, what is generated is what the package gives, and its code runs."""

import importlib
import pathlib
import re

import attention_tables
import markup
import numpy as np
import pictures
import pytest
import reference

from jaxformer.analysis import attention_cost
from jaxformer.attention import ATTENTION, PATTERNS, dense_attention_weights, patterns

DOCS = pathlib.Path(pictures.__file__).parent
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# Pages whose code takes seconds to compile.
SLOW_PAGES = (
    "attention/dense.md",
    "attention/hashed.md",
    "attention/linear.md",
    "attention/low_rank.md",
    "attention/sorted.md",
    "attention/sparse.md",
    "guide/inference.md",
    "guide/positions.md",
    "guide/stacks.md",
    "how_to/functions.md",
    "how_to/nnx.md",
    "how_to/own_attention.md",
)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks_of(page):
    return _PYTHON.findall((DOCS / page).read_text())


def is_module(path):
    return (reference.ROOT / f"{path.replace('.', '/')}.py").exists()


@pytest.mark.parametrize("package", [*reference.PACKAGES, "attention.patterns"])
def test_every_public_name_has_an_entry(package):
    module = importlib.import_module(f"jaxformer.{package}")
    if package == "attention.patterns":
        page = reference.names_page("jaxformer.attention.patterns", reference.module("attention", "patterns"))
    else:
        page = reference.package_page(package)
    entries = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    if hasattr(module, "__all__"):
        assert {entry.rpartition(".")[2] for entry in entries} == set(module.__all__) - {"patterns"}
        for entry in entries:
            place, _, name = entry.rpartition(".")
            assert getattr(importlib.import_module(place), name) is getattr(module, name)
            assert not is_module(entry)
    else:
        files = pathlib.Path(module.__file__).parent.glob("*.py")
        assert entries == {f"jaxformer.{package}.{path.stem}" for path in files if path.stem != "__init__"}
    assert len(entries) > 5


def test_every_package_and_every_command_has_a_page():
    from jaxformer.cli import COMMANDS

    folders = {path.parent.name for path in (reference.ROOT / "jaxformer").glob("*/__init__.py")}
    assert folders == {*reference.PACKAGES, "cli"}
    assert [name for name, _ in reference.command_helps()] == list(COMMANDS)
    for name, text in reference.command_helps():
        assert text.startswith(f"usage: jaxformer {name}")


@pytest.mark.parametrize("name", [*ATTENTION, *PATTERNS])
def test_every_attention_has_a_section(name):
    page = (DOCS / "attention" / f"{attention_tables.PAGES[name]}.md").read_text()
    section = page.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    assert f"<!-- picture: {name} -->" in section
    assert f"<!-- facts: {name} -->" in section
    costs = re.search(r"^<!-- cost: (.*) -->$", page, re.MULTILINE)[1].split(", ")
    assert name in (*costs, *attention_tables.NO_ENTRY)
    assert "**When" in section
    assert section.count("$$") >= 2, "no formula"
    if name in ATTENTION:
        assert "ecoding" in section
        assert re.search("[Ll]eaks", page)


def with_speed(page):
    return pytest.param(page, marks=[pytest.mark.slow] if page in SLOW_PAGES else [])


@pytest.mark.parametrize("page", [with_speed(page) for page in PAGES if blocks_of(page)])
def test_code_of_a_page_runs(page):
    for block in blocks_of(page):
        exec(compile(block, page, "exec"), {"__name__": page})


def test_pages_mark_code_that_runs_as_python_only_if_it_claims_something():
    for page in PAGES:
        for block in blocks_of(page):
            assert "assert" in block, f"{page}: {block}"


def test_a_picture_shows_the_weights_themselves():
    random = np.random.default_rng(5)
    query, key = pictures.tokens(random, pictures.LENGTH), pictures.tokens(random, pictures.LENGTH)
    np.testing.assert_allclose(
        pictures.weights("dense", True), dense_attention_weights(query, key, causal=True)[0, 0], atol=1e-6
    )
    mask = (patterns.strided(6) & patterns.causal()).mask(pictures.LENGTH)
    np.testing.assert_array_equal(pictures.weights("strided", True), mask)
    assert set(pictures.ARGUMENTS) == set(ATTENTION)
    assert set(pictures.PATTERN_ARGUMENTS) == set(PATTERNS)


def test_shades_are_runs_of_equal_cells():
    matrix = np.array([[1.0, 1.0, 0.0], [0.0, 0.25, -1.0], [0.0, 0.0, 0.0]])
    size = pictures.CELL
    assert pictures.shades(matrix) == [
        ("minus", 8, f"M{2 * size} {size}h{size}v{size}h-{size}z"),
        ("plus", 4, f"M{size} {size}h{size}v{size}h-{size}z"),  # the root of a quarter
        ("plus", 8, f"M0 0h{2 * size}v{size}h-{2 * size}z"),
    ]


def test_the_table_of_costs_has_the_formulas_figures():
    row = attention_tables.cost_row("performer")
    cost = attention_cost("performer", 1, 16384, 8, 64, causal=True, dtype="bfloat16", num_features=256)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "`performer` num_features 256"
    assert cells[3] == f"{cost.forward.total / 1e9:.3g} G"
    assert cells[-1] == f"{cost.cache_bytes / 1024:.3g} KiB"
    assert attention_tables.cost_row("clustered").endswith("| can't |  |")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "", "0"), (999, "", "999"), (1234, "", "1.23 k"), (2.5e9, "", "2.5 G"), (3e13, "", "30,000 G"),
     (1536, "B", "1.5 KiB"), (1010 * 1024, "B", "1,010 KiB"), (17, "B", "17 B")],
)  # fmt: skip
def test_numbers_are_short(value, unit, text):
    assert attention_tables.number(value, unit) == text


def test_names_in_prose_become_links_and_code_stays():
    text = "# `lsh_attention`\nSee `lsh_attention`, `local` and [`lsh_step`](x).\n```python\n`lsh_attention`\n```\n"
    linked = "See [`lsh_attention`][jaxformer.attention.lsh_attention], `local` and [`lsh_step`](x)."
    assert markup.link_names(text) == text.replace("See `lsh_attention`, `local` and [`lsh_step`](x).", linked)
    assert markup.without_relative_links("[a](../b.md), [c](https://d)") == "a, [c](https://d)"
    assert "what it is" in markup.expand("x\n<!-- facts: dense -->\ny")
    notebooks = markup.expand("<!-- notebooks: all -->")
    assert all(path.name in notebooks for path in (reference.ROOT / "notebooks").glob("*.ipynb"))


def test_formulas_become_mathml_and_unknown_commands_are_refused():
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    page = markup.formulas_to_mathml(r'<p><span class="arithmatex">\(x &lt; \frac{1}{2}\)</span></p>')
    assert page.startswith("<p><math")
    assert "mfrac" in page
    with pytest.raises(ValueError, match="nosuch"):
        markup.to_mathml(r"\[\nosuch x\]", block=True)
    for name in PAGES:
        for formula in re.findall(r"\$\$(.*?)\$\$", (DOCS / name).read_text(), re.DOTALL):
            assert markup.to_mathml(formula, block=True)
