"""Adaptive computation time: how many steps parity takes by its difficulty, and what an early exit saves.

``parity`` is the task of Graves 2016, arXiv:1603.08983, section 3.1, scaled down: the first k of a few numbers are 1 or
-1, the rest 0; is the number of ones odd? A tanh network sees the same numbers at every step and halts by itself
(``jaxformer.functional.adaptive_steps``). Shown for each time penalty and seed: errors, the mean number of steps N of
inputs of each k, and the correlation of N with k. The largest penalty is a control: it must drive N to 1.

``work`` times a Universal Transformer's full pass and a step of cached decoding as a scan of all steps and with an
early exit, where the halting unit is set so that every token halts after n steps. With a cache the steps after the exit
still compute their keys and values.

``trained`` times both on the tests of a run with halting, a few rows together: the loop ends when the last token of all
rows has halted, so what is saved depends on the rows.

    python benchmarks/pondering.py --output=pondering.json
    python benchmarks/pondering.py --parts trained --workdir=runs/parity
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.functional import adaptive_steps, ponder_cost
from jaxformer.models import universal_transformer
from jaxformer.training.assembly import load_data
from jaxformer.training.finished import load_run, read_run
from jaxformer.training.objectives import model_inputs


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["parity", "work"], choices=["parity", "work", "trained"])
    parser.add_argument("--workdir", help="of trained: the run directory")
    parser.add_argument("--length", type=int, default=6, help="numbers of an input; the paper has 64")
    parser.add_argument("--width", type=int, default=64, help="of the network; the paper has 128")
    parser.add_argument("--max_steps", type=int, default=10, help="the paper has 100")
    parser.add_argument("--penalties", type=float, nargs="+", default=[1e-3, 1e-2, 10.0], help="loss per step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10_000, help="at most; ends at 0.2 %% errors")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if "trained" in args.parts and args.workdir is None:
        raise SystemExit("--parts trained needs --workdir")
    machine = {"cpus": len(os.sched_getaffinity(0)), "platform": platform.platform(), "jax": jax.__version__}
    report: dict[str, Any] = {"arguments": vars(args), "machine": machine}
    if "parity" in args.parts:
        print(f"{'penalty':>8} {'seed':>4} {'errors':>7} {'r(N, k)':>7}  mean N of k = 1 … {args.length}")
        report["parity"] = [parity(args, penalty, seed) for penalty in args.penalties for seed in range(args.seeds)]
    if "work" in args.parts:
        print(f"{'what':>6} {'steps':>5} {'of':>3} {'scan ms':>8} {'exit ms':>8} {'ratio':>6}")
        report["work"] = [figures for count in (1, 2, 4, 8) for figures in work(args, count)]
    if "trained" in args.parts:
        print(f"{'rows':>4} {'test':>10} {'steps':>5} {'scan ms':>8} {'exit ms':>8} {'ratio':>6}")
        report["trained"] = trained(args)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=2)


def parity(args: argparse.Namespace, penalty: float, seed: int) -> dict[str, Any]:
    """Train one network and count its steps."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def loss(params: Any, examples: tuple) -> tuple[jax.Array, tuple]:
        numbers, _, odd = examples
        out = run_network(params, numbers, args.max_steps)
        logits = out.output @ params["answer"] + params["answer_bias"]
        cost = ponder_cost(out.halting.num_steps, out.halting.remainder)
        wrong = (logits > 0) != (odd > 0.5)
        return optax.sigmoid_binary_cross_entropy(logits, odd).mean() + penalty * cost, (wrong, out.halting.num_steps)

    @jax.jit
    def train(params: Any, state: Any, keys: jax.Array) -> tuple:
        def update(carry: tuple, key: jax.Array) -> tuple:
            params, state = carry
            gradient, (wrong, _) = jax.grad(loss, has_aux=True)(params, draw_examples(key, 128, args.length))
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), wrong.mean()

        (params, state), wrong = jax.lax.scan(update, (params, state), keys)
        return params, state, wrong.mean()

    params = init_network(jax.random.key(seed), args.length, args.width)
    state = optimizer.init(params)
    for block in range(args.updates // 500):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed + 1000), block), 500)
        params, state, wrong = train(params, state, keys)
        if wrong < 0.002:
            break
    examples = draw_examples(jax.random.key(7), 8192, args.length)
    _, (wrong, steps) = jax.jit(loss)(params, examples)
    by_k = [float(steps[examples[1] == k].mean()) for k in range(1, args.length + 1)]
    spread = float(np.std(steps))
    correlation = float(np.corrcoef(steps, examples[1])[0, 1]) if spread else 0.0
    figures = {"penalty": penalty, "seed": seed, "errors": float(wrong.mean()), "correlation": correlation}
    rounded = " ".join(f"{mean:.2f}" for mean in by_k)
    print(f"{penalty:8g} {seed:4} {figures['errors']:7.4f} {correlation:7.2f}  {rounded}", flush=True)
    return {**figures, "updates": 500 * (block + 1), "steps_by_k": by_k}


def draw_examples(key: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers [count, length], how many of them are not 0, and whether an odd number of them is 1."""
    how_many, signs = jax.random.split(key)
    k = jax.random.randint(how_many, (count,), 1, length + 1)
    numbers = jnp.where(jax.random.bernoulli(signs, 0.5, (count, length)), 1.0, -1.0)
    numbers = numbers * (jnp.arange(length)[None] < k[:, None])
    return numbers, k, ((numbers == 1).sum(1) % 2).astype(jnp.float32)


def init_network(key: jax.Array, length: int, width: int) -> dict[str, jax.Array]:
    """A tanh cell whose input is the numbers and whether this is the first step; an answer and a halting unit."""
    keys = jax.random.split(key, 4)
    return {
        "recurrent": jax.random.orthogonal(keys[0], width),
        "input": jax.random.normal(keys[1], (length + 1, width)) / np.sqrt(length + 1),
        "bias": jnp.zeros(width),
        "halting": 0.1 * jax.random.normal(keys[2], (width,)),
        "halting_bias": jnp.asarray(0.0),
        "answer": jax.random.normal(keys[3], (width,)) / np.sqrt(width),
        "answer_bias": jnp.zeros(()),
    }


def run_network(params: dict[str, jax.Array], numbers: jax.Array, max_steps: int) -> Any:
    """The network's steps on each input until it halts; Graves halts on the state after the step."""

    def step(index: jax.Array, state: jax.Array, carry: None) -> tuple:
        is_first = jnp.full((len(numbers), 1), index == 0, numbers.dtype)
        given = jnp.concatenate([numbers, is_first], 1) @ params["input"]
        state = jnp.tanh(state @ params["recurrent"] + given + params["bias"])
        return jax.nn.sigmoid(state @ params["halting"] + params["halting_bias"]), state, carry, None

    return adaptive_steps(step, jnp.zeros((len(numbers), len(params["bias"]))), max_steps)


def work(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """Times where every token halts after ``count`` of 8 steps."""
    scan = universal_transformer("tiny", num_layers=8, embed_dim=512, halting="act")
    early = scan.clone(config=dataclasses.replace(scan.config, early_exit=True))
    tokens = jnp.zeros((2, 64), jnp.int32)
    params = jax.jit(scan.init)(jax.random.key(0), tokens)["params"]
    probability = 0.995 / count
    unit = params["decoder"]["halting"]
    unit["kernel"] = jnp.zeros_like(unit["kernel"])
    unit["bias"] = jnp.asarray(np.log(probability / (1 - probability)), jnp.float32)
    caches = {model: model.init_cache(16, 16) for model in (scan, early)}
    results = []
    for what, given, options in (
        ("pass", tokens, lambda model: {}),
        ("decode", jnp.zeros((16, 1), jnp.int32), lambda model: {"cache": caches[model]}),
    ):
        runs = [jax.jit(model.apply) for model in (scan, early)]
        calls = [
            lambda run=run, model=model, given=given, options=options: run({"params": params}, given, **options(model))
            for run, model in zip(runs, (scan, early))
        ]
        steps, tokens_seen = calls[0]().aux.metrics["ponder_steps"]
        if float(steps / tokens_seen) != count:
            raise SystemExit(f"tokens made {float(steps / tokens_seen)} steps instead of {count}")
        scan_ms, exit_ms = alternate(calls, args.repeats)
        print(f"{what:>6} {count:5} {8:3} {scan_ms:8.2f} {exit_ms:8.2f} {exit_ms / scan_ms:6.2f}", flush=True)
        results.append({"what": what, "steps": count, "max_steps": 8, "scan_ms": scan_ms, "exit_ms": exit_ms})
    return results


def trained(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times a trained model on 64 rows of each test, 1 and 16 rows at a time."""
    scan, variables, _ = load_run(args.workdir)
    if scan.config.halting == "none":
        raise SystemExit(f"the run in {args.workdir} has no halting")
    models = (scan, scan.clone(config=dataclasses.replace(scan.config, early_exit=True)))
    runs = [jax.jit(lambda inputs, model=model: model.apply(variables, **inputs)) for model in models]
    results = []
    for count in (1, 16):
        for name, rows in load_data(read_run(Path(args.workdir))).buckets.items():
            steps, taken = [], []
            for first in range(0, min(len(rows), 64), count):
                inputs = jax.device_put(model_inputs(rows.batch(np.arange(first, first + count))))
                steps.append(int(runs[0](inputs).aux.maps["ponder_steps"].max()))
                taken.append(alternate([lambda run=run, inputs=inputs: run(inputs).logits for run in runs], 3))
            (scan_ms, exit_ms), mean = np.mean(taken, 0).tolist(), statistics.mean(steps)
            ratio = exit_ms / scan_ms
            print(f"{count:4} {name:>10} {mean:5.2f} {scan_ms:8.2f} {exit_ms:8.2f} {ratio:6.2f}", flush=True)
            results.append({"rows": count, "test": name, "steps": mean, "scan_ms": scan_ms, "exit_ms": exit_ms})
    return results


def alternate(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median milliseconds of each; they run in turns, so that all meet the same load of the machine."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    main()
