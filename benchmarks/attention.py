"""Dense attention side by side: ours, jax.nn's, Flax's and PyTorch's, causal, float32, forward and with gradients.

All candidates run in turns, so that they meet the same load of the machine; compare ratios, not milliseconds. Output
and gradients are both returned, so that no product is dead code. XLA's temporary memory is read from the compiled
program; PyTorch (extra ``parity``) does not report any and is left out where it is not installed.

    python benchmarks/attention.py
    python benchmarks/attention.py --lengths 512,2048 --quick --output attention.json

With `--kinds` all kinds of attention are measured instead, by length: see `attention_kinds.py`.

    python benchmarks/attention.py --kinds=all --lengths=64,256,1024,4096 --quick --plot=kinds.png

With `--pairs` sparse patterns are measured by the pairs of tokens that they compute: see `attention_pairs.py`.
"""

import argparse
import functools
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import attention_kinds
import attention_pairs
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.attention import dense_attention
from jaxformer.training.memory import keep_freed_memory

HEADS, HEAD_DIM = 8, 64
# Above this many tokens the forms that hold the whole matrix of weights are left out: 6 GiB at 8,192.
LONGEST_MATRIX = 4096
REFERENCE = "jax.nn"
MODES = ("forward", "forward+backward")


@dataclass
class Candidate:
    """One implementation at one length.

    Attributes:
      name: as printed.
      mode: "forward" or "forward+backward".
      run: computes once and waits for the result.
      temporary_mib: XLA's temporary memory, None where unknown.
      seconds: one entry a run.
    """

    name: str
    mode: str
    run: Callable[[], None]
    temporary_mib: float | None
    seconds: list[float]


@dataclass
class Result:
    """A row of the table; ratios are of medians, above 1 = faster than the reference, None where it did not run."""

    length: int
    mode: str
    name: str
    median_ms: float
    min_ms: float
    temporary_mib: float | None
    times_jax_nn: float | None
    times_torch: float | None


def flax_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    length = query.shape[1]
    mask = flax.linen.make_causal_mask(jnp.ones((1, length)), dtype=bool)
    return flax.linen.dot_product_attention(query, key, value, mask=mask)


def jax_functions(length: int) -> dict[str, Callable]:
    """The JAX candidates that are worth running at this length."""
    functions = {"jaxformer blockwise": functools.partial(dense_attention, causal=True, implementation="blockwise")}
    if length <= LONGEST_MATRIX:
        functions |= {
            "jaxformer xla": functools.partial(dense_attention, causal=True, implementation="xla"),
            REFERENCE: functools.partial(jax.nn.dot_product_attention, is_causal=True),
            "flax.linen": flax_attention,
        }
    return functions


def compile_jax(name: str, function: Callable, arrays: list[np.ndarray]) -> list[Candidate]:
    """The candidate's two modes, compiled."""
    *inputs, direction = (jnp.asarray(array) for array in arrays)

    def with_gradients(*inputs: jax.Array) -> tuple:
        output, pull = jax.vjp(function, *inputs)
        return output, pull(direction)

    candidates = []
    for mode, timed in zip(MODES, (function, with_gradients)):
        compiled = jax.jit(timed).lower(*inputs).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20

        def run(compiled: Callable = compiled) -> None:
            jax.block_until_ready(compiled(*inputs))

        candidates.append(Candidate(name, mode, run, memory, []))
    return candidates


def compile_torch(arrays: list[np.ndarray]) -> list[Candidate]:
    """PyTorch's fused attention on its own layout, [batch, heads, tokens, features], or nothing without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    *inputs, direction = (torch.tensor(array).transpose(1, 2).contiguous() for array in arrays)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def with_gradients() -> None:
        leaves = [array.detach().requires_grad_() for array in inputs]
        attend(*leaves).backward(direction)

    return [Candidate("torch", mode, run, None, []) for mode, run in zip(MODES, (forward, with_gradients))]


def measure(length: int, repetitions: int) -> list[Result]:
    """All candidates at one length, in turns."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((1, length, HEADS, HEAD_DIM)).astype(np.float32) for _ in range(4)]
    candidates = compile_torch(arrays)
    for name, function in jax_functions(length).items():
        candidates += compile_jax(name, function, arrays)
    for repetition in range(repetitions + 1):
        for candidate in candidates:
            start = time.perf_counter()
            candidate.run()
            if repetition:  # The first round warms up.
                candidate.seconds.append(time.perf_counter() - start)
    return [summarise(length, candidate, candidates) for candidate in candidates]


def summarise(length: int, candidate: Candidate, candidates: list[Candidate]) -> Result:
    median = float(np.median(candidate.seconds))

    def times(reference: str) -> float | None:
        found = [other for other in candidates if (other.name, other.mode) == (reference, candidate.mode)]
        return float(np.median(found[0].seconds)) / median if found else None

    return Result(
        length=length,
        mode=candidate.mode,
        name=candidate.name,
        median_ms=1e3 * median,
        min_ms=1e3 * min(candidate.seconds),
        temporary_mib=candidate.temporary_mib,
        times_jax_nn=times(REFERENCE),
        times_torch=times("torch"),
    )


def table(results: list[Result]) -> str:
    """The results as a Markdown table, the fastest first."""
    lines = [
        "| tokens | mode | implementation | median ms | min ms | temporaries MiB | speed / jax.nn | speed / torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda r: (r.length, r.mode, r.median_ms)):
        cells = (result.temporary_mib, result.times_jax_nn, result.times_torch)
        memory, jax_nn, torch = (
            pattern.format(cell) if cell is not None else "" for pattern, cell in zip(PATTERNS, cells)
        )
        lines.append(
            f"| {result.length} | {result.mode} | {result.name} | {result.median_ms:.1f} | {result.min_ms:.1f} "
            f"| {memory} | {jax_nn} | {torch} |"
        )
    return "\n".join(lines)


PATTERNS = ("{:.0f}", "{:.2f}x", "{:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="tokens, separated by commas")
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 7")
    parser.add_argument("--output", help="path of a JSON file for the results")
    parser.add_argument("--kinds", help="all, or names of attentions and patterns, separated by commas")
    parser.add_argument(
        "--pairs", action="store_true", help="sparse patterns by computed pairs, beside dense attention"
    )
    parser.add_argument("--repetitions", type=int, help="repetitions (of kinds: 0 = compile only)")
    parser.add_argument("--plot", help="of kinds: path of a picture, log-log")
    arguments = parser.parse_args()
    keep_freed_memory()  # as jaxformer's commands do; for all candidates alike
    lengths = [int(length) for length in arguments.lengths.split(",")]
    repetitions = (3 if arguments.quick else 7) if arguments.repetitions is None else arguments.repetitions
    if arguments.kinds:
        attention_kinds.run(arguments.kinds, lengths, repetitions, arguments.output, arguments.plot)
        return
    if arguments.pairs:
        attention_pairs.run(lengths, repetitions, arguments.output)
        return
    results: list[Result] = []
    for length in lengths:
        results += measure(length, repetitions)
    print(f"B=1, {HEADS} heads of {HEAD_DIM}, float32, causal, on {jax.devices()[0].device_kind}\n\n{table(results)}")
    if arguments.output:
        Path(arguments.output).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
