"""Characters as tokens, and tags before them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsInt

import numpy as np

from jaxformer.data.byte_tokenizer import checked_ids
from jaxformer.data.tokenizer_files import tokenizer_file, write_file

CHARACTERS = "characters"
"""What the ``tokenizer.json`` of characters says that it is."""

_MARKS = ("<pad>", "<bos>", "<eos>", "<unk>")
_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class CharacterTokenizer:
    """A token for each character of a known set, and one for a tag that a text may begin with: "<de> 3. Mai 2021".

    Ids are padding 0, start 1, end 2, unknown character 3, then the tags, then the characters.

    Args:
        characters: the known characters, different.
        tags: what may stand before a text, each as "<name>", different.

    Raises:
        ValueError: a character that is not one, a tag that is not in angle brackets, or one twice.
    """

    characters: tuple[str, ...]
    tags: tuple[str, ...] = ()

    name = CHARACTERS
    pad_id = 0
    bos_id = 1
    eos_id = 2
    unknown_id = 3

    def __post_init__(self):
        if any(len(character) != 1 for character in self.characters) or len(set(self.characters)) != len(
            self.characters
        ):
            raise ValueError(f"characters is {self.characters!r}; must be different single characters.")
        wrong = [tag for tag in self.tags if tag in _MARKS or not (tag[:1] == "<" and tag.find(">") == len(tag) - 1)]
        if wrong or len(set(self.tags)) != len(self.tags):
            raise ValueError(f'tags is {self.tags!r}; must be different names as "<name>", none of {" ".join(_MARKS)}.')

    @property
    def vocab_size(self) -> int:
        """Characters, tags, and the four marks."""
        return len(_MARKS) + len(self.tags) + len(self.characters)

    @property
    def summary(self) -> str:
        """A line on the vocabulary."""
        shown = " ".join(self.tags[:3]) + (" …" if len(self.tags) > 3 else "")
        tags = f"{len(self.tags)} tags {shown}, " if self.tags else ""
        sizes = f"vocabulary {self.vocab_size}: {tags}{len(self.characters)} characters"
        return f"{CHARACTERS} ({sizes}, start 1, end 2, unknown 3, padding 0)"

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*_MARKS, *self.tags, *self.characters)

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self._names) if index >= len(_MARKS)}

    def encode(self, text: str) -> list[int]:
        """Ids of a text: its tag, if it begins with one, then each character; unknown ones have id 3."""
        tag = text[: text.find(">") + 1]
        start = [self._ids[tag]] if tag in self.tags else []
        return start + [self._ids.get(character, self.unknown_id) for character in text[len(tag) if start else 0 :]]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32."""
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The characters; start, end and padding ids leave nothing, an unknown character U+FFFD."""
        silent = (self.pad_id, self.bos_id, self.eos_id)
        tokens = [token for token in checked_ids(ids, self.vocab_size).tolist() if token not in silent]
        return "".join(_UNKNOWN if token == self.unknown_id else self._names[token] for token in tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a ``tokenizer.json`` with characters and tags."""
        content = {"jaxformer_tokenizer": CHARACTERS, "characters": "".join(self.characters), "tags": self.tags}
        write_file(tokenizer_file(path), json.dumps(content))

    @classmethod
    def restore(cls, content: Mapping[str, Any]) -> "CharacterTokenizer":
        """The tokenizer whose file holds ``content``."""
        return cls(tuple(content["characters"]), tuple(content["tags"]))
