"""Every kind of attention by length: time, temporaries, operations, growth, and where each overtakes dense attention.

Forward and backward together, one compiled program a kind and length, both results returned, least of the repetitions;
all kinds of one length run in turns. XLA's temporary memory comes from the compiled program; operations, and the
temporaries beside XLA's, from the cost model (`jaxformer.analysis.cost`). The last table is the share of attention in a
block with projections and feed-forward.

    python benchmarks/attention.py --kinds=all --lengths=64,256,1024,4096,16384
    python benchmarks/attention.py --kinds=local,lsh --lengths=8192,16384,32768,65536 --plot=kinds.png
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.analysis.cost import attention_cost, growth_exponent
from jaxformer.attention import ATTENTION, PATTERNS, draw_features, draw_hash_planes, draw_rotations
from jaxformer.layers import FeedForward, MultiHeadAttention

HEADS, HEAD_DIM = 8, 64
EMBED_DIM, MLP_DIM = HEADS * HEAD_DIM, 4 * HEADS * HEAD_DIM
# Nothing slower than this many operations or (by the length before) seconds, or larger than this many bytes, is run.
MOST_OPERATIONS, MOST_SECONDS, MOST_BYTES = 2.5e12, 30.0, 12 * 2**30
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One kind at one length.

    Attributes:
      args: static arguments of the function.
      arrays: arrays that it needs, drawn from a generator.
      cost: arguments of the cost model, where they are not `args`.
      causal: whether it is run causally; the others can't be.
    """

    args: dict[str, Any]
    arrays: Callable[[np.random.Generator], Arrays] = lambda random: {}
    cost: dict[str, Any] | None = None
    causal: bool = True


@dataclass
class Measurement:
    """A row of the table; None where it was not run."""

    kind: str
    length: int
    operations: int
    stated_mib: float
    temporary_mib: float | None
    seconds: float | None


def root(length: int) -> int:
    """The stride that balances the two steps of a factorised pattern."""
    return max(1, math.isqrt(length))


def even_factors(buckets: int) -> int | tuple[int, int]:
    """Buckets in two even factors once hashing all of them would cost more than attending."""
    if buckets <= 64:
        return max(2, buckets - buckets % 2)
    first = 2 ** (round(math.log2(buckets)) // 2)
    return first, 2 ** round(math.log2(buckets)) // first


def _normal(*shape: int, scale: float = 1.0) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda random: (scale * random.standard_normal(shape)).astype(np.float32)


def _named(**draws: Callable[[np.random.Generator], np.ndarray]) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: {name: draw(random) for name, draw in draws.items()}


def settings(length: int) -> dict[str, Setting]:
    """Every kind as one would choose it at this length."""
    buckets = even_factors(max(2, length // 32))
    clusters = max(1, root(length) // 8)
    blocks = -(-length // 64)
    width = HEAD_DIM
    globals_ = tuple(range(min(16, length)))
    return {
        "dense": Setting({}),
        "shared_query_key": Setting({}),
        "bilinear": Setting({}, _named(kernel=_normal(HEAD_DIM, HEAD_DIM, scale=HEAD_DIM**-0.5))),
        "kernel": Setting({"kernel": "gaussian", "width": 3.0}, cost={}),
        "additive": Setting(
            {},
            _named(
                query_kernel=_normal(HEAD_DIM, width, scale=0.1),
                key_kernel=_normal(HEAD_DIM, width, scale=0.1),
                score_vector=_normal(width),
            ),
            cost={"hidden_dim": width},
        ),
        "concat": Setting(
            {},
            _named(kernel=_normal(2 * HEAD_DIM, width, scale=0.1), score_vector=_normal(width)),
            cost={"hidden_dim": width},
        ),
        "local": Setting({"window": 256}),
        "dilated": Setting({"window": 64, "dilation": 4}),
        "strided": Setting({"stride": root(length)}),
        "fixed": Setting({"stride": root(length), "num_summary": min(8, root(length))}),
        "global_tokens": Setting({"indices": globals_}),
        "random_blocks": Setting({"num": 3, "seed": 0}),
        "bigbird": Setting({"block_size": 64, "num_random": 3, "seed": 0}),
        "longformer": Setting(
            {"window": 256, "global_indices": globals_},
            _named(**{f"global_{name}": _normal(1, length, HEADS, HEAD_DIM) for name in ("query", "key", "value")}),
        ),
        "lsh": Setting(
            {"chunk_size": 64, "num_buckets": buckets},
            lambda random: {"rotations": draw_rotations(jax.random.key(0), 2, buckets, HEAD_DIM, HEADS)},
            cost={"chunk_size": 64, "num_buckets": buckets, "num_hashes": 2},
        ),
        "routing": Setting(
            {"window": min(length, length // clusters)},
            _named(centroids=_normal(HEADS, clusters, HEAD_DIM)),
            cost={"window": min(length, length // clusters), "num_clusters": clusters},
        ),
        "sinkhorn": Setting({"block_size": 64}, _named(block_scores=_normal(1, HEADS, blocks, blocks))),
        "clustered": Setting(
            {"num_clusters": min(100, length)},
            lambda random: {"hash_planes": draw_hash_planes(jax.random.key(0), HEAD_DIM)},
            causal=False,
        ),
        "linformer": Setting(
            {},
            _named(
                key_projection=_normal(256, length, scale=length**-0.5),
                value_projection=_normal(256, length, scale=length**-0.5),
            ),
            cost={"rank": 256, "share_key_value": False},
            causal=False,
        ),
        "compressed": Setting({"stride": 4}),
        "linear": Setting({}),
        "performer": Setting(
            {},
            lambda random: {"projection": draw_features(jax.random.key(0), 128, HEAD_DIM)},
            cost={"num_features": 128},
        ),
    }


def arguments_of(name: str, setting: Setting) -> tuple[Any, dict[str, Any]]:
    """The record and the function's static arguments; a pattern's become the pattern."""
    if name in PATTERNS:
        return ATTENTION["sparse"], {"pattern": PATTERNS[name].constructor(**setting.args)}
    return ATTENTION[name], setting.args


@dataclass
class Program:
    """One kind at one length, compiled.

    Attributes:
      run: computes once and waits for the result; None where it would take too long or too much memory.
      operations: of the forward and backward pass, by the cost model.
      stated_bytes: temporaries of the backward pass, by the cost model.
      temporary_bytes: XLA's; None where it was not compiled.
    """

    name: str
    length: int
    run: Callable[[], None] | None
    operations: int
    stated_bytes: int
    temporary_bytes: int | None
    seconds: list[float]


def compile_kind(name: str, length: int, timed: bool) -> Program:
    """Forward and gradients by query, key and value."""
    setting = settings(length)[name]
    record, args = arguments_of(name, setting)
    cost_args = setting.args if setting.cost is None else setting.cost
    cost = attention_cost(name, 1, length, HEADS, HEAD_DIM, causal=setting.causal, **cost_args)
    operations, stated = cost.training.total, cost.backward.temporary_bytes
    if operations > MOST_OPERATIONS:
        return Program(name, length, None, operations, stated, None, [])
    random = np.random.default_rng(0)
    shape = (1, length, HEADS, HEAD_DIM)
    count = 2 if record.shared_query_key else 3
    tensors = [jnp.asarray(random.standard_normal(shape), jnp.float32) for _ in range(count)]
    arrays = {key: jnp.asarray(array) for key, array in setting.arrays(random).items()}
    direction = jnp.asarray(random.standard_normal(shape), jnp.float32)

    def with_gradients(tensors: list[jax.Array], arrays: Arrays, direction: jax.Array) -> tuple:
        output, pull = jax.vjp(
            lambda *tensors: record.function(*tensors, causal=setting.causal, **args, **arrays), *tensors
        )
        return output, pull(direction)

    compiled = jax.jit(with_gradients).lower(tensors, arrays, direction).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes

    def run() -> None:
        jax.block_until_ready(compiled(tensors, arrays, direction))

    return Program(name, length, run if timed and temporary <= MOST_BYTES else None, operations, stated, temporary, [])


def take_turns(programs: list[Program], repetitions: int) -> None:
    """Runs all programs in turns, after a round that warms up."""
    for repetition in range(repetitions + 1 if repetitions else 0):
        for program in programs:
            if program.run is not None:
                start = time.perf_counter()
                program.run()
                if repetition:
                    program.seconds.append(time.perf_counter() - start)


def measure(names: list[str], lengths: list[int], repetitions: int) -> list[Measurement]:
    """All kinds at all lengths; those of one length in turns."""
    results: list[Measurement] = []
    for length in lengths:
        programs = [compile_kind(name, length, repetitions > 0) for name in names]
        for program in programs:
            if expected_seconds(program, results) > MOST_SECONDS:
                program.run = None
        take_turns(programs, repetitions)
        for program in programs:
            mib = None if program.temporary_bytes is None else program.temporary_bytes / 2**20
            least = min(program.seconds) if program.seconds else None
            stated = program.stated_bytes / 2**20
            results.append(Measurement(program.name, length, program.operations, stated, mib, least))
            memory = f"{_cell(mib, '.0f')} MiB ({stated:.0f} by the cost model)"
            print(f"{program.name:>16} {length:>6}  {memory}  {_cell(least, '.4f')} s", flush=True)
    return results


def expected_seconds(program: Program, results: list[Measurement]) -> float:
    """How long a program will take if its kind computes as fast as at the longest length so far; 0 if unknown."""
    known = [result for result in results if result.kind == program.name and result.seconds is not None]
    last = max(known, key=lambda result: result.length, default=None)
    return 0.0 if last is None else last.seconds * program.operations / last.operations


def summary(results: list[Measurement]) -> list[dict[str, Any]]:
    """For each kind the growth exponents over its lengths, and from which of them on it stays below dense attention."""
    rows = []
    dense = [result for result in results if result.kind == "dense"]
    for name in dict.fromkeys(result.kind for result in results):
        own = [result for result in results if result.kind == name]
        rows.append(
            {
                "kind": name,
                "operations": _exponent(own, "operations"),
                "temporaries": _exponent(own, "temporary_mib"),
                "time": _exponent(own, "seconds"),
                "faster_than_dense_from": stays_below(own, dense, "seconds"),
                "fewer_operations_from": stays_below(own, dense, "operations"),
            }
        )
    return rows


def stays_below(own: list[Measurement], dense: list[Measurement], field: str) -> int | None:
    """The least length from which on a kind has less of something than dense attention at every length of both."""
    yardstick = {result.length: getattr(result, field) for result in dense}
    found = None
    for result in sorted(own, key=lambda result: -result.length):
        number, other = getattr(result, field), yardstick.get(result.length)
        if number is None or other is None:
            continue
        if number >= other:
            break
        found = result.length
    return found


def _exponent(results: list[Measurement], field: str) -> float | None:
    known = [(result.length, getattr(result, field)) for result in results if getattr(result, field)]
    return growth_exponent(*zip(*known)) if len(known) > 1 else None


class Surroundings(nn.Module):
    """What a block does beside attending: projections and the feed-forward layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = MultiHeadAttention(num_heads=HEADS, attention=_all_used)(x).output
        return FeedForward(mlp_dim=MLP_DIM)(x)


def _all_used(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Stands in for attention, to time what is around it; every projection is used."""
    return query + key + value


def compile_surroundings(length: int) -> Program:
    """Forward and gradients of a block without its attention."""
    block = Surroundings()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, length, EMBED_DIM)), jnp.float32)
    params = jax.jit(block.init)(jax.random.key(0), x)
    compiled = jax.jit(jax.grad(lambda params, x: block.apply(params, x).sum(), (0, 1))).lower(params, x).compile()

    def run() -> None:
        jax.block_until_ready(compiled(params, x))

    return Program("rest", length, run, 0, 0, None, [])


def share_of_block(names: list[str], lengths: list[int], repetitions: int) -> dict[str, dict[int, float]]:
    """Fraction of a block's time (attention, projections, feed-forward; forward and backward) that attention takes."""
    shares: dict[str, dict[int, float]] = {name: {} for name in names}
    for length in lengths:
        programs = [compile_surroundings(length), *(compile_kind(name, length, True) for name in names)]
        take_turns(programs, repetitions)
        rest = min(programs[0].seconds)
        for program in programs[1:]:
            if program.seconds:
                shares[program.name][length] = min(program.seconds) / (min(program.seconds) + rest)
    return shares


def table(results: list[Measurement], rows: list[dict[str, Any]], shares: dict[str, dict[int, float]]) -> str:
    """Times and temporaries by length, then growth and crossings, then shares, as Markdown."""
    lengths = sorted({result.length for result in results})
    found = {(result.kind, result.length): result for result in results}
    header = "| kind | " + " | ".join(f"{length:,}" for length in lengths) + " |"
    lines = ["ms (least) · temporaries in MiB (by the cost model), by tokens", ""]
    lines += [header, "|---" * (len(lengths) + 1) + "|"]
    for row in rows:
        cells = []
        for length in lengths:
            result = found[row["kind"], length]
            milliseconds = None if result.seconds is None else 1e3 * result.seconds
            memory = f"{_cell(result.temporary_mib, '.0f')} ({result.stated_mib:.0f})"
            cells.append(f"{_cell(milliseconds, '.1f')} · {memory}")
        lines.append(f"| {row['kind']} | " + " | ".join(cells) + " |")
    lines += ["", "growth with length (exponents), and where a kind overtakes dense attention", ""]
    names = ("operations", "temporaries", "time", "fewer_operations_from", "faster_than_dense_from")
    lines += ["| kind | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * 6 + "|"]
    for row in rows:
        cells = [_cell(row[name], ".2f" if isinstance(row[name], float) else ",") for name in names]
        lines.append(f"| {row['kind']} | " + " | ".join(cells) + " |")
    if shares:
        lines += ["", "share of attention in a block's time", ""]
        counted = sorted({length for by_length in shares.values() for length in by_length})
        lines += ["| kind | " + " | ".join(f"{length:,}" for length in counted) + " |"]
        lines += ["|---" * (len(counted) + 1) + "|"]
        for name, by_length in shares.items():
            cells = [_cell(by_length.get(length), ".0%") for length in counted]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(number: float | None, pattern: str) -> str:
    return "–" if number is None else format(number, pattern)


def plot(results: list[Measurement], path: str) -> None:
    """Seconds and temporaries against length, both axes logarithmic (extra `notebooks`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.5))
    for axis, field, label in zip(axes, ("seconds", "temporary_mib"), ("seconds", "temporaries (MiB)")):
        for number, name in enumerate(dict.fromkeys(result.kind for result in results)):
            known = [r for r in results if r.kind == name and getattr(r, field)]
            axis.loglog(
                [r.length for r in known],
                [getattr(r, field) for r in known],
                marker="o",
                markersize=3,
                linestyle=("-", "--", ":")[number // 10],
                label=name,
            )
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(True, which="both", alpha=0.2)
    axes[1].legend(fontsize=7, ncol=2)
    figure.suptitle(f"forward + backward, {HEADS} heads of {HEAD_DIM}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(names: str, lengths: list[int], repetitions: int, output: str | None, picture: str | None) -> None:
    """Measures, prints the tables and writes what is asked for."""
    known = list(settings(64))
    chosen = known if names == "all" else names.split(",")
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise SystemExit(f"--kinds names {unknown}; known are {', '.join(known)}")
    results = measure(chosen, lengths, repetitions)
    rows = summary(results)
    mixed = [name for name in ("dense", "local", "lsh") if name in chosen]
    shares = share_of_block(mixed, [length for length in lengths if length <= 4096], repetitions) if repetitions else {}
    print(f"\nB=1, {HEADS} heads of {HEAD_DIM}, float32, on {jax.devices()[0].device_kind}\n")
    print(table(results, rows, shares))
    if output:
        content = {"results": [asdict(result) for result in results], "summary": rows, "shares": shares}
        Path(output).write_text(json.dumps(content, indent=1) + "\n")
    if picture:
        plot(results, picture)
