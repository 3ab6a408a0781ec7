"""Markdown before it is built: blocks that are generated, names that become links, formulas that become MathML."""

import html
import re

import attention_tables
import pictures
import reference

BLOCKS = {
    "picture": pictures.picture,
    "facts": attention_tables.facts,
    "cost": attention_tables.costs,
    "scale": attention_tables.scales,
    "catalogue": attention_tables.catalogue,
    "names": reference.names_table,
    "notebooks": reference.notebooks_table,
}

_BLOCK = re.compile(r"^<!-- (\w+): (.*?) -->$", re.MULTILINE)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(?<![\[`\w])`(\w+)`(?!`)")
_RELATIVE = re.compile(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)")


def expand(markdown: str) -> str:
    """Replaces each block's marker, `<!-- picture: lsh -->`, by what it asks for."""
    return _BLOCK.sub(lambda match: BLOCKS[match[1]](*re.split(r",\s*", match[2])), markdown)


def link_names(markdown: str) -> str:
    """A public name in backticks leads to its entry; code blocks and headings stay as they are."""
    names = reference.linkable_names()

    def link(match: re.Match) -> str:
        return f"[`{match[1]}`][{names[match[1]]}]" if match[1] in names else match[0]

    parts = _FENCED.split(markdown)
    for index, part in enumerate(parts):
        if not part.startswith("```"):
            lines = part.split("\n")
            parts[index] = "\n".join(line if line.startswith("#") else _CODE.sub(link, line) for line in lines)
    return "".join(parts)


def without_relative_links(markdown: str) -> str:
    """Links between files of the repository as their text: those files are no pages."""
    return _RELATIVE.sub(r"\1", markdown)


def formulas_to_mathml(page: str) -> str:
    """LaTeX in a page's HTML as MathML, which browsers draw without a script."""
    return _FORMULA.sub(lambda match: to_mathml(match[2], match[1] == "div"), page)


def to_mathml(text: str, block: bool) -> str:
    """A formula with the marks that Markdown left around it.

    Raises:
      ValueError: a command that the converter doesn't know.
    """
    from latex2mathml.converter import convert

    latex = html.unescape(text.strip().removeprefix(r"\(").removesuffix(r"\)").removeprefix(r"\[").removesuffix(r"\]"))
    mathml = convert(latex.strip(), display="block" if block else "inline")
    if "\\" in mathml:
        raise ValueError(f"formula {latex!r} has a command that can't be drawn: {mathml}")
    return mathml
