"""The cost of whole models against their programs, their shapes and the compiler's memory.

    python benchmarks/model_cost.py
    python benchmarks/model_cost.py --quick
    python benchmarks/model_cost.py --models=gpt2_small,t5_base --no_compile

Shapes only: no parameter is drawn and no model run. Ratios of products and parameters are exact, 1.0000 or wrong:
- forward: `forward_products`, by formula, to what the program's trace holds;
- gradient, prefill, decode: products of `model_cost` to `count_matmul_operations` of the same programs: loss and
  gradient, reading a prompt of all tokens, one more token;
- shapes: parameters to those of `jax.eval_shape`; cache: bytes to those of `init_cache`, or of `start` with an encoder;
- activations to XLA's temporaries of loss and gradient: kept arrays alone against those with all workspace, of which
  the compiler shares memory that is no longer needed, and for which it may compute again. An estimate.
"""

import argparse
import time

import jax

from jaxformer.analysis import compiled_cost, count_matmul_operations, forward_products, model_cost
from jaxformer.analysis.model_costs.phases import Inputs, abstract_variables, generation, has_source, training_loss
from jaxformer.models import bert, gpt, reformer, switch, t5

MODELS = {
    "gpt2_small": (gpt, "small", 1, 1024),
    "bert_base": (bert, "base", 2, 512),
    "t5_base": (t5, "base", 1, 512),
    "reformer_base": (reformer, "base", 1, 4096),
    "switch_small_8": (switch, "small_8", 1, 1024),
}
QUICK = {
    "gpt_tiny": (gpt, "tiny", 2, 64),
    "bert_tiny": (bert, "tiny", 2, 64),
    "t5_tiny": (t5, "tiny", 2, 64),
    "reformer_tiny": (reformer, "tiny", 2, 64),
    "switch_tiny": (switch, "tiny", 2, 64),
}
COLUMNS = (
    "parameters",
    "tokens",
    "GFLOP/token",
    "forward",
    "gradient",
    "prefill",
    "decode",
    "shapes",
    "cache",
    "activations",
    "XLA",
    "share",
)


def measure(make, size, batch_size, length, compiles):
    """The cells of a model's line."""
    model = make(size)
    inputs = Inputs(batch_size, length, length if has_source(model) else None)
    cost = model_cost(model, batch_size, length)
    variables = abstract_variables(model, inputs)
    loss, arguments = training_loss(model, variables, inputs, None)
    gradient = jax.value_and_grad(loss)
    whole = count_matmul_operations(gradient, *arguments)
    formula = sum(forward_products(model.config, batch_size, length).values())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    total, kept = sum(cost.parameters.values()), sum(cost.activation_bytes.values())
    cells = [
        f"{total:,}",
        f"{inputs.num_tokens:,}",
        f"{cost.products_per_token('forward') / 1e9:.4f}",
        f"{formula / cost.products('forward'):.4f}",
        f"{(cost.products('forward') + cost.products('backward')) / whole:.4f}",
        *generating(model, variables, inputs, cost),
        f"{total / parameters:.4f}",
        "-" if cost.cache_bytes is None else f"{cost.cache_bytes / cache_bytes(model, variables, inputs):.4f}",
        f"{kept / 1e6:,.0f} MB",
    ]
    if not compiles:
        return [*cells, "-", "-"]
    temporary = compiled_cost(gradient, *arguments).temporary_bytes
    return [*cells, f"{temporary / 1e6:,.0f} MB", f"{kept / temporary:.2f}"]


def generating(model, variables, inputs, cost):
    """Ratios of the products of both phases of generation."""
    if cost.cache_bytes is None:
        return ["-", "-"]
    phases = zip(("prefill", "decode"), generation(model, variables, inputs)[1:])
    return [
        f"{cost.products(name) / count_matmul_operations(phase.function, *phase.arguments):.4f}"
        for name, phase in phases
    ]


def cache_bytes(model, variables, inputs):
    """Of the cache as the model makes it."""

    def leaves(variables, source):
        if source is None:
            return jax.tree.leaves(model.init_cache(inputs.batch_size, inputs.length))
        return jax.tree.leaves(model.apply(variables, source, inputs.length, method="start"))

    shapes = jax.eval_shape(leaves, variables, inputs.arrays().get("source"))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--no_compile", action="store_true", help="leave out XLA's figures")
    options = parser.parse_args()
    models = QUICK if options.quick else MODELS
    names = options.models.split(",") if options.models else list(models)
    widths = [14, *[max(len(name), 11) for name in COLUMNS]]
    print(f"jax {jax.__version__} {jax.default_backend()}")
    print("  ".join(name.rjust(width) for name, width in zip(("model", *COLUMNS), widths)))
    for name in names:
        began = time.perf_counter()
        cells = measure(*models[name], not options.no_compile)
        line = "  ".join(cell.rjust(width) for cell, width in zip((name, *cells), widths))
        print(f"{line}  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
