"""What the cost model tells as a whole: estimates beside the compiler's figures, growth, refusals."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import attention_cost, compiled_cost, growth_exponent, overtaking_length
from jaxformer.attention import ATTENTION

# One example in one block, as XLA counts the body of a loop once.
# Kind, whether causal, arguments of the cost (of which the function takes what it knows), and shapes of learned arrays
# and of drawn ones, which have no gradient.
COMPILED = {
    "dense": ("dense", False, {"implementation": "xla"}, {}, {}),
    "shared_query_key": ("shared_query_key", False, {}, {}, {}),
    "bilinear": ("bilinear", True, {}, {"kernel": (64, 64)}, {}),
    "linformer": ("linformer", False, {"rank": 32}, {"key_projection": (32, 120), "value_projection": (32, 120)}, {}),
    "compressed": ("compressed", True, {"stride": 4}, {}, {}),
    "linear": ("linear", True, {"form": "quadratic"}, {}, {}),
    "linear_both_ways": ("linear", False, {}, {}, {}),
    "performer": ("performer", True, {"form": "quadratic", "num_features": 32}, {}, {"projection": (4, 32, 64)}),
}


def known_arguments(function, arguments):
    """Those of the arguments that the function takes."""
    taken = inspect.signature(function).parameters
    return {name: argument for name, argument in arguments.items() if name in taken}


def as_arrays(shapes):
    return {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name, sizes in shapes.items()}


@pytest.mark.parametrize("name", COMPILED)
def test_estimates_are_near_the_compilers_figures(name):
    kind, causal, arguments, learned, drawn = COMPILED[name]
    record = ATTENTION[kind]
    static = known_arguments(record.function, arguments)
    tensors = (jax.ShapeDtypeStruct((1, 120, 4, 64), jnp.float32),) * (2 if record.shared_query_key else 3)

    def loss(tensors, learned, drawn):
        return record.function(*tensors, causal=causal, **static, **learned, **drawn).sum()

    compiled = compiled_cost(jax.value_and_grad(loss, (0, 1)), tensors, as_arrays(learned), as_arrays(drawn))
    work = attention_cost(kind, 1, 120, 4, 64, causal=causal, **arguments).training
    assert 0.75 < work.total / compiled.operations < 1.25
    assert work.matmul < work.total
    # Bytes are an account of what must be moved and kept; the compiler's copies come on top.
    assert 0.25 < work.moved_bytes / compiled.moved_bytes < 1.25
    assert 0.25 < work.temporary_bytes / compiled.temporary_bytes < 4


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("dense", {}), ("local", {"window": 63}), ("compressed", {"stride": 4}), ("linear", {})],
    ids=["dense", "local", "compressed", "linear"],
)
def test_the_estimate_of_a_decoded_token_is_near_the_compilers_figure(kind, arguments):
    record = ATTENTION[kind]
    cache = jax.eval_shape(lambda: record.init_cache(2, 120, 4, 64, **known_arguments(record.init_cache, arguments)))
    token = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.float32)
    step = functools.partial(record.step, **known_arguments(record.step, arguments))
    work = attention_cost(kind, 2, 120, 4, 64, causal=True, **arguments).decode
    assert 0.75 < work.total / compiled_cost(step, cache, token, token, token).operations < 1.25


@pytest.mark.parametrize("kind", ["dense", "local", "linear"])
def test_decoding_is_limited_by_the_bytes_of_the_cache(kind):
    """One query a head on K = N key heads in 16 bits: about one operation a byte, and no more in a longer cache."""
    arguments = {"window": 255} if kind == "local" else {}
    cost = attention_cost(kind, 1, 4096, 16, 64, causal=True, dtype=jnp.bfloat16, **arguments)
    assert cost.decode.intensity < 1.5 < 10 < cost.prefill.intensity
    assert 0.8 < cost.decode.moved_bytes / cost.cache_bytes < 2.5


def test_the_docstrings_example():
    dense = attention_cost("dense", 1, 4096, 16, 64, causal=True, dtype="bfloat16")
    near = attention_cost(ATTENTION["local"], 1, 4096, 16, 64, causal=True, dtype="bfloat16", window=255)
    assert dense.cache_bytes / near.cache_bytes == pytest.approx(16, rel=0.01)
    assert dense.decode.moved_bytes / near.decode.moved_bytes == pytest.approx(16, rel=0.05)
    assert dense.training.matmul == dense.forward.matmul + dense.backward.matmul


@pytest.mark.parametrize(
    ("kind", "arguments", "exponent"),
    [
        ("dense", lambda length: {}, 2),
        ("local", lambda length: {"window": 63}, 1),
        ("linear", lambda length: {}, 1),
        ("strided", lambda length: {"stride": math.isqrt(length)}, 1.5),
        ("routing", lambda length: {"num_clusters": math.isqrt(length), "window": math.isqrt(length)}, 1.5),
    ],
    ids=["dense", "local", "linear", "strided", "routing"],
)
def test_operations_grow_as_the_papers_say(kind, arguments, exponent):
    lengths = (1024, 4096, 16384)
    values = [
        attention_cost(kind, 1, length, 4, 64, causal=True, **arguments(length)).forward.matmul for length in lengths
    ]
    assert growth_exponent(lengths, values) == pytest.approx(exponent, abs=0.1)


def test_growth_exponent_of_powers():
    lengths = np.array([3.0, 7.0, 20.0])
    assert growth_exponent(lengths, 5 * lengths**1.5) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="positive"):
        growth_exponent([1, 2], [0.0, 1.0])
    with pytest.raises(ValueError, match="two lengths differ"):
        growth_exponent([2, 2], [1.0, 1.0])
    with pytest.raises(ValueError, match="equal length"):
        growth_exponent([1, 2], [1.0])


def test_ten_million_tokens_are_counted_without_a_table_of_their_blocks():
    # Every query sees all keys up to its own: (length² + length) / 2 pairs, to which blocks add less than a hundredth.
    length = 10**7
    counted = attention_cost("dense", 1, length, 1, 64, causal=True, implementation="blockwise").forward.matmul
    assert 1 <= counted / (4 * 64 * length * (length + 1) // 2) < 1.01


def test_overtaking_length_is_where_operations_cross():
    length = overtaking_length("local", 4, 64, window=31)
    own, dense = (
        [attention_cost(kind, 1, tokens, 4, 64, **given).forward.total for tokens in (length - 1, length, 4 * length)]
        for kind, given in (("local", {"window": 31}), ("dense", {}))
    )
    assert own[0] >= dense[0]
    assert own[1] < dense[1]
    assert own[2] < dense[2]
    assert overtaking_length("additive", 4, 64, longest=256) is None


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("dense", {"windows": 3}, "windows is given; the cost of attention 'dense' depends on implementation"),
        ("shared_query_key", {"rank": 3}, "depends on sizes only"),
        ("local", {}, "window is missing"),
        ("strided", {"stride": 4, "pattern": 1}, "pattern is given"),
        ("strided", {}, "stride is missing"),
        ("denser", {}, "kind is 'denser'; it must be one of"),
        ("linformer", {"causal": True}, "can't be causal"),
        ("local", {"window": 3, "key_length": 99}, "its keys are the 13 queries' tokens"),
        ("lsh", {"num_kv_heads": 2}, "as many key heads"),
        ("dense", {"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads, 4"),
        ("dense", {"causal": True, "key_length": 5}, "13 are more than 5"),
        ("dense", {"value_dim": 0}, "value_dim is 0"),
        ("dense", {"key_length": 2**31}, "key_length is 2147483648; it must be at most 2147483647"),
        ("dense", {"dtype": "nope"}, "dtype is 'nope'; it must be a floating dtype"),
        ("dense", {"param_dtype": "int32"}, "param_dtype is int32; it must be floating"),
        ("linformer", {"rank": -1}, "rank is -1; it must be an integer of at least 1"),
        ("routing", {"num_clusters": 0, "window": 4}, "num_clusters is 0"),
        ("routing", {"window": 0}, "window is 0"),
        ("lsh", {"num_hashes": 0}, "num_hashes is 0"),
        ("sinkhorn", {"block_size": 0}, "block_size is 0"),
        ("strided", {"stride": 4, "num_added": -5}, "num_added is -5; it must be an integer of at least 0"),
    ],
)
def test_unfit_requests_are_refused_by_name(kind, given, message):
    with pytest.raises(ValueError, match=message):
        attention_cost(kind, 1, 13, 4, 8, **given)
