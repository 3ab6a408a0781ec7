"""Where in a text each token stands."""

import numpy as np
from jaxtyping import Int64

from jaxformer.data.byte_tokenizer import ByteTokenizer
from jaxformer.data.subword_tokenizer import SubwordTokenizer
from jaxformer.data.tokenizers import Tokenizer


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, "n 2"]]:
    """Ids of a text, and the characters that each stands for.

    Args:
        tokenizer: bytes or one of the `tokenizers` library.
        text: any text.

    Returns:
        Ids, and of each its first character in the text and the one behind its last, without blanks at either side.
        A token of blanks alone has two equal numbers. Where several tokens spell one character, each has that.

    Raises:
        ValueError: another kind of tokenizer.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids = np.array(tokenizer.encode(text), np.int64)
        # A byte that does not continue a character begins one.
        first = np.cumsum((ids & 0xC0) != 0x80) - 1
        spans = np.stack([first, first + 1], axis=1)
    elif isinstance(tokenizer, SubwordTokenizer):
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    else:
        raise ValueError(f"tokenizer {tokenizer.name!r} does not say where in a text its tokens stand.")
    return ids, _without_blanks(text, spans.astype(np.int64))


def _without_blanks(text: str, spans: Int64[np.ndarray, "n 2"]) -> Int64[np.ndarray, "n 2"]:
    """The spans without the blanks at their sides; of blanks alone nothing, at their end."""
    blank = np.array([character.isspace() for character in text] + [False])
    # The next character from each on that is not blank, and the last one before each that isn't, plus one.
    places = np.arange(len(text) + 1)
    following = np.minimum.accumulate(np.where(blank, len(text), places)[::-1])[::-1]
    before = np.concatenate([[0], np.maximum.accumulate(np.where(blank[:-1], 0, places[1:]))])
    first, end = spans[:, 0], spans[:, 1]
    first = np.minimum(following[first], end)
    return np.stack([first, np.maximum(before[end], first)], axis=1)
