import os
import subprocess
import sys
import time
import zlib

import pytest

from jaxformer.training.compilation_cache import delete_unreadable, processor_type

COMPILE = """
import sys, time, warnings
warnings.simplefilter("always")
import jax, jax.numpy as jnp
from jaxformer.training.compilation_cache import enable_compilation_cache
folder = enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(folder)
print(float(jax.jit(lambda x: jnp.sin(x) * 3)(jnp.float32(0.0))))
"""


def compile_once(**environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env={**inherited, **environment}, check=True
    )
    return result.stdout.splitlines()[0], result.stderr


def entries(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*-cache")}


def damage(folder, content):
    for path in folder.glob("*-cache"):
        path.write_bytes(content(path.read_bytes()))


def test_cache_lies_under_the_cache_folder_by_version_and_processor(tmp_path):
    folder, _ = compile_once(XDG_CACHE_HOME=str(tmp_path))
    assert folder.startswith(f"{tmp_path}/jaxformer/compilation/jax-")
    assert folder.endswith(processor_type())
    (made,) = (tmp_path / "jaxformer" / "compilation").iterdir()
    assert entries(made)


@pytest.mark.parametrize(
    "content",
    [
        lambda old: old[: len(old) // 2],
        pytest.param(lambda old: b"", marks=pytest.mark.slow),
        pytest.param(lambda old: zlib.compress(b"no program"), marks=pytest.mark.slow),
    ],
    ids=["torn", "empty", "no program"],
)
def test_unreadable_entry_is_met_once_at_most(tmp_path, content):
    folder, _ = compile_once(XDG_CACHE_HOME=str(tmp_path))
    folder = tmp_path.__class__(folder)
    good = set(entries(folder))
    damage(folder, content)
    compile_once(XDG_CACHE_HOME=str(tmp_path))
    assert set(entries(folder)) == good
    _, stderr = compile_once(XDG_CACHE_HOME=str(tmp_path))
    assert "Error reading persistent compilation cache" not in stderr


def test_cache_is_off_on_request(tmp_path):
    folder, _ = compile_once(XDG_CACHE_HOME=str(tmp_path), JAXFORMER_COMPILATION_CACHE="0")
    assert folder == "None"
    assert not list(tmp_path.iterdir())


def test_folder_that_the_user_gave_to_jax_is_used(tmp_path):
    folder, _ = compile_once(XDG_CACHE_HOME=str(tmp_path / "a"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "b"))
    assert folder == str(tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert entries(tmp_path / "b")


def test_entries_are_looked_at_again_only_after_they_change(tmp_path):
    (tmp_path / "a-cache").write_bytes(zlib.compress(b"a"))
    (tmp_path / "b-cache").write_bytes(b"torn")
    (tmp_path / "other").write_bytes(b"not ours")
    os.utime(tmp_path / "a-cache", ns=(1, 1))
    assert delete_unreadable(tmp_path) == ["b-cache"]
    (tmp_path / "a-cache").write_bytes(b"torn")
    os.utime(tmp_path / "a-cache", ns=(1, 1))
    assert delete_unreadable(tmp_path) == []
    os.utime(tmp_path / "a-cache", ns=(time.time_ns(), time.time_ns()))
    assert delete_unreadable(tmp_path) == ["a-cache"]
    assert (tmp_path / "other").exists()


def test_cache_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert compile_once(XDG_CACHE_HOME=str(tmp_path / "file"))[0] == "None"
