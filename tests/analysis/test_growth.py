"""How operations and memory grow from 8,192 to 65,536 tokens, by the cost model: the exponents that papers promise."""

import math

import pytest

from jaxformer.analysis import attention_cost, growth_exponent

LENGTHS = (8192, 16384, 32768, 65536)
# Arguments by length, and the most that the exponent of operations may be: 1 for what is linear, 1.5 for strides of
# the square root, a little more for the logarithm of LSH's factorised hashes.
KINDS = {
    "local": (lambda length: {"window": 256}, 1.05),
    "linear": (lambda length: {}, 1.05),
    "performer": (lambda length: {"num_features": 128}, 1.05),
    "linformer": (lambda length: {"rank": 256}, 1.05),
    "lsh": (lambda length: {"num_hashes": 2, "num_buckets": (16, length // 512), "chunk_size": 64}, 1.15),
    "strided": (lambda length: {"stride": math.isqrt(length)}, 1.55),
    "fixed": (lambda length: {"stride": math.isqrt(length), "num_summary": 8}, 1.55),
}


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_grow_as_their_papers_say(kind):
    arguments, most = KINDS[kind]
    causal = kind != "linformer"
    costs = [attention_cost(kind, 1, length, 8, 64, causal=causal, **arguments(length)) for length in LENGTHS]
    assert 0.95 < growth_exponent(LENGTHS, [cost.training.total for cost in costs]) <= most
    temporaries = [cost.backward.temporary_bytes for cost in costs]
    assert growth_exponent(LENGTHS, temporaries) <= 1.05
    dense = [attention_cost("dense", 1, length, 8, 64, causal=causal) for length in LENGTHS]
    assert growth_exponent(LENGTHS, [cost.training.total for cost in dense]) == pytest.approx(2, abs=0.02)
    assert all(own.training.total < other.training.total for own, other in zip(costs, dense))
