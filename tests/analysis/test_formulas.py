"""Every formula against the programs of its kind: products, caches and parameters, exactly."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxformer.analysis import attention_cost, count_matmul_operations
from jaxformer.analysis.cost import COSTS
from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.attention.patterns import dilated, global_tokens, local
from jaxformer.layers import ATTENTION_ARGUMENTS, argument_defaults

BATCH, HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 5, 7


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind with arguments.

    Attributes:
      kind: name of the kind or pattern.
      cost: arguments of the formula; what the function and init_cache know of them is theirs too.
      arrays: shapes of the arrays that the function needs, from (queries, keys, kv_heads).
      drawn: those of them that have no gradient in training.
    """

    kind: str
    cost: dict = dataclasses.field(default_factory=dict)
    arrays: dict = dataclasses.field(default_factory=dict)
    drawn: tuple = ()


def shape(*sizes):
    return lambda queries, keys, kv_heads: sizes


def of_tokens(heads, width):
    return lambda queries, keys, kv_heads: (BATCH, queries, heads or kv_heads, width)


KERNELS = {"query_kernel": shape(HEAD_DIM, 11), "key_kernel": shape(HEAD_DIM, 11), "score_vector": shape(11)}
ROWS = {
    "global_query": of_tokens(HEADS, HEAD_DIM),
    "global_key": of_tokens(None, HEAD_DIM),
    "global_value": of_tokens(None, VALUE_DIM),
}
ADDED = {
    "global_key": lambda queries, keys, kv_heads: (1, 3, kv_heads, HEAD_DIM),
    "global_value": lambda queries, keys, kv_heads: (1, 3, kv_heads, VALUE_DIM),
}
SLOTS = {name: lambda queries, keys, kv_heads: (9, keys) for name in ("key_projection", "value_projection")}
CONVOLUTION = {"key_kernel": shape(6, HEAD_DIM), "value_kernel": shape(6, VALUE_DIM)}
DIRECTIONS = {"projection": lambda queries, keys, kv_heads: (kv_heads, 11, HEAD_DIM)}
MASKS = ("global_mask",)
PLANES = {"hash_planes": shape(HEAD_DIM, 13)}


def scores(heads):
    return {"block_scores": lambda queries, keys, kv_heads: (BATCH, heads or kv_heads, -(-keys // 8), -(-keys // 8))}


CASES = {
    "dense": Case("dense"),
    "dense-xla": Case("dense", {"implementation": "xla"}),
    "dense-blocks": Case("dense", {"block_size": 24}),
    "shared_query_key": Case("shared_query_key"),
    "bilinear": Case("bilinear", arrays={"kernel": shape(HEAD_DIM, HEAD_DIM)}),
    "additive": Case("additive", {"hidden_dim": 11}, KERNELS),
    "concat": Case("concat", {"hidden_dim": 11}, {"kernel": shape(2 * HEAD_DIM, 11), "score_vector": shape(11)}),
    "kernel": Case("kernel", {"block_size": 24}, {"width": shape(HEADS)}),
    "kernel-fixed": Case("kernel", {"width": 2.0}),
    "linformer": Case("linformer", {"rank": 9}, SLOTS),
    "compressed": Case("compressed", {"stride": 4}),
    "compressed-kernels": Case("compressed", {"stride": 4, "window_size": 6, "convolution": True}, CONVOLUTION),
    "compressed-far": Case("compressed", {"stride": 3, "recent": False}),
    "linear": Case("linear"),
    "linear-quadratic": Case("linear", {"form": "quadratic", "feature_map": "relu"}),
    "linear-chunks": Case("linear", {"chunk_size": 8}),
    "linear-recurrent": Case("linear", {"form": "recurrent"}),
    "performer": Case("performer", {"num_features": 11, "chunk_size": 8}, DIRECTIONS, ("projection",)),
    "performer-waves": Case(
        "performer", {"num_features": 11, "features": "trigonometric"}, DIRECTIONS, ("projection",)
    ),
    "sparse": Case("sparse", {"pattern": local(9) | global_tokens((0, 3))}),
    "sparse-heads": Case("sparse", {"pattern": (local(4), dilated(2, 3), global_tokens((0, 5)))}),
    "sparse-added": Case("sparse", {"pattern": local(5), "num_added": 3}, ADDED),
    "sparse-global": Case(
        "sparse", {"pattern": local(5), "num_global": 2}, {"global_mask": lambda queries, *_: (BATCH, queries)}, MASKS
    ),
    "local": Case("local", {"window": (17, 2)}),
    "longformer": Case("longformer", {"window": 4, "dilation": 2, "global_indices": (0, 2, 7)}, ROWS),
    "lsh": Case(
        "lsh",
        {"num_hashes": 3, "num_buckets": (4, 6), "chunk_size": 16},
        {"rotations": shape(3, HEADS, HEAD_DIM, 5)},
        ("rotations",),
    ),
    "routing": Case(
        "routing", {"num_clusters": 4, "window": 16}, {"centroids": shape(HEADS, 4, HEAD_DIM)}, ("centroids",)
    ),
    "clustered": Case("clustered", {"num_clusters": 4, "num_bits": 13}, PLANES, ("hash_planes",)),
    "clustered-improved": Case(
        "clustered", {"num_clusters": 4, "num_bits": 13, "top_k": 8, "num_iterations": 3}, PLANES, ("hash_planes",)
    ),
    "sinkhorn": Case("sinkhorn", {"block_size": 8}, scores(None)),
    "sinkhorn-cut": Case("sinkhorn", {"block_size": 8, "sort_cut": 2}, scores(1)),
    "dilated": Case("dilated", {"window": 3, "dilation": 4}),
    "strided": Case("strided", {"stride": 12}),
    "fixed": Case("fixed", {"stride": 12, "num_summary": 2}),
    "bigbird": Case("bigbird", {"block_size": 16, "num_random": 2, "seed": 1}),
    "random_blocks": Case("random_blocks", {"num": 2, "seed": 1, "block_size": 8}),
    "global_tokens": Case("global_tokens", {"indices": (0, 20)}),
}


def record(name):
    kind = CASES[name].kind
    return PATTERNS[kind] if kind in PATTERNS else ATTENTION[kind]


def directions(name):
    """Both ways if the kind honours both; of further cases of a kind one, causal if it can be."""
    causal = record(name).causal and "sort_cut" not in CASES[name].cost
    honoured = [False] * record(name).bidirectional + [True] * causal
    return [(name, way) for way in (honoured[-1:] if "-" in name else honoured)]


DIRECTED = [direction for name in CASES for direction in directions(name)]


def repeats(name, causal):
    """Whether only the slow tests count this: every run counts causal programs, and those that can't be causal.

    Of patterns, whose programs are those of sparse attention, every run counts two.
    """
    own = CASES[name].kind in ATTENTION or name in ("strided", "bigbird")
    return not own or (not causal and (name, True) in DIRECTED)


each_direction = pytest.mark.parametrize(
    ("name", "causal"),
    [pytest.param(name, causal, marks=pytest.mark.slow if repeats(name, causal) else ()) for name, causal in DIRECTED],
    ids=[f"{name}-{'causal' if causal else 'both_ways'}" for name, causal in DIRECTED],
)


class Traced:
    """A case's function, step and inputs as shapes, and its cost by formula."""

    def __init__(self, name, causal, length, keys=None, dtype=jnp.float32):
        self.case, self.causal, self.length, self.keys = CASES[name], causal, length, keys or length
        self.kind = ATTENTION["sparse" if self.case.kind in PATTERNS else self.case.kind]
        self.kv_heads = 3 if self.kind.grouped_heads else HEADS
        self.dtype = dtype
        self.cost = attention_cost(
            self.case.kind,
            BATCH,
            length,
            HEADS,
            HEAD_DIM,
            num_kv_heads=self.kv_heads,
            value_dim=VALUE_DIM,
            key_length=keys,
            causal=causal,
            dtype=dtype,
            **self.case.cost,
        )

    def options(self, function):
        static = self.case.cost
        if self.case.kind in PATTERNS:
            static = {"pattern": PATTERNS[self.case.kind].constructor(**static)}
        known = inspect.signature(function).parameters
        return {name: value for name, value in static.items() if name in known}

    def array(self, *sizes):
        return jax.ShapeDtypeStruct(sizes, self.dtype)

    def tensors(self, queries, keys):
        query, key, value = (
            self.array(BATCH, tokens, heads, width)
            for tokens, heads, width in (
                (queries, HEADS, HEAD_DIM),
                (keys, self.kv_heads, HEAD_DIM),
                (keys, self.kv_heads, VALUE_DIM),
            )
        )
        return (query, value) if self.kind.shared_query_key else (query, key, value)

    def arrays(self, queries, keys):
        """(learned, drawn) arrays of the kind."""
        made = {
            name: jax.ShapeDtypeStruct(make(queries, keys, self.kv_heads), bool if name in MASKS else self.dtype)
            for name, make in self.case.arrays.items()
        }
        drawn = {name: made.pop(name) for name in self.case.drawn}
        return made, drawn

    def forward(self, tensors, learned, drawn):
        options = self.options(self.kind.function)
        return self.kind.function(*tensors, **learned, **drawn, causal=self.causal, **options)

    def gradients(self, tensors, learned, drawn):
        def loss(tensors, learned):
            return self.forward(tensors, learned, drawn).sum()

        return jax.value_and_grad(loss, (0, 1))(tensors, learned)

    def count(self, function):
        return count_matmul_operations(
            function, self.tensors(self.length, self.keys), *self.arrays(self.length, self.keys)
        )

    def cache(self):
        options = self.options(self.kind.init_cache)
        make = functools.partial(self.kind.init_cache, value_dim=VALUE_DIM, dtype=self.dtype, **options)
        return jax.eval_shape(lambda: make(BATCH, self.keys, self.kv_heads, HEAD_DIM))

    def count_step(self, tokens):
        options = self.options(self.kind.step)

        def step(cache, tensors, learned, drawn):
            return self.kind.step(cache, *tensors, **learned, **drawn, **options)

        return count_matmul_operations(step, self.cache(), self.tensors(tokens, tokens), *self.arrays(tokens, tokens))


def num_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_every_kind_and_pattern_has_a_formula_and_is_tested():
    assert set(COSTS) == set(ATTENTION)
    assert {case.kind for case in CASES.values()} == {*ATTENTION, *PATTERNS}


@each_direction
def test_products_are_those_of_the_program(name, causal):
    traced = Traced(name, causal, 150)
    forward = traced.count(traced.forward)
    assert traced.cost.forward.matmul == forward
    if causal or CASES[name].kind in ATTENTION:  # Patterns differ in pairs, and share what is done with them.
        assert traced.cost.backward.matmul == traced.count(traced.gradients) - forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, causal) for name, causal in DIRECTED if CASES[name].kind in ATTENTION],
)
def test_products_of_a_short_sequence_or_of_few_queries(name, causal):
    traced = Traced(name, causal, 13, 53 if record(name).cross else None)
    forward = traced.count(traced.forward)
    assert traced.cost.forward.matmul == forward
    if "chunks" in name or "window" in CASES[name].cost:
        assert traced.cost.backward.matmul == traced.count(traced.gradients) - forward


STEPPED = [name for name, causal in DIRECTED if causal and Traced(name, True, 1).cost.decode is not None]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if repeats(name, True) else ()) for name in STEPPED]
)
def test_products_of_decoding_are_those_of_the_step(name):
    traced, short = Traced(name, True, 150), Traced(name, True, 13)
    assert traced.cost.prefill.matmul == traced.count_step(150)
    assert traced.cost.decode.matmul == traced.count_step(1)
    assert short.cost.prefill.matmul == short.count_step(13)


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cache_bytes_are_those_of_the_cache(name, dtype):
    traced = Traced(name, True, 29, dtype=dtype)
    assert traced.cost.cache_bytes == num_bytes(traced.cache())


def test_what_decodes_has_the_cost_of_a_step():
    costs = {name: Traced(name, causal, 13).cost for name, causal in DIRECTED}
    for name, cost in costs.items():
        kind = record(name)
        decodes = name in STEPPED
        assert (cost.decode is not None) == (cost.prefill is not None) == (cost.cache_bytes is not None) == decodes
        assert decodes == (getattr(kind, "decodes", True) and name != "sparse-global")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind in ATTENTION_ARGUMENTS])
def test_parameters_and_state_are_those_of_the_module(name):
    case = CASES[name]
    own = argument_defaults(case.kind)
    module = ATTENTION_ARGUMENTS[case.kind](
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        max_length=29,
        param_dtype=jnp.bfloat16,
        **{key: value for key, value in case.cost.items() if key in own},
    )
    x = jax.ShapeDtypeStruct((BATCH, 29, 31), jnp.float32)
    heads = jax.ShapeDtypeStruct((BATCH, 29, HEADS, HEAD_DIM), jnp.float32)
    make = functools.partial(module.init, key_mask=None, causal=False, deterministic=True)
    made = jax.eval_shape(make, jax.random.key(0), x, heads, heads)
    cost = attention_cost(case.kind, BATCH, 29, HEADS, HEAD_DIM, embed_dim=31, param_dtype=jnp.bfloat16, **case.cost)
    learned = jax.tree.leaves(made.get("params", {}))
    assert cost.parameters == sum(leaf.size for leaf in learned)
    assert cost.parameter_bytes == num_bytes(learned)
    assert cost.state_bytes == num_bytes(made.get("state", {}))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind not in ATTENTION_ARGUMENTS])
def test_parameters_are_the_learned_arrays_where_no_module_makes_them(name):
    traced = Traced(name, False, 29)
    learned, drawn = traced.arrays(29, 29)
    assert traced.cost.parameters == sum(array.size for array in learned.values())
    assert traced.cost.state_bytes == num_bytes(drawn)


def test_linformer_products_are_exact_where_queries_go_by_blocks():
    tokens = jax.ShapeDtypeStruct((1, 2100, 2, HEAD_DIM), jnp.float32)
    slots = jax.ShapeDtypeStruct((9, 2100), jnp.float32)

    def attend(query, key, value, first, second):
        function = ATTENTION["linformer"].function
        return function(query, key, value, key_projection=first, value_projection=second).sum()

    def train(*arrays):
        return jax.value_and_grad(attend, (0, 1, 2, 3, 4))(*arrays)

    cost = attention_cost("linformer", 1, 2100, 2, HEAD_DIM, rank=9)
    arrays = (tokens, tokens, tokens, slots, slots)
    assert count_matmul_operations(attend, *arrays) == cost.forward.matmul
    assert count_matmul_operations(train, *arrays) == cost.training.matmul
