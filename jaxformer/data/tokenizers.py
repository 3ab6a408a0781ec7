"""Text to token ids and back: bytes, and any ``tokenizer.json`` of the `tokenizers` library."""

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt, runtime_checkable

import numpy as np

from jaxformer.data.long_texts import cut_text

if TYPE_CHECKING:
    import tokenizers

    Backend = tokenizers.Tokenizer
else:
    # Named only for readers: the library is loaded when a tokenizer is, not with this module.
    Backend = Any

# Names by which published tokenizers call the start of a text, its end, and padding; the first that exists is taken.
_BOS_NAMES = ("<bos>", "<s>", "[BOS]", "[CLS]", "<|begin_of_text|>", "<|startoftext|>", "<cls>")
_EOS_NAMES = (
    "<eos>",
    "</s>",
    "[EOS]",
    "[SEP]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<sep>",
)
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_BYTES_FILE = {"jaxformer_tokenizer": "bytes"}


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
        """Id that starts a document; None where the vocabulary has neither a start nor an end."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document; None where the vocabulary has neither a start nor an end."""

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
        return list(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The UTF-8 bytes of each text, uint8, without a copy of their own."""
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The bytes joined and read as UTF-8, U+FFFD where they are not; special ids leave nothing."""
        array = _checked_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a ``tokenizer.json`` that says "bytes"."""
        _write(_tokenizer_file(path), json.dumps(_BYTES_FILE))


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library: byte-pair, WordPiece, unigram, or any ``tokenizer.json``.

    Truncation and padding that the file may ask for are switched off, the file's own template of special tokens is
    not applied, and special tokens are never read out of text, so that no document can hold a false end.

    Args:
        backend: the tokenizer; a copy is kept.
        name: for messages; its file, usually.
        special_tokens: names of the "bos", "eos" and "pad" token where they are known. Others are looked for by the
            names that published tokenizers use. Where only one of start and end is found it serves as both (as
            GPT-2's), and where padding is not found the end, or id 0, fills rows.

    Raises:
        ValueError: a name in special_tokens is not in the vocabulary.
    """

    def __init__(self, backend: Backend, *, name: str = "subword", special_tokens: dict[str, str] | None = None):
        import tokenizers

        self.backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.name = name
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"tokenizer {name!r} has no tokens.")
        # Ids may have gaps, so the size is not the count.
        self.vocab_size = max(vocabulary.values()) + 1
        tokens = _find_special_tokens(vocabulary, special_tokens or {}, name)
        self.bos_id, self.eos_id = vocabulary.get(tokens["bos"]), vocabulary.get(tokens["eos"])
        self.pad_id = vocabulary.get(tokens["pad"], 0)
        self._special_tokens = tokens
        # Not pad_id, which without a padding token is the id of a piece of text.
        self._mark_ids = [vocabulary[token] for token in tokens.values() if token]
        self._id_type = np.uint16 if self.vocab_size <= 2**16 else np.int32

    @property
    def summary(self) -> str:
        """Name, size, and the start, end and padding tokens with their ids."""
        if self.bos_id is None:
            marks = "no start or end token, so nothing marks where documents begin"
        else:
            bos, eos = self._special_tokens["bos"], self._special_tokens["eos"]
            marks = f"start {bos!r} {self.bos_id}, end {eos!r} {self.eos_id}"
        return f"{self.name} (vocabulary {self.vocab_size}: {marks}, padding {self.pad_id})"

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start and end."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint16 where the vocabulary allows and int32 otherwise."""
        for text in texts:
            _utf8(text)
        ids: list[np.ndarray] = []
        for group in _groups(texts):
            pieces = [list(cut_text(text, self._encode_piece)) for text in group]
            encoded = iter(self.backend.encode_batch_fast([*itertools.chain(*pieces)], add_special_tokens=False))
            for parts in pieces:
                ids.append(np.concatenate([np.array(next(encoded).ids, self._id_type) for _ in parts]))
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of ids; start, end and padding leave nothing, other special tokens their names."""
        array = _checked_ids(ids, self.vocab_size)
        textual = ~np.isin(array, self._mark_ids)
        return self.backend.decode(array[textual].tolist(), skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json``, and ``tokenizer_config.json`` beside it with the names of the special tokens."""
        file = _tokenizer_file(path)
        names = {f"{role}_token": token for role, token in self._special_tokens.items() if token}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        _write(_config_file(file), json.dumps(config, indent=2))
        _write(file, self.backend.to_str(pretty=True))


def load_tokenizer(source: str | os.PathLike[str]) -> ByteTokenizer | SubwordTokenizer:
    """Loads a tokenizer.

    Args:
        source: "bytes", a ``tokenizer.json``, or a folder that holds one (a run directory, a published model). A
            ``tokenizer_config.json`` beside the file names the special tokens; otherwise they are found by name.

    Returns:
        The tokenizer; its ``summary`` says which special tokens were found.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f'tokenizer {str(source)!r} is not "bytes", a tokenizer.json, or a folder that holds one.')
    try:
        text = file.read_text(encoding="utf-8")
        if json.loads(text) == _BYTES_FILE:
            return ByteTokenizer()
    except ValueError as error:
        raise ValueError(f"{file} is not a tokenizer.json: {error}.") from error
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ValueError(f"{file} is not a tokenizer.json: {error}.") from error
    return SubwordTokenizer(backend, name=str(source), special_tokens=_configured_tokens(file))


def _find_special_tokens(vocabulary: dict[str, int], given: dict[str, str], name: str) -> dict[str, str]:
    """The bos, eos and pad token: as given, by their usual names, or one for the other; empty where there is none."""
    for role, token in given.items():
        if token not in vocabulary:
            raise ValueError(f"tokenizer {name!r}: {role} token {token!r} is not in its vocabulary.")

    def find(role: str, names: Sequence[str]) -> str:
        return given.get(role) or next((token for token in names if token in vocabulary), "")

    bos, eos = find("bos", _BOS_NAMES), find("eos", _EOS_NAMES)
    bos, eos = bos or eos, eos or bos
    return {"bos": bos, "eos": eos, "pad": find("pad", _PAD_NAMES) or eos}


def _config_file(file: Path) -> Path:
    """The file beside a ``NAME.json`` that names its special tokens: ``NAME_config.json``."""
    return file.with_name(f"{file.stem}_config.json")


def _configured_tokens(file: Path) -> dict[str, str]:
    """Special tokens that the configuration beside a tokenizer file names."""
    config_file = _config_file(file)
    if not config_file.is_file():
        return {}
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_file} is not JSON: {error}.") from error
    found = {}
    for role in ("bos", "eos", "pad"):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token:
            found[role] = token
    return found


def _groups(texts: Sequence[str], characters: int = 2_000_000) -> Iterable[list[str]]:
    """Texts in groups of about so many characters: an encoding takes some hundred bytes a token until it is copied."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds the lone surrogate {text[error.start]!a} at position {error.start}: it is not valid Unicode."
        ) from error


def _checked_ids(ids: Iterable[SupportsInt], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, Sequence) or hasattr(ids, "__array__") else list(ids)).reshape(-1)
    array = array.astype(np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}).")
    return array


def _tokenizer_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser()
    return path if path.suffix == ".json" else path / "tokenizer.json"


def _write(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
