"""Cutting a long text where its tokens do not change: a tokenizer needs some 150 bytes of memory a character."""

import re
from collections.abc import Callable, Iterator

# A blank between words is where every usual tokenizer ends a word.
_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
_CONTEXT = 200
_TRIES = 20


def cut_text(text: str, encode: Callable[[str], list[int]], *, characters: int = 500_000) -> Iterator[str]:
    """Pieces of a text whose ids, joined, are the ids of the text.

    A cut is made at a blank between two words, and only where the text around it has the same ids with and without it;
    a tokenizer for which that never holds gets the text whole.

    Args:
        text: the text.
        encode: ids of a text.
        characters: a piece has about so many; a text of up to twice that is not cut.

    Yields:
        The pieces, in order.
    """
    start = 0
    while len(text) - start > 2 * characters:
        cut = _find_cut(text, start + characters, encode)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _find_cut(text: str, start: int, encode: Callable[[str], list[int]]) -> int | None:
    """The first of the next few blanks between words that leaves the ids around it as they are."""
    for _, match in zip(range(_TRIES), _BETWEEN_WORDS.finditer(text, start)):
        cut = match.start()
        before, after = text[cut - _CONTEXT : cut], text[cut : cut + _CONTEXT]
        if encode(before) + encode(after) == encode(before + after):
            return cut
    return None
