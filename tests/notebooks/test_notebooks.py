"""The notebooks: as they are committed, and (marker notebook) executed from top to bottom at their small size."""

import json
import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
REPOSITORY = "github.com/jaxformer/jaxformer"
LARGEST = 600_000  # bytes, so that a clone stays small and a page opens quickly


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in load(path)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def links(path: Path) -> list[str]:
    """The relative links of all its text."""
    text = "\n".join(source(cell) for cell in load(path)["cells"] if cell["cell_type"] == "markdown")
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def listed() -> list[str]:
    """The notebooks that the table names, in its order."""
    rows = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    return [found[1] for row in rows if (found := re.match(r"\| \[\d+\. [^\]]+\]\((\w+\.ipynb)\) \|", row))]


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_table_of_notebooks_names_each_in_order():
    assert len(NOTEBOOKS) == 8
    assert listed() == [path.name for path in NOTEBOOKS]


@each
def test_a_notebook_is_valid(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size < LARGEST


@each
def test_a_notebook_begins_with_title_badge_installation_and_size(path):
    cells = load(path)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert re.match(r"# .+", source(cells[0]))
    assert f"https://colab.research.google.com/github/jaxformer/jaxformer/blob/main/notebooks/{path.name}" in source(
        cells[0]
    )
    first, second = map(source, code_cells(path)[:2])
    assert 'if "google.colab" in sys.modules:' in first
    assert f"git+https://{REPOSITORY}" in first
    assert 'os.environ.get("JAXFORMER_NOTEBOOK_SIZE", "full")' in second


@each
def test_a_notebook_holds_outputs_of_one_run_without_errors(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each
def test_a_notebook_names_no_machine_and_no_time(path):
    content = load(path)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert set(content["metadata"]) <= {"kernelspec", "language_info"}
    assert all(not cell["metadata"] for cell in content["cells"])
    text = json.dumps(
        [
            [output.get("text"), output.get("data", {}).get("text/plain")]
            for cell in code_cells(path)
            for output in cell["outputs"]
        ]
    )
    assert not re.search(r"(?:^|[\s\"'(])/(?:home|root|tmp|usr|work|Users|opt|mnt|content)/", text)
    assert " at 0x" not in text  # addresses differ from run to run


@each
def test_links_between_notebooks_lead_somewhere(path):
    for link in links(path):
        name = link.split("#")[0]
        assert name in listed() or (FOLDER / name).exists(), link


@pytest.mark.notebook
@each
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebooks")
    pytest.importorskip("ipykernel", reason="needs the extra notebooks")
    monkeypatch.setenv("JAXFORMER_NOTEBOOK_SIZE", "small")
    # A kernel of its own, as a reader has it: without the switches that the tests set in this process.
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises at the first cell that fails
