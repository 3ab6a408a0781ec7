"""A tiny language-model run on generated text, shared by the tests that only look at it."""

import random
import subprocess
import sys

import pytest

from jaxformer.training.config import load_config
from jaxformer.training.loop import train_and_evaluate

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]

# Small enough to compile in seconds; every size differs from the others.
TINY = (
    "model.embed_dim=16",
    "model.num_heads=2",
    "model.num_layers=2",
    "model.mlp_dim=24",
    "data.name=text",
    "data.length=23",
    "data.validation_bytes=None",
    "data.validation_fraction=0.2",
    "train.batch_size=4",
    "eval.batch_size=3",
    "schedule.warmup_steps=3",
    # Pinned, so that tuning the experiment changes no test.
    "model.positions=learned",
    "model.init_stddev=0.02",
    "optimizer.learning_rate=3e-3",
    "schedule.final_fraction=0.1",
    "sample.prompt=be",
    "sample.max_new_tokens=0",
    "log.every_steps=1",
)


def _write_text(folder, num_documents=11, seed=0):
    """Writes files of random sentences; their sizes differ."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num_documents):
        words = draw.choices(WORDS, k=5 + index)
        (folder / f"{index:02}.txt").write_text(" ".join(words) + "\n")


def _tiny_config(text, *overrides, arg="size=tiny"):
    """The bundled config at a size for tests, on the files of a folder."""
    return load_config(f"language_model:{arg}", [*TINY, f"data.path={text}/*.txt", *overrides])


@pytest.fixture(scope="session")
def write_text():
    return _write_text


@pytest.fixture(scope="session")
def tiny_config():
    return _tiny_config


@pytest.fixture(scope="session")
def tiny_flags(text):
    """The same config as flags of the command line."""
    overrides = [f"--config.{override}" for override in (*TINY, f"data.path={text}/*.txt")]
    return ["--config=language_model:size=tiny", *overrides]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    _write_text(folder)
    return folder


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory):
    """A finished run of 12 steps: (run directory, its figures)."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    changes = ("train.steps=12", "eval.every_steps=5", "checkpoint.every_steps=4", "sample.max_new_tokens=7")
    config = _tiny_config(text, *changes)
    return workdir, train_and_evaluate(config, workdir)


@pytest.fixture
def run_python():
    """Starts `python arguments…` in a process of its own."""

    def start(*arguments, **kwargs):
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    return start
