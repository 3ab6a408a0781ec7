"""Beam search beside Hugging Face's: one encoder-decoder with the same random weights, float32, in one process.

The model is the post-norm Transformer of 2017 (theirs: Marian). Nothing ends a continuation, so that both write every
token asked for. The two run in turns, so that both meet the same load of the machine. Needs the extra ``parity``.

    python benchmarks/beam.py --output=beam.json
    python benchmarks/beam.py --quick
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
import numpy as np

from jaxformer.inference import beam_search
from jaxformer.models import Transformer, encoder_decoder, stack_layers

PAD_ID, START_ID, FIRST_ID = 0, 1, 2
GAIN = 2.0
QUICK = {
    "batch_sizes": [2],
    "num_layers": 2,
    "embed_dim": 64,
    "vocab_size": 500,
    "source_length": 9,
    "max_new_tokens": 12,
    "repeats": 1,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8], help="sources translated together")
    parser.add_argument("--num_beams", type=int, default=5)
    parser.add_argument("--num_layers", type=int, default=6, help="of each side")
    parser.add_argument("--embed_dim", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=37_000)
    parser.add_argument("--source_length", type=int, default=32, help="tokens of each source")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens of each translation")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of PyTorch")
    parser.add_argument("--quick", action="store_true", help="small sizes in place of the others, to see that it runs")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    return args


def main() -> None:
    args = parse_args()
    reference = make_reference(args)
    model = encoder_decoder(
        vocab_size=args.vocab_size,
        num_layers=args.num_layers,
        embed_dim=args.embed_dim,
        num_heads=args.embed_dim // 64,
        norm_epsilon=1e-5,
    )
    params = jax.device_put(params_of(reference))
    results = [compare(args, model, params, reference, batch_size) for batch_size in args.batch_sizes]
    machine = {"cpus": len(os.sched_getaffinity(0)), "platform": platform.platform(), "jax": jax.__version__}
    report = {"arguments": vars(args), "machine": machine, "results": results}
    print_table(report)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(report, file, indent=2)


def make_reference(args: argparse.Namespace) -> Any:
    """A Marian model of Hugging Face's with random weights, large enough that its choices vary."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "layers": args.num_layers,
            "attention_heads": args.embed_dim // 64,
            "ffn_dim": 4 * args.embed_dim,
        }.items()
    }
    config = transformers.MarianConfig(
        vocab_size=args.vocab_size,
        d_model=args.embed_dim,
        max_position_embeddings=max(args.source_length, args.max_new_tokens + 1),
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=START_ID,
        **sides,
    )
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Smaller ones leave every token as the one before it, or all alike.
            if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight", "shared.weight")):
                weight.normal_(std=GAIN * weight.shape[1] ** -0.5)
    return model


def params_of(reference: Any) -> dict[str, Any]:
    """The weights of a Marian model as parameters of ours.

    Its positions have all sines before all cosines, ours each sine beside its cosine: features change places.
    """
    weights = {name.removeprefix("model."): w.numpy() for name, w in reference.state_dict().items()}
    width = reference.config.d_model
    order = np.arange(width).reshape(2, width // 2).T.reshape(-1)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": weights[f"{name}.weight"][order], "bias": weights[f"{name}.bias"][order]}

    def inwards(name: str) -> dict[str, np.ndarray]:
        return {"kernel": weights[f"{name}.weight"].T[order], "bias": weights[f"{name}.bias"]}

    def outwards(name: str) -> dict[str, np.ndarray]:
        return {"kernel": weights[f"{name}.weight"].T[:, order], "bias": weights[f"{name}.bias"][order]}

    def attention(name: str) -> dict[str, Any]:
        read = {own: inwards(f"{name}.{own[0]}_proj") for own in ("query", "key", "value")}
        return {**read, "out": outwards(f"{name}.out_proj")}

    def layer(name: str, attentions: dict[str, str]) -> dict[str, Any]:
        return {
            **{own: attention(f"{name}.{their}") for own, their in attentions.items()},
            **{f"{own}_norm": norm(f"{name}.{their}_layer_norm") for own, their in attentions.items()},
            "mlp": {"up": inwards(f"{name}.fc1"), "down": outwards(f"{name}.fc2")},
            "mlp_norm": norm(f"{name}.final_layer_norm"),
        }

    def side(name: str, attentions: dict[str, str]) -> dict[str, Any]:
        count = reference.config.encoder_layers
        return {f"layers_{i}": layer(f"{name}.layers.{i}", attentions) for i in range(count)}

    both = {
        "encoder": side("encoder", {"attention": "self_attn"}),
        "decoder": side("decoder", {"attention": "self_attn", "cross_attention": "encoder_attn"}),
    }
    return {"token_embedding": {"embedding": weights["shared.weight"][:, order]}, **stack_layers(both)}


def compare(
    args: argparse.Namespace, model: Transformer, params: Any, reference: Any, batch_size: int
) -> dict[str, Any]:
    """Both translate the same batch in turns; the figures of one batch size."""
    import torch

    draw = np.random.default_rng(0)
    sources = draw.integers(FIRST_ID, args.vocab_size, size=(batch_size, args.source_length))
    torch_sources = torch.tensor(sources)
    starts = np.full((batch_size, 1), START_ID)

    def ours() -> np.ndarray:
        found = beam_search(
            model,
            params,
            starts,
            sources=sources,
            max_new_tokens=args.max_new_tokens,
            eos_id=None,
            num_beams=args.num_beams,
        )
        return found.tokens[:, 0]

    def theirs() -> np.ndarray:
        with torch.inference_mode():
            out = reference.generate(
                torch_sources,
                attention_mask=torch.ones_like(torch_sources),
                max_new_tokens=args.max_new_tokens,
                num_beams=args.num_beams,
                do_sample=False,
            )
        return out[:, 1:].numpy()

    first, our_tokens = seconds(ours)
    _, their_tokens = seconds(theirs)
    assert our_tokens.shape == their_tokens.shape == (batch_size, args.max_new_tokens)
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
        "share_of_equal_tokens": float((our_tokens == their_tokens).mean()),
        "different_tokens": len(np.unique(our_tokens)),
    }


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def print_table(report: dict[str, Any]) -> None:
    print(f"tokens/s of the best of {report['arguments']['num_beams']} beams: least time of all runs (median)")
    print(f"{'batch':>5} {'jaxformer':>16} {'transformers':>16} {'ratio':>13} {'first call':>11} {'equal':>6}")
    for row in report["results"]:
        speeds = [
            f"{row['tokens_per_second'][name]['best']:.0f} ({row['tokens_per_second'][name]['median']:.0f})"
            for name in ("jaxformer", "transformers")
        ]
        ratio = f"{row['ratio']['best']:.2f} ({row['ratio']['median']:.2f})"
        print(
            f"{row['batch_size']:>5} {speeds[0]:>16} {speeds[1]:>16} {ratio:>13} "
            f"{row['first_call_seconds']:>9.1f} s {row['share_of_equal_tokens']:>6.1%}"
        )


if __name__ == "__main__":
    main()
