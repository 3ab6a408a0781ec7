"""Where a tokenizer's files stand, and writing them as a whole."""

import os
from pathlib import Path


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """The file that a path means: itself, or ``tokenizer.json`` in that folder."""
    path = Path(path).expanduser()
    return path if path.suffix == ".json" else path / "tokenizer.json"


def config_file(file: Path) -> Path:
    """The file beside a ``NAME.json`` that names its special tokens: ``NAME_config.json``."""
    return file.with_name(f"{file.stem}_config.json")


def write_file(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
