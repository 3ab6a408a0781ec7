"""The GPT train step side by side with the same network in PyTorch, eager and compiled, in one interleaved run.

Same sizes, same data, AdamW with clipping at 1.0, no dropout, float32 (``--dtype bfloat16``: computation in bfloat16
on both sides, parameters in float32). All candidates step in turns, so that they meet the same load of the machine;
compare ratios, not milliseconds. The first call (tracing and compiling) is timed apart. With ``--profile DIR`` a trace
of our step is written for TensorBoard or Perfetto. With ``--peak_tflops``, model FLOP utilisation is printed.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --size medium --batch_size 16 --length 1024 --dtype bfloat16 --peak_tflops 989
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.models import GPT_SIZES, gpt
from jaxformer.training.objectives import language_model_objective
from jaxformer.training.optimizers import make_optimizer
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import init_state
from jaxformer.training.step import jit_train_step, make_train_step

# The default network: small enough for a CPU, with the proportions of GPT-2.
DEFAULT = {"num_layers": 6, "embed_dim": 384, "num_heads": 6, "max_length": 256, "vocab_size": 65}
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass
class Candidate:
    """One implementation: its step, its first call and its losses."""

    name: str
    step: Callable[[], float]
    first_call_s: float = 0.0
    temporary_mib: float | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass
class Result:
    """A row of the table; the ratio is of tokens per second to the faster of PyTorch's two, by medians."""

    name: str
    tokens_per_second: float
    median_ms: float
    min_ms: float
    first_call_s: float
    temporary_mib: float | None
    times_torch: float | None
    flop_utilisation: float | None
    last_loss: float


def make_batch(fields: dict[str, int], batch_size: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, fields["vocab_size"], (batch_size, length + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def jax_candidate(name: str, fields: dict, batch: dict[str, np.ndarray], dtype: str, **options) -> Candidate:
    """Our train step, compiled and run once."""
    model = gpt(**fields, dtype=dtype, **options)
    schedule = make_schedule("constant", learning_rate=LEARNING_RATE, warmup_steps=0)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.asarray(batch["tokens"])))["params"]
    optimizer, _ = make_optimizer(
        "adamw",
        learning_rate=schedule,
        params=params,
        b1=BETAS[0],
        b2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP,
    )
    state = init_state(model, optimizer, 0, batch)
    step = jit_train_step(make_train_step(model, language_model_objective, optimizer, schedule))
    placed = jax.device_put(batch)
    start = time.perf_counter()
    compiled = step.lower(state, placed).compile()

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, placed)
        return float(metrics["loss"])

    candidate = Candidate(name, run, temporary_mib=compiled.memory_analysis().temp_size_in_bytes / 2**20)
    candidate.losses.append(run())
    candidate.first_call_s = time.perf_counter() - start
    return candidate


def torch_candidates(fields: dict, batch: dict[str, np.ndarray], dtype: str) -> list[Candidate]:
    """The same network in PyTorch: eager and, where a compiler is installed, ``torch.compile``."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    tokens, targets = (torch.tensor(batch[name], dtype=torch.long, device=device) for name in ("tokens", "targets"))
    candidates = []
    for name, wrap in (("torch eager", lambda module: module), ("torch.compile", torch.compile)):
        torch.manual_seed(0)
        module = torch_gpt(fields).to(device)
        parameters = list(module.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
        call = wrap(module)

        def run(call=call, optimizer=optimizer, parameters=parameters) -> float:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = call(tokens)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            return loss.item()

        candidate = Candidate(name, run)
        start = time.perf_counter()
        candidate.losses.append(run())
        candidate.first_call_s = time.perf_counter() - start
        candidates.append(candidate)
    return candidates


def torch_gpt(fields: dict):
    """GPT-2 in PyTorch's own modules: fused query-key-value projection, fused attention, tied head."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = fields["embed_dim"], fields["num_heads"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.fused, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            split = self.fused(self.attention_norm(x)).split(width, -1)
            query, key, value = (part.view(batch, length, heads, -1).transpose(1, 2) for part in split)
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = (
                nn.Embedding(fields["vocab_size"], width),
                nn.Embedding(fields["max_length"], width),
            )
            self.blocks = nn.ModuleList(Block() for _ in range(fields["num_layers"]))
            self.final_norm = nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)
                else:
                    with torch.no_grad():
                        parameter.mul_(0.0 if parameter.sum() != parameter.numel() else 1.0)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.final_norm(x) @ self.tokens.weight.T

    return GPT()


def flops_per_step(fields: dict, batch_size: int, length: int) -> float:
    """Floating-point operations of a step: 6 a parameter and token in products, 6 L D a layer in causal attention.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", arXiv:2001.08361, section 2.1; position embeddings
    and norms are left out, the tied head counts once.
    """
    width, depth = fields["embed_dim"], fields["num_layers"]
    matrices = 12 * depth * width**2 + fields["vocab_size"] * width
    return batch_size * length * (6.0 * matrices + 6.0 * depth * length * width)


def measure(candidates: list[Candidate], repetitions: int) -> None:
    for repetition in range(repetitions + 1):
        for candidate in candidates:
            start = time.perf_counter()
            candidate.losses.append(candidate.step())
            if repetition:  # The first round warms up.
                candidate.seconds.append(time.perf_counter() - start)


def summarise(candidates: list[Candidate], tokens: int, flops: float, peak: float | None) -> list[Result]:
    medians = {candidate.name: float(np.median(candidate.seconds)) for candidate in candidates}
    torch_best = min((median for name, median in medians.items() if name.startswith("torch")), default=None)
    return [
        Result(
            name=candidate.name,
            tokens_per_second=tokens / medians[candidate.name],
            median_ms=1e3 * medians[candidate.name],
            min_ms=1e3 * min(candidate.seconds),
            first_call_s=candidate.first_call_s,
            temporary_mib=candidate.temporary_mib,
            times_torch=torch_best / medians[candidate.name] if torch_best else None,
            flop_utilisation=flops / medians[candidate.name] / (peak * 1e12) if peak else None,
            last_loss=candidate.losses[-1],
        )
        for candidate in candidates
    ]


def table(results: list[Result]) -> str:
    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    lines = [
        "| implementation | tokens/s | median ms | min ms | first call s | temp MiB | speed / torch | MFU | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: r.median_ms):
        lines.append(
            f"| {r.name} | {r.tokens_per_second:.0f} | {r.median_ms:.0f} | {r.min_ms:.0f} | {r.first_call_s:.1f} "
            f"| {cell(r.temporary_mib, '{:.0f}')} | {cell(r.times_torch, '{:.2f}x')} "
            f"| {cell(r.flop_utilisation, '{:.1%}')} | {r.last_loss:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(GPT_SIZES), help="a published size in place of 6 layers of 384")
    parser.add_argument("--batch_size", type=int, default=8, help="rows")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the computation")
    parser.add_argument("--remat", default="none", help="recomputation policy of our step")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--peak_tflops", type=float, help="of the device in this dtype, for FLOP utilisation")
    parser.add_argument("--profile", help="folder for a trace of three of our steps")
    parser.add_argument("--output", help="path of a JSON file for the results")
    arguments = parser.parse_args()
    fields = {**(GPT_SIZES[arguments.size] if arguments.size else DEFAULT)}
    fields["max_length"] = max(fields["max_length"], arguments.length)
    batch = make_batch(fields, arguments.batch_size, arguments.length)
    options = {"remat": arguments.remat}
    candidates = [
        jax_candidate("jaxformer scanned", fields, batch, arguments.dtype, **options),
        jax_candidate("jaxformer unrolled", fields, batch, arguments.dtype, scan_layers=False, **options),
        *torch_candidates(fields, batch, arguments.dtype),
    ]
    measure(candidates, arguments.repetitions)
    if arguments.profile:
        with jax.profiler.trace(arguments.profile):
            for _ in range(3):
                candidates[0].step()
    flops = flops_per_step(fields, arguments.batch_size, arguments.length)
    results = summarise(candidates, arguments.batch_size * arguments.length, flops, arguments.peak_tflops)
    device = jax.devices()[0].device_kind
    print(f"{fields}, batch {arguments.batch_size} x {arguments.length}, {arguments.dtype}, {device}\n")
    print(table(results))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
