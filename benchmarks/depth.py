"""Memory for gradients by depth: plain, recomputed and reversible stacks; compiled, never run.

XLA's temporary memory of the gradient of a GPT's loss, in training with dropout. Parameters are the compiled program's
arguments and gradients its results: neither is among the temporaries, and both grow with depth by themselves. Growth is
that of the temporaries from the first depth to this one. "In groups" is remat="sqrt".

    python benchmarks/depth.py
    python benchmarks/depth.py --depths 4,16,64,256 --embed_dim 256 --length 1024 --dtype bfloat16 --output depth.json
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxformer.functional import cross_entropy
from jaxformer.models import gpt

STACKS = {
    "plain": {},
    "recomputed": {"remat": "full"},
    "in groups": {"remat": "sqrt"},
    "reversible": {"residual": "reversible"},
}
MIB = 2**20


@dataclass
class Row:
    """One stack at one depth; sizes in MiB, growth in per cent of the temporaries at the first depth."""

    stack: str
    num_layers: int
    parameters: float
    gradients: float
    temporaries: float
    growth: float
    compile_s: float


def measure(name: str, num_layers: int, first: Row | None, batch_size: int, length: int, **fields) -> Row:
    """Compile the gradient and read its memory."""
    model = gpt(vocab_size=65, num_layers=num_layers, max_length=length, **fields, **STACKS[name])
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params, tokens, rng):
        logits = model.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": rng}).logits
        return cross_entropy(logits, tokens).loss_sum

    begun = time.perf_counter()
    compiled = jax.jit(jax.grad(loss)).lower(params, tokens, jax.random.key(0)).compile()
    compile_s = time.perf_counter() - begun
    memory = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes / MIB
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / MIB
    growth = 0.0 if first is None else 100 * (temporaries / first.temporaries - 1)
    return Row(name, num_layers, size, memory.output_size_in_bytes / MIB, temporaries, growth, compile_s)


def main() -> None:
    """Parse flags, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,16,64", help="numbers of layers, the smallest first")
    parser.add_argument("--stacks", default=",".join(STACKS), help="which of them")
    parser.add_argument("--embed_dim", type=int, default=128)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--dropout_rate", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32", help="of the computation; parameters are float32")
    parser.add_argument("--attention", default="dense")
    parser.add_argument("--attention_args", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    flags = vars(parser.parse_args())
    depths, stacks, output = flags.pop("depths"), flags.pop("stacks"), flags.pop("output")
    print(f"jax {jax.__version__}, {jax.default_backend()}; {flags}\n")
    heads = (("stack", 12), ("layers", 7), ("parameters", 11), ("gradients", 10), ("temporaries", 12), ("growth", 9))
    print(" ".join(f"{head:>{width}}" for head, width in (*heads, ("compile", 8))))
    rows: list[Row] = []
    for name in stacks.split(","):
        first: Row | None = None
        for depth in map(int, depths.split(",")):
            row = measure(name, depth, first, **flags)
            first = first or row
            rows.append(row)
            print(
                f"{row.stack:>12} {row.num_layers:>7} {row.parameters:>7.1f} MiB {row.gradients:>6.1f} MiB "
                f"{row.temporaries:>8.1f} MiB {row.growth:>+7.1f} % {row.compile_s:>6.1f} s",
                flush=True,
            )
    if output:
        output.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
