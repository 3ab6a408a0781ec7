"""What is kept of a checkpoint to write another like it: its config.json, and its tensors' names and dtypes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from jaxformer.interop.checkpoint import CONFIG
from jaxformer.interop.files import TensorFiles, read_json
from jaxformer.interop.tokenizer_folder import FILES

TENSORS = "tensors.json"


@dataclasses.dataclass(frozen=True)
class Record:
    """A checkpoint without its numbers.

    Attributes:
      directory: where its tokenizer's files stand.
      values: its config.json.
      tensors: dtype of each tensor by its name in the files.
    """

    directory: Path
    values: dict[str, Any]
    tensors: dict[str, str]


def read_record(directory: Path) -> Record:
    """Reads that of a checkpoint's folder, or of one that ``write_record`` made.

    Raises:
      PretrainedError: it is neither.
    """
    values = read_json(directory / CONFIG)
    if (directory / TENSORS).is_file():
        return Record(directory, values, read_json(directory / TENSORS))
    files = TensorFiles(directory)
    return Record(directory, values, {name: files.dtype(name) for name in files.names})


def write_record(source: Path, directory: Path) -> None:
    """Writes that of a checkpoint's folder ``source`` into a folder of its own, with the tokenizer's files."""
    record = read_record(source)
    directory.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, *FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    (directory / TENSORS).write_text(json.dumps(record.tensors, indent=2) + "\n", encoding="utf-8")
