"""SentencePiece's ``.model`` files (Kudo and Richardson 2018, arXiv:1808.06226), read without its library.

The file is a message of protocol buffers, of which the few fields are read that say what a unigram model does.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    Backend = tokenizers.Tokenizer
else:
    # Named only for readers: the library is loaded when a model is.
    Backend = Any

_UNIGRAM = 1
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = {2: "BPE", 3: "word", 4: "character"}
_BLANK = "▁"
# Of each role the field of the trainer's settings that holds its id, and the id where it is not given.
_SPECIAL = (("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1))


@dataclass(frozen=True)
class SentencePieceModel:
    """What a unigram model says.

    Attributes:
        pieces: piece, score (log probability) and type of each id.
        charsmap: the rules of normalisation, compiled; empty = none.
        blank_in_front: whether a blank is put before every text.
        fewer_blanks: whether blanks at both ends go, and several become one.
        byte_fallback: whether unknown characters are spelled as bytes.
        special_ids: of "bos", "eos" and "pad" those that there are.
    """

    pieces: tuple[tuple[str, float, int], ...]
    charsmap: bytes
    blank_in_front: bool
    fewer_blanks: bool
    byte_fallback: bool
    special_ids: dict[str, int]


def read_sentencepiece(content: bytes) -> SentencePieceModel:
    """Reads the content of a ``.model`` file.

    Raises:
        ValueError: it is not one, or does what cannot be done here: it is no unigram model, or has pieces of the
            user's, unused ones, or blanks that are not written as ``▁`` in front of words.
    """
    try:
        whole = list(_fields(content))
        entries = [dict(_fields(value)) for number, value in whole if number == 1]
        pieces = tuple(
            (entry[1].decode(), struct.unpack("<f", entry.get(2, bytes(4)))[0], entry.get(3, _NORMAL))
            for entry in entries
        )
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in whole if number == part))) for part in (2, 3)
        )
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError("it is not a SentencePiece model") from error
    kind = trainer.get(3, _UNIGRAM)
    if kind != _UNIGRAM:
        raise ValueError(f"it is a SentencePiece model of kind {_KINDS.get(kind, kind)}; only unigram models are read")
    kinds = {kind for _, _, kind in pieces}
    odd = kinds & {_USER_DEFINED, _UNUSED} or trainer.get(24, 0) or not normalizer.get(5, 1)
    if odd or _UNKNOWN not in kinds:
        raise ValueError("it has user-defined or unused pieces, blanks behind words, or no unknown piece")
    given = {role: _signed(trainer.get(field, default)) for role, field, default in _SPECIAL}
    special = {role: id_ for role, id_ in given.items() if 0 <= id_ < len(pieces) and pieces[id_][2] == _CONTROL}
    return SentencePieceModel(
        pieces,
        normalizer.get(2, b""),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
        bool(trainer.get(35, 0)),
        special,
    )


def as_tokenizer(model: SentencePieceModel) -> tuple[Backend, dict[str, str]]:
    """The model as a tokenizer of the `tokenizers` library with the same ids, and the names of its special tokens.

    Text that holds the name of a control piece is the one case where ids may differ: one unknown more.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = [(piece, score) for piece, score, _ in model.pieces]
    kinds = [kind for _, _, kind in model.pieces]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=kinds.index(_UNKNOWN), byte_fallback=model.byte_fallback))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.fewer_blanks:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.blank_in_front else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme=scheme)
    metaspace = decoders.Metaspace(replacement=_BLANK, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if model.byte_fallback else metaspace
    special = [piece for piece, _, kind in model.pieces if kind in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return backend, {role: model.pieces[id_][0] for role, id_ in model.special_ids.items()}


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: integers, or bytes of all else."""
    at = 0
    while at < len(content):
        # Nearly all keys and sizes are of one byte.
        key, at = (content[at], at + 1) if content[at] < 128 else _integer(content, at)
        if key & 7 == 0:
            value, at = _integer(content, at)
            yield key >> 3, value
            continue
        size: int | None = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 2:
            size, at = (content[at], at + 1) if content[at] < 128 else _integer(content, at)
        if size is None or at + size > len(content):
            raise IndexError(at)
        yield key >> 3, content[at : at + size]
        at += size


def _integer(content: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
