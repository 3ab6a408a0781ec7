"""What MkDocs calls while it builds.

A page holds `<!-- picture: lsh -->`, `<!-- facts: lsh -->` or `<!-- cost: lsh, dense -->` where something is generated;
formulas are LaTeX between dollars; a public name in backticks becomes a link into the reference. Python blocks marked
`python` run in the tests, those marked `py` need a run or a download and don't.
"""

import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # many small programs, each run once
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import markup
import reference
from mkdocs.structure.files import File

# Files of the repository that are pages, too.
COPIED = {"results.md": "experiments/README.md", "benchmarks.md": "benchmarks/README.md"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    pages = reference.reference_pages()
    pages |= {name: markup.without_relative_links((reference.ROOT / path).read_text()) for name, path in COPIED.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Puts in what is generated, and links names in pages written by hand."""
    if page.file.src_uri.startswith("reference/") or page.file.src_uri in COPIED:
        return markdown
    return markup.expand(markup.link_names(markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Draws the formulas."""
    return markup.formulas_to_mathml(html)
