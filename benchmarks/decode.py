"""Cached generation beside Hugging Face's: one GPT-2 with the same random weights, greedy, float32, in one process.

The two run in turns, so that both meet the same load of the machine. Beside them stands the floor set by memory: every
token needs all weights once, so none can come faster than those bytes are read. Needs the extra ``parity``.

    python benchmarks/decode.py --output=decode.json
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.inference import generate
from jaxformer.models import Transformer, gpt, stack_layers


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8], help="rows generated together")
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--embed_dim", type=int, default=384)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--prompt_length", type=int, default=16, help="tokens")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of PyTorch")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    reference = make_reference(args)
    model = gpt(
        vocab_size=args.vocab_size,
        num_layers=args.num_layers,
        embed_dim=args.embed_dim,
        num_heads=args.embed_dim // 64,
        max_length=args.prompt_length + args.max_new_tokens,
    )
    params = jax.device_put(params_of(reference))
    floor = weight_reading_seconds(params)
    results = [compare(args, model, params, reference, batch_size, floor) for batch_size in args.batch_sizes]
    machine = {"cpus": len(os.sched_getaffinity(0)), "platform": platform.platform(), "jax": jax.__version__}
    report = {"arguments": vars(args), "machine": machine, "results": results}
    print_table(report)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=2)


def make_reference(args: argparse.Namespace) -> Any:
    """A GPT-2 of Hugging Face's with random weights."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.prompt_length + args.max_new_tokens,
        n_embd=args.embed_dim,
        n_layer=args.num_layers,
        n_head=args.embed_dim // 64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def params_of(reference: Any) -> dict[str, Any]:
    """The weights of a Hugging Face GPT-2 as parameters of ours (their kernels are [in, out], too)."""
    weights = {name.removeprefix("transformer."): w.numpy() for name, w in reference.state_dict().items()}

    def layer(i: int) -> dict[str, Any]:
        def kernel_and_bias(name: str) -> dict[str, np.ndarray]:
            return {"kernel": weights[f"h.{i}.{name}.weight"], "bias": weights[f"h.{i}.{name}.bias"]}

        def norm(name: str) -> dict[str, np.ndarray]:
            return {"scale": weights[f"h.{i}.{name}.weight"], "bias": weights[f"h.{i}.{name}.bias"]}

        joint = kernel_and_bias("attn.c_attn")
        split = {name: np.split(array, 3, axis=-1) for name, array in joint.items()}
        projections = {
            name: {part: arrays[j] for part, arrays in split.items()}
            for j, name in enumerate(("query", "key", "value"))
        }
        return {
            "attention_norm": norm("ln_1"),
            "attention": {**projections, "out": kernel_and_bias("attn.c_proj")},
            "mlp_norm": norm("ln_2"),
            "mlp": {"up": kernel_and_bias("mlp.c_fc"), "down": kernel_and_bias("mlp.c_proj")},
        }

    decoder = {
        **{f"layers_{i}": layer(i) for i in range(reference.config.n_layer)},
        "position_embedding": {"embedding": weights["wpe.weight"]},
        "final_norm": {"scale": weights["ln_f.weight"], "bias": weights["ln_f.bias"]},
    }
    return stack_layers({"token_embedding": {"embedding": weights["wte.weight"]}, "decoder": decoder})


def weight_reading_seconds(params: Any, repeats: int = 20) -> float:
    """How long reading as many bytes as the parameters have takes at best: a product of a matrix and a vector."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    columns = 512
    matrix, vector = jnp.ones((columns, num_bytes // 4 // columns)), jnp.ones(columns)
    multiply = jax.jit(lambda vector, matrix: vector @ matrix)
    multiply(vector, matrix).block_until_ready()
    return min(seconds(lambda: multiply(vector, matrix).block_until_ready())[0] for _ in range(repeats))


def compare(
    args: argparse.Namespace, model: Transformer, params: Any, reference: Any, batch_size: int, floor: float
) -> dict[str, Any]:
    """Both generate the same batch in turns; the figures of one batch size."""
    import torch

    shape = (batch_size, args.prompt_length)
    prompts = np.random.default_rng(0).integers(args.vocab_size, size=shape)
    torch_prompts = torch.tensor(prompts)

    def ours() -> np.ndarray:
        return generate(model, params, prompts, max_new_tokens=args.max_new_tokens)

    def theirs() -> np.ndarray:
        with torch.inference_mode():
            out = reference.generate(
                torch_prompts,
                attention_mask=torch.ones_like(torch_prompts),
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, args.prompt_length :].numpy()

    first, our_tokens = seconds(ours)
    _, their_tokens = seconds(theirs)
    times: dict[str, list[float]] = {"jaxformer": [], "transformers": []}
    for _ in range(args.repeats):
        times["jaxformer"].append(seconds(ours)[0])
        times["transformers"].append(seconds(theirs)[0])
    tokens = batch_size * args.max_new_tokens
    speeds = {
        name: {"median": tokens / statistics.median(taken), "best": tokens / min(taken)}
        for name, taken in times.items()
    }
    return {
        "batch_size": batch_size,
        "tokens_per_second": speeds,
        "ratio": {which: speeds["jaxformer"][which] / speeds["transformers"][which] for which in ("median", "best")},
        "first_call_seconds": first,
        "tokens_per_second_at_memory_floor": batch_size / floor,
        "share_of_equal_tokens": float((our_tokens == their_tokens).mean()),
    }


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def print_table(report: dict[str, Any]) -> None:
    print("tokens/s, median (best)")
    print(
        f"{'batch':>5} {'jaxformer':>16} {'transformers':>16} {'ratio':>13} {'floor':>7} {'first call':>11} "
        f"{'equal':>6}"
    )
    for row in report["results"]:
        speeds = [
            f"{row['tokens_per_second'][name]['median']:.0f} ({row['tokens_per_second'][name]['best']:.0f})"
            for name in ("jaxformer", "transformers")
        ]
        ratio = f"{row['ratio']['median']:.2f} ({row['ratio']['best']:.2f})"
        print(
            f"{row['batch_size']:>5} {speeds[0]:>16} {speeds[1]:>16} {ratio:>13} "
            f"{row['tokens_per_second_at_memory_floor']:>7.0f} {row['first_call_seconds']:>9.1f} s "
            f"{row['share_of_equal_tokens']:>6.1%}"
        )


if __name__ == "__main__":
    main()
