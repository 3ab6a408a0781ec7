"""The folder of one run: what stands where, one writer at a time, and the record of what it ran on."""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxformer

_RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


class RunDirectoryError(ValueError):
    """A run directory that cannot be used; the message says why in one sentence."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Paths inside a run directory.

    Attributes:
      path: the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The config: to read, and to rebuild from."""
        return self.path / "config.json"

    @property
    def run(self) -> Path:
        """Versions, commit, devices, threads and data of the last start, and of those before."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """A folder for each step saved."""
        return self.path / "checkpoints"

    @property
    def tokenizer_file(self) -> Path:
        """The run's own copy of its tokenizer's file."""
        return self.path / "tokenizer.json"

    @property
    def source_tokenizer_file(self) -> Path:
        """The run's own copy of the source's tokenizer, where that is another than the target's."""
        return self.path / "source" / "tokenizer.json"

    def tokenizer(self, name: str) -> str:
        """Where the run's tokenizer stands: `bytes`, or the copy that the run made of its file.

        Raises:
          RunDirectoryError: the copy is missing.
        """
        return _copy(self.tokenizer_file, name)

    def source_tokenizer(self, name: str) -> str:
        """The same of the source's tokenizer."""
        return _copy(self.source_tokenizer_file, name)

    @property
    def pictures(self) -> Path:
        """A PNG file for each time that pictures were drawn."""
        return self.path / "pictures"

    @property
    def ponder(self) -> Path:
        """A folder for each step whose ponder maps were written."""
        return self.path / "ponder"

    @property
    def translations(self) -> Path:
        """A folder for each step whose translations were written."""
        return self.path / "translations"

    @property
    def task(self) -> Path:
        """What a run's predictions are: the task and its classes."""
        return self.path / "task.json"

    @property
    def predictions(self) -> Path:
        """A folder for each step whose predictions were written."""
        return self.path / "predictions"

    @property
    def pretrained(self) -> Path:
        """What a converted run keeps of the checkpoint that it was: its settings, its tensors' names, its tokenizer."""
        return self.path / "pretrained"

    @property
    def tensorboard(self) -> Path:
        """Event files, where `log.tensorboard` is set."""
        return self.path / "tensorboard"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    def create(self) -> None:
        """Makes the folder.

        Raises:
          RunDirectoryError: it cannot be made or written to, or it holds other things than a run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise RunDirectoryError(f"workdir {self.path} cannot be used: {_reason(error)}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RunDirectoryError(f"workdir {self.path} cannot be written to")
        if foreign and not self.exists and not (self.path / ".lock").exists():
            raise RunDirectoryError(f"workdir {self.path} is not a run directory but holds {sorted(foreign)[0]}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for writing; the system lets go of it whenever the process ends, however it ends.

        Raises:
          RunDirectoryError: another process holds it.
        """
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"workdir {self.path} cannot be written to: {_reason(error)}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise RunDirectoryError(
                    f"workdir {self.path} is being written to by process {owner}; one run at a time"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def record_start(self, facts: dict[str, Any]) -> None:
        """Writes `run.json`: this start's surroundings and `facts`, with the earlier starts below."""
        earlier = []
        with contextlib.suppress(OSError, json.JSONDecodeError):
            last = json.loads(self.run.read_text())
            earlier = [*last.pop("earlier", []), last]
        write_json(self.run, {**surroundings(), **facts, "earlier": earlier})

    def read_start(self) -> dict[str, Any]:
        """Reads the last start's record; empty where there is none."""
        try:
            return json.loads(self.run.read_text())
        except (OSError, json.JSONDecodeError):
            return {}


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by a JSON value, at once or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def _copy(file: Path, name: str) -> str:
    """The copy of a tokenizer's file, or `bytes`."""
    if name == "bytes":
        return name
    if not file.is_file():
        raise RunDirectoryError(f"the run's tokenizer file {file} is missing; it was copied from {name}")
    return str(file)


def surroundings() -> dict[str, Any]:
    """What a run's figures depend on besides its config: versions, commit, devices, threads, machine."""
    import jax

    versions = {"jaxformer": jaxformer.__version__, "python": platform.python_version()}
    for name in _RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    devices = jax.devices()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "versions": versions,
        "commit": commit(),
        "machine": f"{platform.system()} {platform.machine()}",
        "backend": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "num_processes": jax.process_count(),
        "threads": usable_threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def usable_threads() -> list[int] | int | None:
    """The processors that this process may run on: their numbers where the system tells, else how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return os.cpu_count()


@functools.cache
def commit() -> str | None:
    """The package's git commit, with `+changes` where files differ from it; None outside a checkout."""
    root = Path(jaxformer.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
