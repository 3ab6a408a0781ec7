"""Mixtures of experts: tokens that find no place, what a token uses of the whole, and the two dispatches' times.

    python benchmarks/experts.py
    python benchmarks/experts.py --quick

The first table gives the share of choices that are dropped by capacity factor. The even router's choices are drawn
evenly; the skewed router's logits have a constant part of standard deviation 1 for each expert, beside the noise. The
second compares a mixture with the plain layer that costs a token the same. The third runs dispatches in turns, so that
they meet the same load of the machine: compare ratios.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.analysis import feed_forward_cost
from jaxformer.functional import balance_loss, expert_capacities, route_tokens
from jaxformer.layers import FeedForward, MixtureOfExperts
from jaxformer.models import TransformerConfig

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def overflow_table(rows, length, num_experts):
    print(f"Dropped share of choices; {rows} rows of {length} tokens, {num_experts} experts (balance = loss / alpha)")
    print("router  choices  balance " + "".join(f"{factor:>8}" for factor in FACTORS))
    noise_key, skew_key = jax.random.split(jax.random.key(0))
    noise = jax.random.normal(noise_key, (rows, length, num_experts))
    skew = jax.random.normal(skew_key, (num_experts,))
    for name, logits in (("even", noise), ("skewed", noise + skew)):
        for choices in (1, 2):
            routes = route_tokens(logits, experts_per_token=choices)
            counts = (np.asarray(routes.experts)[..., None] == np.arange(num_experts)).sum((1, 2))
            shares = []
            for factor in FACTORS:
                places = expert_capacities(length, num_experts, choices, factor)[length]
                shares.append(np.maximum(counts - places, 0).sum() / counts.sum())
            print(
                f"{name:<8}{choices:>7}{float(balance_loss(routes)):>9.3f} "
                + "".join(f"{share:>8.1%}" for share in shares)
            )


def cost_table():
    shape = {"vocab_size": 50257, "num_layers": 12, "embed_dim": 768, "num_heads": 12, "max_length": 1024}
    layers = {
        "plain": {},
        "8 experts, 1 a token": {"num_experts": 8},
        "64 experts, 1 a token": {"num_experts": 64},
        "  capacity 1.25, sort": {"num_experts": 64, "expert_capacity_factor": 1.25},
        "  capacity 1.25, einsum": {"num_experts": 64, "expert_capacity_factor": 1.25, "expert_dispatch": "einsum"},
        "plain, twice as wide": {"mlp_dim": 2 * 4 * 768},
        "8 experts, 2 a token": {"num_experts": 8, "experts_per_token": 2},
        "8 experts, 1 + shared": {"num_experts": 8, "shared_expert": True},
    }
    print("\nOne feed-forward layer, 768 wide, 3072 hidden, rows of 1,024 tokens (millions)")
    print(f"{'layer':<24}{'parameters':>12}{'active':>9}{'operations/token':>18}{'computed':>10}")
    for name, fields in layers.items():
        cost = feed_forward_cost(TransformerConfig(**shape, **fields))
        figures = (cost.total_parameters, cost.active_parameters, cost.operations, cost.computed_operations)
        total, active, used, computed = (figure / 1e6 for figure in figures)
        print(f"{name:<24}{total:>12.2f}{active:>9.2f}{used:>18.2f}{computed:>10.2f}")


def time_table(rows, length, num_experts, repeats):
    width, hidden = 256, 1024
    x = jax.random.normal(jax.random.key(1), (rows, length, width))
    layers = {"plain": FeedForward(mlp_dim=hidden)}
    for factor in (1.25, None):
        for dispatch in ("sort", "einsum"):
            layers[f"{dispatch}, {'no capacity' if factor is None else f'capacity {factor}'}"] = MixtureOfExperts(
                num_experts=num_experts, mlp_dim=hidden, dispatch=dispatch, capacity_factor=factor
            )
    runs = {}
    for name, layer in layers.items():
        variables = layer.init(jax.random.key(0), x)

        def output(variables, x, layer=layer):
            out = layer.apply(variables, x, deterministic=False)
            return out if isinstance(layer, FeedForward) else out.output

        forward = jax.jit(output)
        backward = jax.jit(jax.grad(lambda *given, output=output: (output(*given) ** 2).sum(), (0, 1)))
        runs[name] = [functools.partial(function, variables, x) for function in (forward, backward)]
    seconds = {name: ([], []) for name in runs}
    for repeat in range(repeats + 1):
        for name, functions in runs.items():
            for function, taken in zip(functions, seconds[name]):
                start = time.perf_counter()
                jax.block_until_ready(function())
                if repeat:
                    taken.append(time.perf_counter() - start)
    print(
        f"\n{rows} rows of {length} tokens, {width} wide, {hidden} hidden, {num_experts} experts, 1 a token; median ms"
    )
    print(f"{'layer':<24}{'forward':>9}{'+ gradient':>12}{'ratio to plain':>20}")
    plain = [np.median(taken) for taken in seconds["plain"]]
    for name, (forward, backward) in seconds.items():
        ahead, back = np.median(forward), np.median(backward)
        print(f"{name:<24}{1e3 * ahead:>9.1f}{1e3 * back:>12.1f}{ahead / plain[0]:>12.2f}{back / plain[1]:>8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    quick = parser.parse_args().quick
    overflow_table(8 if quick else 64, 1024, 8)
    cost_table()
    time_table(2 if quick else 8, 512, 8, 3 if quick else 15)
    print(f"\n{jax.default_backend()}, jax {jax.__version__}, {jnp.dtype(jnp.float32).name}")


if __name__ == "__main__":
    main()
