"""What sparse patterns compute and at which speed, beside dense attention by blocks, forward and backward, causal.

For each pattern: pairs of tokens that the engine computes for each that the pattern has; time for each computed pair,
as a multiple of the dense form's; and how many times faster than the dense form the whole is. All programs of one
length run in turns, and the least time of each counts.

    python benchmarks/attention.py --pairs --lengths=4096,8192,16384
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.attention import dense_attention, patterns, sparse_attention
from jaxformer.attention.patterns import Pattern

HEADS, HEAD_DIM = 8, 64
DENSE = "dense blockwise"
PATTERNS: dict[str, Pattern] = {
    "local(256)": patterns.local(256),
    "strided(90)": patterns.strided(90),
    "strided(128)": patterns.strided(128),
    "fixed(128, 8)": patterns.fixed(128, 8),
    "longformer(256, 16 tokens)": patterns.longformer(256, tuple(range(16))),
    "bigbird(64, 3)": patterns.bigbird(64, 3, seed=0),
}


@dataclass
class Result:
    """A row of the table.

    Attributes:
      own, executed: pairs of tokens that count, and that are computed.
      seconds: one entry a run.
    """

    name: str
    length: int
    own: int
    executed: int
    temporary_mib: float
    seconds: list[float] = field(default_factory=list)

    def pair_seconds(self) -> float:
        """Least time for a computed pair."""
        return min(self.seconds) / self.executed


def dense_pairs(length: int, block: int = 256) -> int:
    """Pairs in the blocks that the dense form computes where the length is a multiple of its block."""
    blocks = length // block
    return blocks * (blocks + 1) // 2 * block**2


def measure(length: int, repetitions: int) -> list[Result]:
    """The dense form and all patterns at one length."""
    if length % 256:
        raise SystemExit(f"--lengths has {length}; it must be a multiple of 256, the block of the dense form.")
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.standard_normal((1, length, HEADS, HEAD_DIM)), jnp.float32) for _ in range(4)]

    def dense(*tensors: jax.Array) -> jax.Array:
        return dense_attention(*tensors, causal=True, implementation="blockwise")

    programs = [compile_one(DENSE, length, dense, inputs, length * (length + 1) // 2, dense_pairs(length))]
    for name, pattern in PATTERNS.items():

        def sparse(*tensors: jax.Array, pattern: Pattern = pattern) -> jax.Array:
            return sparse_attention(*tensors, pattern=pattern, causal=True)

        counts = pattern.num_pairs(length, causal=True), pattern.executed_pairs(length, causal=True)
        programs.append(compile_one(name, length, sparse, inputs, *counts))
    for repetition in range(repetitions + 1):
        for result, run in programs:
            start = time.perf_counter()
            run()
            if repetition:  # The first round warms up.
                result.seconds.append(time.perf_counter() - start)
    return [result for result, _ in programs]


def compile_one(
    name: str, length: int, attend: Callable, inputs: list[jax.Array], own: int, executed: int
) -> tuple[Result, Callable[[], None]]:
    """Forward and gradients, compiled."""

    def with_gradients(query: jax.Array, key: jax.Array, value: jax.Array, direction: jax.Array) -> tuple:
        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(direction)

    compiled = jax.jit(with_gradients).lower(*inputs).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return Result(name, length, own, executed, memory), lambda: jax.block_until_ready(compiled(*inputs))


def table(results: list[Result]) -> str:
    """As Markdown."""
    lines = [
        "| tokens | pattern | least ms | computed / own pairs | time per computed pair / dense | faster than dense |",
        "|---|---|---|---|---|---|",
    ]
    dense = {result.length: result for result in results if result.name == DENSE}
    for result in results:
        beside = dense[result.length]
        least = min(result.seconds)
        cells = (
            f"{result.length:,}",
            result.name,
            f"{1e3 * least:.0f}",
            f"{result.executed / result.own:.2f}",
            f"{result.pair_seconds() / beside.pair_seconds():.2f}",
            f"{min(beside.seconds) / least:.1f}x",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(lengths: list[int], repetitions: int, output: str | None) -> None:
    """Measures, prints the table and writes what is asked for."""
    results = [result for length in lengths for result in measure(length, repetitions)]
    print(f"B=1, {HEADS} heads of {HEAD_DIM}, float32, on {jax.devices()[0].device_kind}\n")
    print(table(results))
    if output:
        Path(output).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
