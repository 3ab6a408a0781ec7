"""Tokens that stand for themselves: a list of names, written with spaces between them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsInt

import numpy as np

from jaxformer.data.byte_tokenizer import checked_ids
from jaxformer.data.tokenizer_files import tokenizer_file, write_file

SYMBOLS = "symbols"
"""What the ``tokenizer.json`` of symbols says that it is."""


@dataclass(frozen=True)
class SymbolTokenizer:
    """Ids by name, for data that are no text: "3 1 4 =" are four tokens.

    Args:
        symbols: the name of each id; different, without spaces.
        pad_id: id that fills rows.
        bos_id: id that starts a sequence; None where none does.
        eos_id: id that ends a sequence; None where none does.

    Raises:
        ValueError: names that are empty, alike or hold spaces, or an id outside the vocabulary.
    """

    symbols: tuple[str, ...]
    pad_id: int
    bos_id: int | None = None
    eos_id: int | None = None

    name = SYMBOLS

    def __post_init__(self):
        wrong = [symbol for symbol in self.symbols if symbol.split() != [symbol]]
        if wrong or len(set(self.symbols)) != len(self.symbols):
            raise ValueError(f"symbols is {self.symbols!r}; must be different names without spaces.")
        for role, token in (("pad_id", self.pad_id), ("bos_id", self.bos_id), ("eos_id", self.eos_id)):
            if token is not None and not 0 <= token < len(self.symbols):
                raise ValueError(f"{role} is {token}, must be in 0 to {len(self.symbols) - 1}.")

    @property
    def vocab_size(self) -> int:
        """Number of names."""
        return len(self.symbols)

    @property
    def summary(self) -> str:
        """A line on the vocabulary."""
        shown = " ".join(self.symbols if len(self.symbols) < 20 else (*self.symbols[:3], "…", *self.symbols[-3:]))
        return f"{SYMBOLS} (vocabulary {len(self.symbols)}: {shown})"

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {symbol: index for index, symbol in enumerate(self.symbols)}

    def encode(self, text: str) -> list[int]:
        """Ids of names with spaces between them. Raises ValueError for a name that is none of ``symbols``."""
        try:
            return [self._ids[symbol] for symbol in text.split()]
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} is none of the symbols {' '.join(self.symbols)}.") from None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32."""
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The names with spaces between them; start, end and padding ids leave nothing."""
        silent = (self.bos_id, self.eos_id, self.pad_id)
        return " ".join(self.symbols[token] for token in checked_ids(ids, self.vocab_size) if token not in silent)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a ``tokenizer.json`` with the names and the special ids."""
        ids = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        content = {"jaxformer_tokenizer": SYMBOLS, "symbols": self.symbols, **ids}
        write_file(tokenizer_file(path), json.dumps(content))

    @classmethod
    def restore(cls, content: Mapping[str, Any]) -> "SymbolTokenizer":
        """The tokenizer whose file holds ``content``."""
        return cls(tuple(content["symbols"]), content["pad_id"], content["bos_id"], content["eos_id"])
