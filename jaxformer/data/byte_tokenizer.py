"""Text as its UTF-8 bytes, and the checks that every tokenizer makes."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

from jaxformer.data.tokenizer_files import tokenizer_file, write_file

BYTES_FILE = {"jaxformer_tokenizer": "bytes"}
"""What the ``tokenizer.json`` of bytes holds."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then start 256, end 257, padding 258: any text, no training, no unknown word."""

    name: str = "bytes"
    vocab_size: int = 259
    bos_id: int = 256
    eos_id: int = 257
    pad_id: int = 258
    summary: str = "bytes (vocabulary 259: 256 bytes, start 256, end 257, padding 258)"

    def encode(self, text: str) -> list[int]:
        """The text's UTF-8 bytes. Raises ValueError for a lone surrogate, which UTF-8 cannot hold."""
        return list(utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The UTF-8 bytes of each text, uint8, without a copy of their own."""
        return [np.frombuffer(utf8(text), np.uint8) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The bytes joined and read as UTF-8, U+FFFD where they are not; special ids leave nothing."""
        array = checked_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a ``tokenizer.json`` that says "bytes"."""
        write_file(tokenizer_file(path), json.dumps(BYTES_FILE))


def utf8(text: str) -> bytes:
    """The bytes of a text. Raises ValueError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds the lone surrogate {text[error.start]!a} at position {error.start}: it is not valid Unicode."
        ) from error


def checked_ids(ids: Iterable[SupportsInt], vocab_size: int) -> np.ndarray:
    """Ids as one int64 array. Raises ValueError for one outside the vocabulary."""
    array = np.asarray(ids if isinstance(ids, Sequence) or hasattr(ids, "__array__") else list(ids)).reshape(-1)
    array = array.astype(np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}).")
    return array
