"""An opened checkpoint folder: its family, its settings, and its tensors under the names that rules know."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.family import Family
from jaxformer.interop.files import TensorFiles, read_json
from jaxformer.interop.rules import matches

CONFIG = "config.json"
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder whose tensors can be read.

    Attributes:
      directory: the folder.
      values: its config.json.
      family: its family.
      files: its tensors.
      stored: the name that each tensor has in the files, by the name that rules give it.
    """

    directory: Path
    values: dict[str, Any]
    family: Family
    files: TensorFiles
    stored: dict[str, str]

    @property
    def architecture(self) -> str | None:
        """The first that config.json names."""
        return named_architecture(self.values)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, byte by byte."""
        files, names = self.files, (self.stored[first], self.stored[second])
        if files.shape(names[0]) != files.shape(names[1]) or files.dtype(names[0]) != files.dtype(names[1]):
            return False
        rows = (files.shape(names[0]) or (1,))[0]
        pieces = (slice(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))
        return all(
            files.read(names[0], (part,)).tobytes() == files.read(names[1], (part,)).tobytes() for part in pieces
        )

    def without_copies(self, tied: bool) -> "Checkpoint":
        """The checkpoint with one name for what its files hold several times, such as a tied head.

        Raises:
          PretrainedError: two tensors that have to be equal are not.
        """
        stored = dict(self.stored)
        copies = {**self.family.copies, **(self.family.duplicates if tied else {})}
        for copy, original in copies.items():
            if copy not in stored:
                continue
            if original not in stored:
                stored[original] = stored[copy]
            elif not self.equal(copy, original):
                told = "config.json says that they are tied" if copy in self.family.duplicates else "they are one"
                raise PretrainedError(
                    f"{self.directory} holds {stored[copy]} and {stored[original]}, which differ although {told} "
                    "(tie_word_embeddings: false in config.json unties a head)"
                )
            del stored[copy]
        return dataclasses.replace(self, stored=stored)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Opens a folder, reading no tensor.

    Raises:
      PretrainedError: no config.json, an unknown family, or no tensors that can be read.
    """
    values = read_json(directory / CONFIG)
    family = family_of(values, directory)
    files = TensorFiles(directory)
    return Checkpoint(directory, values, family, files, canonical_names(family, files.names))


def named_architecture(values: dict[str, Any]) -> str | None:
    """The first architecture that a config.json names; None where it names none.

    Raises:
      PretrainedError: what stands there is no list of names.
    """
    named = values.get("architectures") or [None]
    if not isinstance(named, list) or not isinstance(named[0], str | None):
        raise PretrainedError(f"config.json has architectures={named!r}, must be a list of names")
    return named[0]


def family_of(values: dict[str, Any], directory: Path) -> Family:
    """The family that a config.json names.

    Raises:
      PretrainedError: none of those that can be read.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise PretrainedError(f"{directory / CONFIG} has model_type={kind!r}, must be one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def canonical_names(family: Family, stored: Iterable[str]) -> dict[str, str]:
    """Tensors' names in files by the names that rules give them: new for old ones, the body's with its prefix.

    Raises:
      PretrainedError: two names in the files mean one tensor.
    """
    body = (*family.body, *family.gated, *family.ungated)
    body = (*body, *(rule for head in family.heads if head.is_body for rule in head.rules))
    found: dict[str, str] = {}
    for stored_name in stored:
        name = stored_name
        for pattern, replacement in family.renamed:
            name = re.sub(pattern, replacement, name)
        prefixed = family.prefix + name
        if matches(prefixed, body) or is_buffer(family, prefixed):
            name = prefixed
        if name in found:
            raise PretrainedError(f"{stored_name} and {found[name]} are two names of one tensor, {name}")
        found[name] = stored_name
    return found


def is_buffer(family: Family, name: str) -> bool:
    """Whether a tensor is none of the model's parameters, or one that nothing reads."""
    return any(re.fullmatch(pattern, name) for pattern in family.buffers)
