"""Every kind of attention and every pattern: the gradient is that of the function, by differences in float64.

The hard choices of a kind (buckets, clusters, top k) stay as they are within a step of 1e-5.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from contract import draw_key_mask, rows

from jaxformer.analysis import check_gradients
from jaxformer.attention import ATTENTION, PATTERNS, sparse_attention

ROWS = rows()
# A backward rule written by hand; the others are checked in the slow run.
USUAL = ("dense", "blocks_of_4", True)
CASES = [
    (name, variant, causal)
    for name, row in ROWS.items()
    for variant in row.variants
    for causal in (False, True)
    if (row.kind.causal if causal else row.kind.bidirectional)
]


def usual_or_slow(case, usual):
    return pytest.param(*case, marks=() if usual else pytest.mark.slow, id="-".join(map(str, case)))


PATTERN_ARGUMENTS = {
    "dilated": {"window": 2, "dilation": 2},
    "strided": {"stride": 3},
    "fixed": {"stride": 4, "num_summary": 1},
    "bigbird": {"block_size": 2, "num_random": 1, "seed": 5},
    "random_blocks": {"block_size": 2, "num": 1, "seed": 5},
    "global_tokens": {"indices": (0, 3)},
}


def report_of(apply, inputs, sizes):
    """The report for a sum of outputs with random weights."""
    weights = np.random.default_rng(3).standard_normal((sizes.batch, sizes.queries, sizes.heads, sizes.value_dim))
    return check_gradients(
        lambda params: (apply(params) * jnp.asarray(weights)).sum(), inputs, num_directions=2, num_coordinates=3
    )


@pytest.mark.parametrize(("name", "variant", "causal"), [usual_or_slow(case, case == USUAL) for case in CASES])
def test_gradients_of_every_kind_are_those_of_the_function(name, variant, causal):
    row = ROWS[name]
    sizes = row.size()
    key_mask = draw_key_mask(np.random.default_rng(1), sizes)
    options = {**row.variants[variant], "key_mask": key_mask, "causal": causal}
    report = report_of(lambda inputs: row.apply(inputs, options), row.draw(sizes), sizes)
    assert report.ok(), report.summary()


@pytest.mark.parametrize("name", [usual_or_slow((name,), usual=False) for name in PATTERNS])
def test_gradients_of_every_pattern_are_those_of_the_function(name):
    row = ROWS["sparse"]
    sizes = row.size()
    options = {"pattern": PATTERNS[name].constructor(**PATTERN_ARGUMENTS[name])}
    report = report_of(lambda inputs: row.apply(inputs, options, sparse_attention), row.draw(sizes), sizes)
    assert report.ok(), report.summary()


def test_every_kind_and_pattern_is_checked():
    assert {row.kind.name for row in ROWS.values()} == set(ATTENTION)
    assert set(PATTERN_ARGUMENTS) == set(PATTERNS)
