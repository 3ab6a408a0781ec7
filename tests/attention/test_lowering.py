"""Every public function lowers for CPUs, GPUs and TPUs, which needs no such device."""

import jax
import jax.numpy as jnp
import pytest
from contract import ROWS, draw

PLATFORMS = ("cpu", "cuda", "tpu")
VARIANTS = [(row, variant) for row in ROWS.values() for variant in row.variants]


@pytest.mark.parametrize(("row", "variant"), VARIANTS, ids=[f"{row.kind.name}-{variant}" for row, variant in VARIANTS])
def test_forward_and_backward_lower_everywhere(row, variant, rng):
    case = draw(causal=row.kind.causal)
    dropout = {"dropout_rate": 0.1, "rng": rng} if row.kind.dropout else {}
    call = row.call(variant, case, **dropout)
    function = jax.jit(jax.value_and_grad(lambda *inputs: call(*inputs).sum(), (0, 1, 2)))
    exported = jax.export.export(function, platforms=PLATFORMS)(*case.inputs)
    assert exported.platforms == PLATFORMS


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_weights_and_steps_lower_everywhere(row):
    case = draw(queries=7, keys=7)
    query, key, value = case.inputs
    functions = []
    if row.kind.weights is not None:
        functions.append((lambda query, key: row.kind.weights(query, key, **row.arguments(case)), (query, key)))
    if row.kind.decodes:
        cache = row.kind.init_cache(2, 9, 3, 5, value_dim=8, dtype=jnp.float32)
        functions.append((lambda *arrays: row.kind.step(*arrays)[0], (cache, query, key, value)))
    for function, arguments in functions:
        leaves, tree = jax.tree.flatten(arguments)

        @jax.jit
        def flat(*leaves, function=function, tree=tree):
            return function(*jax.tree.unflatten(tree, leaves))

        assert jax.export.export(flat, platforms=PLATFORMS)(*leaves).platforms == PLATFORMS
