"""Files that commands write: at once or not at all, and never over their input."""

import json
import os
import sys
from pathlib import Path
from typing import Any


def check_target(target: str | Path | None, source: str | Path) -> None:
    """Refuses, before anything is computed, a file that cannot be written or is the input itself.

    Raises:
      ValueError: as said.
    """
    if target is None or str(target) == "-":
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise ValueError(f"output {path} is a folder, must be a file")
        if not path.parent.is_dir():
            raise ValueError(f"output {path}: there is no folder {path.parent}")
        if path.exists() and Path(source).exists() and os.path.samefile(path, source):
            raise ValueError(f"output {path} is the input itself; must be another file")
        if path.is_file() or not path.exists():
            temporary = _beside(path)
            temporary.touch()
            temporary.unlink()
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def write_target(target: str | Path, content: str | bytes) -> None:
    """Writes a file at once or not at all, by way of another beside it; "-" prints.

    Raises:
      ValueError: it cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if str(target) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    path = Path(target)
    temporary = _beside(path)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
            return
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _beside(path: Path) -> Path:
    """A file of this process's own in the same folder; its name is short, since the other may be as long as can be."""
    return path.with_name(f".{os.getpid()}.tmp")


def _cannot_be_written(path: Path, error: OSError) -> ValueError:
    return ValueError(f"output {path} cannot be written: {error.strerror or error}")


def one_line(entry: Any) -> str:
    """JSON on a line; lone surrogates, which UTF-8 does not hold, as escapes."""
    text = json.dumps(entry, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(entry)
    return text
