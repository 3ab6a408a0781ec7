"""Arguments of the wrong kind are refused by name, whatever takes them: without tracing or compiling anything.

The type checker that runs with the tests would refuse them first, so that the cases run in a process without it.
"""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer.attention as attention
from jaxformer.analysis.cost import attention_cost, overtaking_length
from jaxformer.attention.inputs import check_count, check_dropout, check_flag, check_indices, check_number, check_scale
from jaxformer.attention.patterns import global_tokens, local

X = np.ones((1, 4, 2, 4), np.float32)
KEY = jax.random.key(0)
ROTATIONS = np.ones((1, 2, 4, 2), np.float32)
# The arguments that each kind needs, beside which one at a time is wrong.
NEEDED = {
    "additive": {"query_kernel": np.ones((4, 3), np.float32), "key_kernel": np.ones((4, 3), np.float32)}
    | {"score_vector": np.ones(3, np.float32)},
    "bilinear": {"kernel": np.ones((4, 4), np.float32)},
    "clustered": {"hash_planes": np.ones((4, 3), np.float32), "num_clusters": 2},
    "compressed": {"stride": 2},
    "concat": {"kernel": np.ones((8, 3), np.float32), "score_vector": np.ones(3, np.float32)},
    "dense": {},
    "kernel": {},
    "linear": {},
    "linformer": {"key_projection": np.ones((3, 4), np.float32)},
    "local": {"window": 1},
    "longformer": {"window": 1, "global_query": X, "global_key": X, "global_value": X},
    "lsh": {"rotations": ROTATIONS},
    "performer": {"projection": np.ones((3, 4), np.float32)},
    "routing": {"centroids": np.ones((2, 3, 4), np.float32), "window": 2},
    "shared_query_key": {},
    "sinkhorn": {"block_scores": np.ones((1, 2, 2, 2), np.float32), "block_size": 2},
    "sparse": {"pattern": local(1)},
}
NO_COUNTS = (0, 1.5, True, "2", np.float32(1))
# Of each kind: arguments with values that don't do. None stands for what may not be missing.
WRONG = {
    "additive": {"query_kernel": (None,), "score_vector": (None,), "block_size": (None, *NO_COUNTS)},
    "bilinear": {"kernel": (None, "x")},
    "clustered": {"hash_planes": (None,), "num_clusters": (None, *NO_COUNTS), "num_iterations": (None, *NO_COUNTS)}
    | {"top_k": NO_COUNTS, "scale": (True, "x", float("nan"))},
    "compressed": {"stride": (None, *NO_COUNTS), "window_size": NO_COUNTS, "recent": ("x",)},
    "concat": {"kernel": (None,)},
    "dense": {"block_size": NO_COUNTS, "scale": (True, "x", float("inf"), np.bool_(True))}
    | {"dropout_rate": (None, "x", True, 1.0, float("nan"))},
    "kernel": {"block_size": (None, *NO_COUNTS), "width": (None, "x", True), "leave_one_out": (2,)},
    "linear": {"chunk_size": (None, *NO_COUNTS)},
    "linformer": {"key_projection": (None, np.ones((0, 4), np.float32))},
    "local": {"dropout_rate": (None,), "window": ("x", 1.5)},
    "longformer": {"global_indices": (5, "12", (1.5,), (1, 1), (-1,), None)}
    | {name: (None, X.astype(np.float16)) for name in ("global_query", "global_key", "global_value")},
    "lsh": {"rotations": (None,), "num_buckets": (*NO_COUNTS, (2, 2.0), 3), "num_hashes": NO_COUNTS}
    | {"chunk_size": (None, *NO_COUNTS), "num_chunks_before": (None, -1, 1.5, True), "num_chunks_after": (-1, 1.5)}
    | {"within_bucket": ("x",), "deduplicate": ("x",)},
    "performer": {"projection": (None,), "chunk_size": NO_COUNTS},
    "routing": {"centroids": (None,), "window": (None, *NO_COUNTS)},
    "sinkhorn": {"block_scores": (None, np.ones((1, 2, 2, 3), np.float32)), "block_size": (None, *NO_COUNTS)}
    | {"num_iterations": (None, *NO_COUNTS), "sort_cut": NO_COUNTS}
    | {"temperature": (None, True, "x", 0.0, float("nan"))},
}
CACHES = {"": {}, "compressed_": {"stride": 2}, "linear_": {}, "local_": {"window": 1}, "lsh_": {"num_hashes": 1}}
CACHES |= {"performer_": {}, "routing_": {}, "sparse_": {"pattern": local(1)}}


def refused(name: str, call) -> list[str]:
    """Nothing, or what went wrong."""
    try:
        call()
    except ValueError as error:
        return [] if name in str(error) else [f"{name} is not in: {error}"]
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    return [f"{name} was accepted"]


def kind_cases():
    """What is called, which name the error must have, and the call."""
    for kind, needed in NEEDED.items():
        arrays = (X, X) if kind in ("lsh", "shared_query_key") else (X, X, X)
        call = partial(getattr(attention, f"{kind}_attention"), *arrays)
        for name, values in {**WRONG.get(kind, {}), "causal": ("x", 2, None)}.items():
            for value in values:
                yield f"{kind} {value!r}", name, partial(call, **{**needed, name: value})
        traced = jax.make_jaxpr(partial(lambda call, needed, causal: call(**needed, causal=causal), call, needed))
        yield f"{kind} traced", "causal is traced", partial(traced, True)


def cache_cases():
    sizes = {"batch_size": 1, "max_length": 8, "num_kv_heads": 2, "head_dim": 4}
    for kind, needed in CACHES.items():
        own = [name for name in ("stride", "num_hashes") if name in needed]
        own += ["num_features"] if kind == "performer_" else []
        for name in (*sizes, *own):
            for value in (None, *NO_COUNTS):
                call = getattr(attention, f"init_{kind}cache")
                yield f"init_{kind}cache {value!r}", name, partial(call, **{**sizes, **needed, name: value})
        for value in (None, "x", 3, np.int32):
            yield f"init_{kind}cache {value!r}", "dtype", partial(call, **sizes, **needed, dtype=value)


def other_cases():
    draws = {
        attention.draw_hash_planes: {"head_dim": 4, "num_bits": 3},
        attention.draw_rotations: {"num_hashes": 2, "num_buckets": 2, "head_dim": 4},
        attention.draw_features: {"num_features": 2, "head_dim": 4},
        attention.logit_statistics: {"head_dim": 4},
    }
    for call, sizes in draws.items():
        for rng in (jax.random.PRNGKey(0), None, 0):
            yield f"{call.__name__} {rng}", "rng", partial(call, rng, **sizes)
        for name in sizes:
            for value in (None, *NO_COUNTS):
                yield f"{call.__name__} {value!r}", name, partial(call, KEY, **{**sizes, name: value})
    for value in (None, "x", True, 1.5, float("nan")):
        call = partial(attention.routing_update, np.ones((2, 3, 4), np.float32), X, X, decay=value)
        yield f"routing_update {value!r}", "decay", call
    call = partial(attention.longformer_attention, X, X, X, **NEEDED["longformer"], global_mask=np.ones((1, 4), bool))
    for value in NO_COUNTS:
        yield f"longformer {value!r}", "num_global", partial(call, num_global=value)
    yield "global_tokens", "indices", partial(global_tokens, 5)
    for value in (-1, 3.0, "3", None):
        for count in (local(1).components, local(1).num_pairs, local(1).executed_pairs):
            yield f"{count.__name__} {value!r}", "length", partial(count, value)
        yield f"mask {value!r}", "num_keys", partial(local(1).mask, value)
    for value in ("x", {}, np.array([object()])):
        yield f"dense {value!r}", "query", partial(attention.dense_attention, value, X, X)
        for name in ("key_mask", "query_segments"):
            yield f"dense {value!r}", name, partial(attention.dense_attention, X, X, X, **{name: value})


def cost_cases():
    sizes = {"kind": "dense", "batch_size": 1, "length": 8, "num_heads": 2, "head_dim": 4}
    for name in ("batch_size", "length", "num_heads", "head_dim"):
        for value in (None, *NO_COUNTS):
            yield f"attention_cost {value!r}", name, partial(attention_cost, **{**sizes, name: value})
    for value in (None, 3, "denser"):
        yield f"attention_cost {value!r}", "kind", partial(attention_cost, **{**sizes, "kind": value})
    for name in ("dtype", "param_dtype"):
        for value in (None, "x", 3, "int8"):
            yield f"attention_cost {value!r}", name, partial(attention_cost, **sizes, **{name: value})
    yield "attention_cost", "causal", partial(attention_cost, **sizes, causal="x")
    for value in (None, *NO_COUNTS):
        call = partial(overtaking_length, "local", 2, 4, window=3, longest=value)
        yield f"overtaking_length {value!r}", "longest", call


def test_wrong_arguments_are_refused_by_name():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_right_arguments_of_numpy_and_jax_pass():
    assert type(check_count(np.int64(3), "n")) is int
    assert check_flag(np.bool_(True), "causal") is True
    assert check_indices(np.array([2, 0]), "indices") == (2, 0)
    assert check_number(jnp.float32(0.5), "decay") == check_number(np.float16(0.5), "decay") == 0.5
    assert check_dropout(0, KEY) == 0.0
    assert check_scale(2, 4) == check_scale(np.int32(2), 4) == check_scale(jnp.float32(2), 4) == 2.0


if __name__ == "__main__":
    cases = (*kind_cases(), *cache_cases(), *other_cases(), *cost_cases())
    faults = [f"{where}: {fault}" for where, name, call in cases for fault in refused(name, call)]
    print("\n".join(faults))
    sys.exit(bool(faults))
