"""JAX's persistent compilation cache: on by default, one folder for each JAX version and type of processor.

XLA's CPU programs use the instructions of the machine that compiled them, so a home folder shared by different machines
must not share entries. JAX writes an entry in place: a process killed meanwhile leaves a torn one, at which JAX warns
and compiles again at every later start, since it never replaces an entry. Such entries are deleted here.
"""

import contextlib
import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

SWITCH = "JAXFORMER_COMPILATION_CACHE"
_ENTRIES = "*-cache"
_CHECKED = ".checked"
_FAILED_READ = "Error reading persistent compilation cache entry"


def enable_compilation_cache() -> Path | None:
    """Turns the cache on, after deleting the entries in it that cannot be read.

    `JAXFORMER_COMPILATION_CACHE=0` leaves it off; a folder that the user has given to JAX
    (`JAX_COMPILATION_CACHE_DIR`) is used as it is. The default is `$XDG_CACHE_HOME/jaxformer/compilation/…`.

    Returns:
      The folder; None where the cache is off or its folder cannot be written.
    """
    if os.environ.get(SWITCH, "1").lower() in ("0", "false", "off", "no"):
        return None
    given = jax.config.values["jax_compilation_cache_dir"]
    folder = Path(given) if given else default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_unreadable(folder)
        delete_on_failed_read(folder)
    except OSError:
        return None
    if not given:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def default_folder() -> Path:
    """The cache's folder for this user, JAX version and type of processor."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "jaxformer" / "compilation" / f"jax-{jax.__version__}-{processor_type()}"


def processor_type() -> str:
    """A short name of what compiled programs may depend on: architecture, model and instructions of the processor."""
    described = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
        described += sorted({line for line in lines if line.startswith(wanted)})
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(described).encode()).hexdigest()[:12]}"


def delete_unreadable(folder: Path) -> list[str]:
    """Deletes the cache entries that cannot be unpacked; each entry is looked at once after it was last written.

    Args:
      folder: JAX's cache folder.

    Returns:
      The names of the entries deleted.
    """
    unpack = _unpacker()
    checked = folder / _CHECKED
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    newest, deleted = since, []
    for path in sorted(folder.glob(_ENTRIES)):
        try:
            written = path.stat().st_mtime_ns
            if written < since:
                continue
            newest = max(newest, written)
            unpack(path.read_bytes())
        except FileNotFoundError:  # another process was faster
            continue
        except Exception:  # each codec has its own errors; whatever they are, JAX could not read the entry either
            path.unlink(missing_ok=True)
            deleted.append(path.name)
    checked.touch()
    os.utime(checked, ns=(newest, newest))
    return deleted


def _unpacker() -> Callable[[bytes], object]:
    """What JAX unpacks an entry with; where this JAX keeps it elsewhere, every entry passes."""
    try:
        from jax._src.compilation_cache import decompress_executable
    except ImportError:
        return len
    return decompress_executable


def delete_on_failed_read(folder: Path) -> None:
    """From now on empties the cache when JAX warns that it could not read an entry.

    For what unpacks but is no program any more. The warning does not name the entry, so all go: they cost one
    compilation each, and JAX writes the one at hand anew.
    """
    show = warnings.showwarning
    if getattr(show, "empties_cache", False):
        return

    def show_and_empty(message, *args, **kwargs):
        if _FAILED_READ in str(message):
            for path in folder.glob(_ENTRIES):
                path.unlink(missing_ok=True)
        show(message, *args, **kwargs)

    show_and_empty.empties_cache = True  # type: ignore[attr-defined]
    warnings.showwarning = show_and_empty
