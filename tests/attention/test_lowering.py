"""Every public function lowers for CPUs, GPUs and TPUs, which needs no such device."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import call, rows, with_gradients

ROWS = rows()
PLATFORMS = ("cpu", "cuda", "tpu")
VARIANTS = [(name, variant) for name, row in ROWS.items() for variant in row.variants]
each_row = pytest.mark.parametrize("name", list(ROWS))


def lower(function, *arguments):
    """Exports a function of pytrees, given flat."""
    leaves, tree = jax.tree.flatten(arguments)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))
    # On CPUs blockwise forms ask for a layout, in a way that is not promised to be kept in later versions.
    layout = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = jax.export.export(flat, platforms=PLATFORMS, disabled_checks=[layout])(*map(jnp.asarray, leaves))
    assert exported.platforms == PLATFORMS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=["-".join(case) for case in VARIANTS])
def test_forward_and_backward_lower_everywhere(name, variant, rng):
    row = ROWS[name]
    sizes = row.size()
    options = {**row.variants[variant], "causal": row.kind.causal}
    if row.kind.dropout:
        options |= {"dropout_rate": 0.1, "rng": rng}
    d_output = np.ones((sizes.batch, sizes.queries, sizes.heads, sizes.value_dim), np.float32)

    def forward_and_backward(inputs):
        return with_gradients(lambda inputs: row.apply(inputs, options), inputs, jnp.asarray(d_output))

    lower(forward_and_backward, row.draw(sizes))


@pytest.mark.slow
@each_row
def test_weights_and_steps_lower_everywhere(name):
    row = ROWS[name]
    kind, sizes = row.kind, row.size(queries=7, keys=7)
    inputs = row.draw(sizes)
    options = row.variants[next(iter(row.variants))]

    def known(function):
        parameters = inspect.signature(function).parameters
        return {key: value for key, value in options.items() if key in parameters and key != "implementation"}

    if kind.weights is not None:
        names = ("query_key",) if kind.shared_query_key else ("query", "key")
        taken = set(inspect.signature(kind.weights).parameters).difference(names)
        arrays = {key: array for key, array in inputs.items() if key in taken}
        lower(
            lambda tensors, arrays: kind.weights(
                *tensors, **arrays, causal=not kind.bidirectional, **known(kind.weights)
            ),
            [inputs[key] for key in names],
            arrays,
        )
    if kind.decodes:
        cache = kind.init_cache(
            sizes.batch, 9, sizes.kv_heads, sizes.head_dim, value_dim=sizes.value_dim, **known(kind.init_cache)
        )
        lower(lambda cache, inputs: call(kind, kind.step, inputs, cache, **known(kind.step)), cache, inputs)
