"""Memory of deep models on long rows: the gradient of one row's loss, compiled, never run.

Reformer at 65,536 tokens by depth, and the Sparse Transformer of 128 layers at 16,384 tokens with recomputation beside
dense stacks of its shape (blockwise attention). XLA's temporary memory; parameters and gradients come on top.

    python benchmarks/long_models.py
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.models import Transformer, gpt, reformer, sparse_transformer
from jaxformer.training.objectives import language_model_objective

MIB = 2**20
REFORMER_LENGTH, REFORMER_LAYERS = 65_536, (4, 12, 24)
SPARSE_LENGTH, SPARSE_LAYERS = 16_384, 128


def long_reformer(num_layers: int) -> Transformer:
    """512 wide, 8 heads, LSH and local attention in turn."""
    return reformer(
        num_layers=num_layers,
        embed_dim=512,
        num_heads=8,
        vocab_size=259,
        max_length=REFORMER_LENGTH,
        mlp_chunk_size=1024,
        attention=("local", "lsh"),
        attention_args={
            "local": {"window": 127},
            "lsh": {"num_hashes": 2, "num_buckets": (16, 32), "chunk_size": 64},
        },
    )


def deep(make: Callable[..., Transformer], **fields: Any) -> Transformer:
    """Child et al. 2019's 128 layers, 256 wide, 2 heads, on rows of 16,384 bytes."""
    shape = {"num_layers": SPARSE_LAYERS, "embed_dim": 256, "num_heads": 2, "mlp_dim": 512, "vocab_size": 256}
    return make(**shape, max_length=SPARSE_LENGTH, **fields)


def report(name: str, model: Transformer, length: int) -> None:
    """Compile the gradient of one row and print its memory."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), tokens))
    params = variables.pop("params")

    def loss(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        batch = {"tokens": tokens, "targets": tokens}
        return language_model_objective(model, params, state, batch, rng=jax.random.key(0), chunk_size=1024).loss_sum

    begun = time.perf_counter()
    compiled = jax.jit(jax.grad(loss)).lower(params, variables, tokens).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes / MIB
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / MIB
    seconds = time.perf_counter() - begun
    print(f"{name:<44} {size:>8.1f} MiB {temporaries:>10.1f} MiB {seconds:>8.1f} s", flush=True)


def main() -> None:
    """Compile all and print a table."""
    print(f"jax {jax.__version__}, {jax.default_backend()}\n")
    print(f"{'model':<44} {'parameters':>12} {'temporaries':>14} {'compile':>10}")
    for depth in REFORMER_LAYERS:
        report(f"reformer, {depth} layers, {REFORMER_LENGTH:,} tokens", long_reformer(depth), REFORMER_LENGTH)
    fixed = {"pattern": "strided", "stride": 128}
    for remat in ("full", "sqrt"):
        model = deep(sparse_transformer, **fixed, remat=remat)
        report(f"sparse, {SPARSE_LAYERS} layers, remat {remat}", model, SPARSE_LENGTH)
    for remat in ("none", "full"):
        report(f"dense, {SPARSE_LAYERS} layers, remat {remat}", deep(gpt, remat=remat), SPARSE_LENGTH)


if __name__ == "__main__":
    main()
