"""English prose out of the interpreter itself, and the cutting of any text into paragraphs and sentences."""

import ast
import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

# A word of prose with the signs that may stand around it; names with dots or underscores and signs alone are none.
_WORD = re.compile(r"""["'(\[]*[A-Za-z][A-Za-z'’-]*["')\]]*[.,;:!?]*["')\]]*""")
_BULLET = re.compile(r"^\s*(?:[-*•+]|\d{1,2}[.)])\s+")
_MARKUP = re.compile(r"[*`]+(?=[A-Za-z_(])|(?<=[\w.)])[*`]+")
_END_OF_PROSE = re.compile(r"""[.!?:]["')\]]*$""")
# A sentence ends at its sign, with closing signs after it, before a blank and what may begin another.
_SENTENCE_END = re.compile(r"""[.!?]["')\]]*(?=\s+["'(\[]*[A-Z0-9])""")
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "Mr.", "Mrs.", "Ms.", "Dr.", "St.", "No.", "Fig.", "Sec.")
_LEAST_WORDS = 4
_LEAST_SHARE = 0.75


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text: what stands between blank lines, each in one line with single blanks."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n[^\S\n]*(?=\n)", text))
    return [paragraph for paragraph in paragraphs if paragraph]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, which end at ``.``, ``!`` or ``?`` before a capital or a digit, or with a paragraph.

    Common abbreviations and single capitals with a point (initials) end none. Joined by blanks the sentences are the
    text, but for how many blanks stand between words.
    """
    sentences = []
    for paragraph in split_paragraphs(text):
        start = 0
        for match in _SENTENCE_END.finditer(paragraph):
            last = paragraph[start : match.end()].rsplit(" ", 1)[-1].lstrip("\"'([")
            if last in _ABBREVIATIONS or re.fullmatch(r"[A-Z]\.", last):
                continue
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
        sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def prose_of(text: str) -> list[str]:
    """The paragraphs of documentation that are prose: three quarters of them plain words, and ended as a sentence.

    Code, tables, signatures, headings and lists of names are left out, and so are the signs of markup.
    """
    kept = []
    for block in re.split(r"\n[^\S\n]*(?=\n)", text):
        if ">>>" in block or "::" in block:
            continue
        paragraph = _MARKUP.sub("", " ".join(_BULLET.sub("", block, count=1).split()))
        words = paragraph.split()
        plain = sum(_WORD.fullmatch(word) is not None for word in words)
        if len(words) >= _LEAST_WORDS and plain >= _LEAST_SHARE * len(words) and _END_OF_PROSE.search(paragraph):
            kept.append(paragraph)
    return kept


def docstrings(source: str) -> list[str]:
    """The docstrings of a Python source, of its module, classes and functions, in the order in which they stand.

    Raises:
        SyntaxError: the source is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in sources that are not ours
        tree = ast.parse(source)
    return [inspect.cleandoc(text) for text in _docstrings(tree)]


def _docstrings(node: ast.AST) -> Iterator[str]:
    body: Sequence[ast.stmt] = getattr(node, "body", ())
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield text
    # Statements only: definitions stand nowhere else, and expressions are most of a tree.
    for part in (body, getattr(node, "orelse", ()), getattr(node, "finalbody", ()), getattr(node, "handlers", ())):
        for child in part if isinstance(part, list) else ():
            yield from _docstrings(child)


@functools.cache
def topics() -> tuple[tuple[str, str], ...]:
    """The chapters of the language reference that ``help()`` shows, by name; none where they are not installed."""
    try:
        from pydoc_data.topics import topics as chapters
    except ImportError:
        return ()
    return tuple(sorted(chapters.items()))


def prose_documents(documents: Iterable[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, str]]:
    """Names and prose of documents, given with their pieces of documentation.

    Paragraphs have a blank line between them. One that came before, in any document, is left out: inherited
    documentation would stand in both training and validation text. A document without prose has an empty text.
    """
    seen: set[str] = set()
    for name, pieces in documents:
        paragraphs = []
        for paragraph in (paragraph for piece in pieces for paragraph in prose_of(piece)):
            if paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        yield name, "\n\n".join(paragraphs)
