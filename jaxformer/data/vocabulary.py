"""What a vocabulary holds besides pieces of text: mask, sentinels, special tokens, and which pieces begin a word."""

import json
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

from jaxformer.data.byte_tokenizer import ByteTokenizer
from jaxformer.data.subword_tokenizer import SubwordTokenizer
from jaxformer.data.tokenizers import Tokenizer

_MASK_NAMES = ("[MASK]", "<mask>")
# Pieces that stand for no text, in case that a file does not mark them as special.
_SPECIAL = re.compile(r"\[(CLS|SEP|PAD|UNK|MASK|unused\d+)\]|<(s|/s|pad|unk|mask|extra_id_\d+)>")
_BLANKS = ("Ġ", "Ċ", "ĉ", "č")


def with_tokens(tokenizer: Tokenizer, names: Sequence[str]) -> SubwordTokenizer:
    """The tokenizer with special tokens more, at the end of its vocabulary in this order; those it has stay.

    Bytes become a tokenizer of the `tokenizers` library with the same ids.

    Raises:
        ValueError: a tokenizer that is neither bytes nor of that library.
    """
    import tokenizers

    subword = _as_subword(tokenizer)
    backend = tokenizers.Tokenizer.from_str(subword.backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    marks = {role: name for role, name in subword.special_tokens.items() if name}
    return SubwordTokenizer(backend, name=tokenizer.name, special_tokens=marks)


def with_mask(tokenizer: Tokenizer) -> SubwordTokenizer:
    """The tokenizer, with ``[MASK]`` at the end of its vocabulary if it has no mask token."""
    subword = _as_subword(tokenizer)
    known = subword.backend.get_vocab()
    return subword if any(name in known for name in _MASK_NAMES) else with_tokens(subword, _MASK_NAMES[:1])


def with_sentinels(tokenizer: Tokenizer, count: int = 100) -> SubwordTokenizer:
    """The tokenizer, with the sentinels of T5 at the end of its vocabulary if it has none: ``<extra_id_0>`` is last."""
    subword = _as_subword(tokenizer)
    if has_sentinels(subword):
        return subword
    return with_tokens(subword, [f"<extra_id_{number}>" for number in reversed(range(count))])


def has_sentinels(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has the sentinels of T5: its first, ``<extra_id_0>``."""
    return isinstance(tokenizer, SubwordTokenizer) and tokenizer.backend.token_to_id("<extra_id_0>") is not None


def mask_id(tokenizer: Tokenizer) -> int:
    """The id of the mask token. Raises ValueError if there is none."""
    known = tokenizer.backend.get_vocab() if isinstance(tokenizer, SubwordTokenizer) else {}
    found = next((known[name] for name in _MASK_NAMES if name in known), None)
    if found is None:
        raise ValueError(f"tokenizer {tokenizer.name!r} has no mask token ({' or '.join(_MASK_NAMES)}).")
    return found


def sentinel_ids(tokenizer: Tokenizer) -> Int64[np.ndarray, " _"]:
    """The ids of ``<extra_id_0>``, ``<extra_id_1>``, …, which descend from the first.

    Raises:
        ValueError: there are none, or their ids do not descend.
    """
    known = tokenizer.backend.get_vocab() if isinstance(tokenizer, SubwordTokenizer) else {}
    found: list[int] = []
    while (name := f"<extra_id_{len(found)}>") in known:
        found.append(known[name])
    ids = np.array(found, np.int64)
    if not ids.size or np.any(np.diff(ids) != -1):
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has {ids.size} sentinels, must have <extra_id_0>, <extra_id_1>, … with ids "
            "that descend."
        )
    return ids


def special_ids(tokenizer: Tokenizer) -> Int64[np.ndarray, " _"]:
    """The ids that stand for no text: start, end, padding, mask, unknown, unused, sentinels, and gaps."""
    marks = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} - {None}
    if isinstance(tokenizer, SubwordTokenizer):
        added = tokenizer.backend.get_added_tokens_decoder()
        marks |= {token for token, piece in added.items() if piece.special}
        vocabulary = tokenizer.backend.get_vocab()
        marks |= {token for piece, token in vocabulary.items() if _SPECIAL.fullmatch(piece)}
        marks |= set(range(tokenizer.vocab_size)) - set(vocabulary.values())
    return np.array(sorted(mark for mark in marks if mark is not None), np.int64)


def ordinary_ids(tokenizer: Tokenizer) -> Int64[np.ndarray, " _"]:
    """The ids that stand for text, in order: all that are not special."""
    return np.setdiff1d(np.arange(tokenizer.vocab_size), special_ids(tokenizer))


def word_starts(tokenizer: Tokenizer) -> Bool[np.ndarray, " V"]:
    """Whether each id begins a word: no ``##`` (WordPiece), a blank in front (byte-level pairs), or ``▁`` (unigram).

    In byte-level pairs and unigram pieces, signs without a blank in front belong to the word before them.

    Raises:
        ValueError: the tokenizer does not show where words begin.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError(f"tokenizer {tokenizer.name!r} does not show where words begin.")
    content = json.loads(tokenizer.backend.to_str())
    model = content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    starts = np.zeros(tokenizer.vocab_size, bool)
    for piece, token in tokenizer.backend.get_vocab().items():
        if model["type"] == "WordPiece":
            starts[token] = not piece.startswith(prefix)
        elif '"ByteLevel"' in json.dumps(content["pre_tokenizer"]):
            starts[token] = piece.startswith(_BLANKS)
        else:
            starts[token] = piece.startswith("▁")
    if not starts[ordinary_ids(tokenizer)].any():
        raise ValueError(f"tokenizer {tokenizer.name!r} does not show where words begin.")
    return starts


def _as_subword(tokenizer: Tokenizer) -> SubwordTokenizer:
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    if not isinstance(tokenizer, ByteTokenizer):
        raise ValueError(f"tokenizer {tokenizer.name!r} can take no further tokens; give bytes or a tokenizer.json.")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # The sign of each byte in byte-level vocabularies: itself if it can be seen, else one from 256 on, in order.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    signs = {byte: chr(byte) for byte in seen}
    signs |= {byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(256) if byte not in signs)}
    backend = Backend(models.BPE({signs[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}
    backend.add_special_tokens(list(marks.values()))
    return SubwordTokenizer(backend, name=tokenizer.name, special_tokens=marks)
