"""A sweep trained by one program against the same runs one after another: total time, and steps alone.

16 runs of the tiny language model (4 learning rates, 4 seeds; `--steps` updates of them), once together and once
separately, each in a process of its own with a compilation cache that is empty at first, so that separate runs compile
once too. Total times hold everything: start, compilation, steps, evaluation, checkpoints. The speed of the steps alone
is the runs' own records'. The largest difference between the two runs' losses is printed beside.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --steps 200 --options data.length=64 model.embed_dim=32
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SWEEP = "optimizer.learning_rate=1e-4,3e-4,1e-3,3e-3; seed=0..3"
FIXED = ("sample.max_new_tokens=0", "eval.every_steps=0", "checkpoint.every_steps=0", "log.every_steps=1")


def run_sweep(folder: Path, options: Sequence[str], separate: bool) -> float:
    """Runs the sweep in a process of its own; returns its seconds."""
    command = [sys.executable, "-m", "jaxformer", "sweep", "--config=language_model:size=tiny", f"--sweep={SWEEP}"]
    command += [f"--workdir={folder / 'sweep'}", *(f"--config.{option}" for option in options)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    began = time.perf_counter()
    subprocess.run(
        command + ["--separate"] * separate, env=environment, check=True, capture_output=True, text=True, timeout=3000
    )
    return time.perf_counter() - began


def read_losses(folder: Path) -> dict[str, list[float]]:
    """The training losses of each run."""
    return {path.parent.name: [record["loss"] for record in _train_records(path)] for path in _metrics(folder)}


def step_speed(folder: Path, together: bool) -> float:
    """Tokens per second of all runs, by the median over steps."""
    speeds = [
        [record["tokens_per_second"] for record in _train_records(path) if record["tokens_per_second"]]
        for path in _metrics(folder)
    ]
    medians = [float(np.median(of_run)) for of_run in speeds]
    return sum(medians) if together else float(np.mean(medians))


def _metrics(folder: Path) -> list[Path]:
    return sorted((folder / "sweep" / "runs").glob("*/metrics.jsonl"))


def _train_records(path: Path) -> list[dict]:
    records = map(json.loads, path.read_text().splitlines())
    return [record for record in records if record["split"] == "train"]


def main() -> None:
    """Runs both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="updates of each run")
    parser.add_argument("--options", nargs="*", default=[], help="changes of the config, each a.b=value")
    arguments = parser.parse_args()
    options = [*FIXED, f"train.steps={arguments.steps}", *arguments.options]
    with tempfile.TemporaryDirectory() as name:
        seconds, speeds, losses = {}, {}, {}
        for mode in ("together", "separate"):
            folder = Path(name) / mode
            folder.mkdir()
            seconds[mode] = run_sweep(folder, options, separate=mode == "separate")
            speeds[mode] = step_speed(folder, together=mode == "together")
            losses[mode] = read_losses(folder)
    difference = max(
        np.abs(np.array(losses["together"][run]) - np.array(losses["separate"][run])).max()
        for run in losses["together"]
    )
    print(f"{'':10}{'total s':>10}{'tokens/s in steps':>20}")
    for mode in seconds:
        print(f"{mode:10}{seconds[mode]:10.1f}{speeds[mode]:20,.0f}")
    print(f"separate / together: total {seconds['separate'] / seconds['together']:.2f}", end=", ")
    print(f"steps {speeds['together'] / speeds['separate']:.2f}; largest difference of a loss {difference:.2g}")


if __name__ == "__main__":
    main()
