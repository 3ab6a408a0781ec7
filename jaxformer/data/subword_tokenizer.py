"""Tokenizers of the `tokenizers` library under this library's rules."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from jaxformer.data.byte_tokenizer import checked_ids, utf8
from jaxformer.data.long_texts import cut_text
from jaxformer.data.tokenizer_files import config_file, tokenizer_file, write_file

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
        _read_no_special_pieces(self.backend)
        self.name = name
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"tokenizer {name!r} has no tokens.")
        # Ids may have gaps, so the size is not the count.
        self.vocab_size = max(vocabulary.values()) + 1
        tokens = _find_special_tokens(vocabulary, special_tokens or {}, name)
        self.bos_id, self.eos_id = vocabulary.get(tokens["bos"]), vocabulary.get(tokens["eos"])
        self.pad_id = vocabulary.get(tokens["pad"], 0)
        self.special_tokens = tokens
        # Not pad_id, which without a padding token is the id of a piece of text.
        self._mark_ids = [vocabulary[token] for token in tokens.values() if token]
        self._id_type = np.uint16 if self.vocab_size <= 2**16 else np.int32

    @property
    def summary(self) -> str:
        """Name, size, and the start, end and padding tokens with their ids."""
        if self.bos_id is None:
            marks = "no start or end token, so nothing marks where documents begin"
        else:
            bos, eos = self.special_tokens["bos"], self.special_tokens["eos"]
            marks = f"start {bos!r} {self.bos_id}, end {eos!r} {self.eos_id}"
        return f"{self.name} (vocabulary {self.vocab_size}: {marks}, padding {self.pad_id})"

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start and end."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint16 where the vocabulary allows and int32 otherwise."""
        for text in texts:
            utf8(text)
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        pieces = ((index, piece) for index, text in enumerate(texts) for piece in cut_text(text, self._encode_piece))
        for group in _groups(pieces):
            encoded = self.backend.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (index, _), encoding in zip(group, encoded):
                parts[index].append(np.array(encoding.ids, self._id_type))
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def _encode_piece(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of ids; start, end and padding leave nothing, other special tokens their names."""
        array = checked_ids(ids, self.vocab_size)
        textual = ~np.isin(array, self._mark_ids)
        return self.backend.decode(array[textual].tolist(), skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json``, and ``tokenizer_config.json`` beside it with the names of the special tokens."""
        file = tokenizer_file(path)
        names = {f"{role}_token": token for role, token in self.special_tokens.items() if token}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        write_file(config_file(file), json.dumps(config, indent=2))
        write_file(file, self.backend.to_str(pretty=True))


def _read_no_special_pieces(backend: Backend) -> None:
    """Has text that looks like a special token cut behind its first character, if the model reads it as the token.

    Unigram models do, in whose vocabulary special tokens stand as pieces.
    """
    from tokenizers import Regex, pre_tokenizers

    added = backend.get_added_tokens_decoder().items()
    special = {piece.content: token for token, piece in added if piece.special and piece.content}
    firsts, whole = (
        backend.encode_batch(texts, add_special_tokens=False) for texts in ([name[0] for name in special], [*special])
    )
    # What the first character alone is read as is the unknown token, which text may well be.
    read = [
        name
        for (name, token), first, one in zip(special.items(), firsts, whole)
        if token in one.ids and token not in first.ids
    ]
    if not read:
        return
    rests: dict[str, list[str]] = {}
    for name in read:
        rests.setdefault(name[0], []).append(re.escape(name[1:]))
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    split = pre_tokenizers.Split(Regex(pattern), "merged_with_previous")
    before = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, split])


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


def _groups(pieces: Iterable[tuple[int, str]], characters: int = 2_000_000) -> Iterator[list[tuple[int, str]]]:
    """Pieces in groups of about so many characters: an encoding takes some hundred bytes a token until it is copied."""
    group: list[tuple[int, str]] = []
    size = 0
    for index, piece in pieces:
        group.append((index, piece))
        size += len(piece)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
