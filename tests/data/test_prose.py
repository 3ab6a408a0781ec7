import re

import pytest

from jaxformer.data import Documents, datasets, load_documents
from jaxformer.data.prose import docstrings, prose_documents, prose_of, split_paragraphs, split_sentences

SOURCE = '''"""About the module."""
import os
if os.name:
    def f():
        """Of f.

            Deeper.
        """
        x = "no docstring"
        class C:
            "Of C."
    try:
        pass
    except OSError:
        async def g(): "Of g."
else:
    class D:
        """"""
'''


def test_docstrings_in_the_order_of_the_source():
    assert docstrings(SOURCE) == ["About the module.", "Of f.\n\nDeeper.", "Of C.", "Of g."]


def test_sentences_by_hand():
    text = 'One is here. Two, e.g. this one, too!  (Three?) "Four." 5 is\nlast\n \nNew paragraph of J. Smith. it\'s'
    assert split_sentences(text) == [
        "One is here.",
        "Two, e.g. this one, too!",
        "(Three?)",
        '"Four."',
        "5 is last",
        "New paragraph of J. Smith. it's",
    ]
    assert split_paragraphs("a\nb\n\n\n \n c  d\n") == ["a b", "c d"]
    assert split_sentences(" \n ") == []


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        ("The *first* of ``all`` words is kept.", ["The first of all words is kept."]),
        ("- A point in a list of them:", ["A point in a list of them:"]),
        (">>> import this is not prose.", []),
        ("heappush(heap, item) # pushes a new item.", []),
        ("Too few.", []),
        ("No sign at the end of this", []),
    ],
)
def test_prose_is_told_from_code(block, kept):
    assert prose_of(block) == kept


def test_a_paragraph_is_in_one_document():
    one, two = "This is said in one place.", "That is said in two places."
    found = dict(prose_documents([("a", [f"{one}\n\n{two}", two]), ("b", [two])]))
    assert found == {"a": f"{one}\n\n{two}", "b": ""}


def test_documents_are_sources_and_chapters(monkeypatch):
    sources = Documents(["a.py", "b.py", "c.py"], ['"""It is about this one."""', '"""Not Python', "pass"], "here")
    monkeypatch.setattr(datasets, "python_stdlib", lambda: sources)
    monkeypatch.setattr(datasets, "topics", lambda: (("if", "Title\n*****\n\nThe *if* statement is a choice.\n"),))
    documents = datasets._python_docs.__wrapped__()
    assert documents.names == ["a.py", "topics/if"]
    assert documents.texts == ["It is about this one.", "The if statement is a choice."]
    assert documents.skipped == 1


@pytest.mark.slow
def test_the_documentation_of_the_interpreter_is_prose_and_the_same_twice():
    documents = load_documents("python_docs")
    assert documents.hash == datasets._python_docs.__wrapped__().hash
    assert len(documents.texts) > 300
    assert documents.num_bytes > 800_000
    paragraphs = [paragraph for text in documents.texts for paragraph in text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any(">>>" in paragraph or "::" in paragraph for paragraph in paragraphs)
    for text in documents.texts[::50]:
        assert re.sub(r"\s+", " ", text) == " ".join(split_sentences(text))


def test_the_documentation_takes_no_path():
    with pytest.raises(ValueError, match="takes no path"):
        load_documents("python_docs", path="x")
