"""Text to token ids and back: bytes, symbols, characters, any ``tokenizer.json``, and models of SentencePiece."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, SupportsInt, runtime_checkable

import numpy as np

from jaxformer.data.byte_tokenizer import BYTES_FILE, ByteTokenizer
from jaxformer.data.character_tokenizer import CHARACTERS, CharacterTokenizer
from jaxformer.data.sentencepiece_model import as_tokenizer, read_sentencepiece
from jaxformer.data.subword_tokenizer import SubwordTokenizer
from jaxformer.data.symbol_tokenizer import SYMBOLS, SymbolTokenizer
from jaxformer.data.tokenizer_files import config_file


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer."""

    @property
    def name(self) -> str:
        """For messages and run records."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1, special ones included."""

    @property
    def bos_id(self) -> int | None:
        """Id that starts a document; None where the vocabulary has none."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document; None where the vocabulary has none."""

    @property
    def pad_id(self) -> int:
        """Id that fills rows; never scored."""

    @property
    def summary(self) -> str:
        """A line on what it is, and which ids start, end and pad."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start and end; a special token's name in the text is text like any other."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text as arrays of a small unsigned or int32 type."""

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of ids; start, end and padding ids leave nothing, bytes that are not UTF-8 become U+FFFD."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what ``load_tokenizer`` reads: the file, or ``tokenizer.json`` in the folder."""


def load_tokenizer(
    source: str | os.PathLike[str],
) -> ByteTokenizer | CharacterTokenizer | SubwordTokenizer | SymbolTokenizer:
    """Loads a tokenizer.

    Args:
        source: "bytes", a ``tokenizer.json``, or a folder that holds one (a run directory, a published model). A
            ``tokenizer_config.json`` beside the file names the special tokens; otherwise they are found by name. Or a
            unigram ``.model`` of SentencePiece, or a folder that holds a ``spiece.model`` alone: with the ids of the
            file, so T5's sentinels are to be added (``jaxformer.data.vocabulary.with_sentinels``).

    Returns:
        The tokenizer; its ``summary`` says which special tokens were found.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (path / "spiece.model").is_file():
        file = path / "spiece.model"
    if not file.is_file():
        raise ValueError(f'tokenizer {str(source)!r} is not "bytes", a tokenizer.json, or a folder that holds one.')
    if file.suffix == ".model":
        try:
            backend, special_tokens = as_tokenizer(read_sentencepiece(file.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{file} is not a tokenizer that can be read: {error}.") from error
        return SubwordTokenizer(backend, name=str(source), special_tokens=special_tokens)
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
        if content == BYTES_FILE:
            return ByteTokenizer()
        if isinstance(content, dict) and content.get("jaxformer_tokenizer") == SYMBOLS:
            return SymbolTokenizer.restore(content)
        if isinstance(content, dict) and content.get("jaxformer_tokenizer") == CHARACTERS:
            return CharacterTokenizer.restore(content)
    except ValueError as error:
        raise ValueError(f"{file} is not a tokenizer.json: {error}.") from error
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ValueError(f"{file} is not a tokenizer.json: {error}.") from error
    return SubwordTokenizer(backend, name=str(source), special_tokens=_configured_tokens(file))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, names: Sequence[str], dataset: str) -> list[np.ndarray]:
    """Ids of each text of a dataset. Raises ValueError for one that cannot be encoded, by its name."""
    try:
        return tokenizer.encode_batch(texts)
    except ValueError:
        for name, text in zip(names, texts):
            try:
                tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"dataset {dataset!r}, document {name!r}: {error}") from error
        raise


def _configured_tokens(file: Path) -> dict[str, str]:
    """Special tokens that the configuration beside a tokenizer file names."""
    beside = config_file(file)
    if not beside.is_file():
        return {}
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside} is not JSON: {error}.") from error
    found = {}
    for role in ("bos", "eos", "pad"):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token:
            found[role] = token
    return found
