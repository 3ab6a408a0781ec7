"""What every kind of attention keeps, for each row and variant of the contract table."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import call, compiled, draw_key_mask, expected, rows, with_gradients

import jaxformer.attention
from jaxformer.attention import ATTENTION

ROWS = rows()
slow = pytest.mark.slow


def usual(name):
    """The variant and direction of a row that every run tests; the rest of the table is marked slow."""
    return next(iter(ROWS[name].variants)), ROWS[name].kind.causal


VARIANTS = [(name, variant) for name, row in ROWS.items() for variant in row.variants]
DIRECTED = [
    (name, variant, causal)
    for name, variant in VARIANTS
    for causal in (False, True)
    if (ROWS[name].kind.causal if causal else ROWS[name].kind.bidirectional)
]
each_row = pytest.mark.parametrize("name", list(ROWS))
each_variant = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=["-".join(case) for case in VARIANTS])
each_direction = pytest.mark.parametrize(
    ("name", "variant", "causal"),
    [pytest.param(*case, marks=() if case[1:] == usual(case[0]) else slow) for case in DIRECTED],
    ids=[f"{name}-{variant}-{'causal' if causal else 'both_ways'}" for name, variant, causal in DIRECTED],
)

# Each row in the steps of the table, and, in the slow run, in others: token by token, and all at once.
SPLITS = [
    (name, lengths)
    for name, row in ROWS.items()
    for lengths in (row.step_lengths, *(((1,) * 7, (3, 1, 1, 1, 1), (7,)) if row.kind.decodes else ()))
]
each_split = pytest.mark.parametrize(
    ("name", "step_lengths"),
    [pytest.param(*case, marks=() if case[1] == ROWS[case[0]].step_lengths else slow) for case in SPLITS],
    ids=[f"{name}-{'+'.join(map(str, lengths))}" for name, lengths in SPLITS],
)


def each_row_slow_but(*fast):
    """Each row; every run tests `fast` ones, which are cheap to compile, and the slow run the others."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in fast else slow) for name in ROWS])


class Setting:
    """One row's case: inputs, a key mask with holes, and a direction for gradients."""

    def __init__(self, name, seed=0, causal=None, **changes):
        self.row = ROWS[name]
        self.causal = not self.row.kind.bidirectional if causal is None else causal
        self.sizes = self.row.size(**changes)
        self.inputs = self.row.draw(self.sizes, seed)
        random = np.random.default_rng(seed + 1)
        shape = (self.sizes.batch, self.sizes.queries, self.sizes.heads, self.sizes.value_dim)
        self.d_output = random.standard_normal(shape).astype(np.float32)
        self.key_mask = draw_key_mask(random, self.sizes)
        self.all_keys = np.ones_like(self.key_mask)

    def with_tokens(self, change):
        """The inputs with `change` applied to query, key and value (or what they share) and to what is like them."""
        alike = {name: name for name in ("query", "key", "query_key", "value")} | self.row.beside
        return {name: change(alike[name], array) if name in alike else array for name, array in self.inputs.items()}

    def rounded(self, dtype):
        """The inputs with all that belongs to tokens in another precision."""
        tokens = ("query", "key", "query_key", "value", *self.row.beside)
        return {name: jnp.asarray(array, dtype) if name in tokens else array for name, array in self.inputs.items()}

    def forward(self, variant, **options):
        return jax.jit(lambda inputs: self.row.apply(inputs, {**self.row.variants[variant], **options}))(self.inputs)


def close(actual, wanted, row, **changes):
    tolerance = {"atol": row.tolerance, "rtol": row.tolerance, **changes}
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, **tolerance)


def on_keys(array, mask):
    """A [B, S] mask over the axes of an array of tokens."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - 2))


def test_every_public_attention_has_a_record_and_a_row():
    public = {name.removesuffix("_attention") for name in jaxformer.attention.__all__ if name.endswith("_attention")}
    assert public == set(ATTENTION) == {row.kind.name for row in ROWS.values()}


@each_row
def test_record_tells_what_the_function_takes(name):
    kind = ROWS[name].kind
    assert ATTENTION[kind.name] is kind
    for function in (kind.function, kind.weights, kind.init_cache, kind.step):
        assert function is None or getattr(jaxformer.attention, function.__name__) is function
    assert kind.function.__name__ == f"{kind.name}_attention"
    assert "O(" in kind.cost
    assert "arXiv" in kind.paper or "doi" in kind.paper
    assert kind.decodes == (kind.init_cache is not None)
    assert kind.causal or kind.bidirectional
    parameters = inspect.signature(kind.function).parameters
    assert list(parameters)[:2] == (["query_key", "value"] if kind.shared_query_key else ["query", "key"])
    assert {"key_mask", "causal"} <= set(parameters)
    assert set(kind.arguments) <= set(parameters)
    assert not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = {"query_positions": kind.positions, "query_segments": kind.segments, "rng": kind.dropout}
    taken |= {"mask": kind.mask, "bias": kind.bias, "scale": kind.scale}
    for argument, honoured in taken.items():
        assert (argument in parameters) == honoured, argument
    assert kind.segments or not kind.packing
    if kind.decodes:
        assert {"positions", "key_mask", "layer"} <= set(inspect.signature(kind.step).parameters)


@each_direction
def test_values_and_gradients_equal_the_oracle(name, variant, causal):
    setting = Setting(name, causal=causal)
    row = setting.row
    got, gradients = compiled(name, variant, causal)(setting.inputs, setting.key_mask, setting.d_output)
    want, wanted_gradients, weights = expected(
        name, variant, setting.inputs, setting.key_mask, causal, setting.d_output
    )
    assert got.dtype == jnp.float32
    assert got.shape == setting.d_output.shape
    close(got, want, row)
    for argument, wanted in wanted_gradients.items():
        close(gradients[argument], wanted, row, err_msg=argument)
    if row.kind.weights is not None:
        options = {**row.variants[variant], "key_mask": setting.key_mask, "causal": causal}
        known = set(inspect.signature(row.kind.weights).parameters)
        options = {option: value for option, value in options.items() if option in known}
        inputs = {key: array for key, array in setting.inputs.items() if key in known}
        actual = jax.jit(lambda inputs: _weights(row, inputs, options))(inputs)
        close(actual, weights, row)
        if row.distribution:
            assert (actual >= 0).all()
            np.testing.assert_allclose(actual.sum(-1), (weights != 0).any(-1), atol=1e-5)


def _weights(row, inputs, options):
    names = ("query_key",) if row.kind.shared_query_key else ("query", "key")
    arrays = {name: array for name, array in inputs.items() if name not in names}
    return row.kind.weights(*(inputs[name] for name in names), **arrays, **options)


@each_direction
def test_a_value_reaches_exactly_the_queries_that_see_it(name, variant, causal):
    """By the Jacobian: not zero where the oracle's weight is not, exactly zero elsewhere."""
    setting = Setting(name, causal=causal)
    row, sizes = setting.row, setting.sizes
    run = compiled(name, variant, causal)
    _, _, weights = expected(name, variant, setting.inputs, setting.key_mask, causal, np.zeros_like(setting.d_output))
    group = sizes.heads // sizes.kv_heads
    seen = (weights.reshape(sizes.batch, sizes.kv_heads, group, sizes.queries, sizes.keys) != 0).any(2)
    for query in range(sizes.queries):
        # The first output feature of this query in every head, by the first feature of each value.
        one = np.zeros_like(setting.d_output)
        one[:, query, :, 0] = 1.0
        _, gradients = run(setting.inputs, setting.key_mask, one)
        values = ["value", *(argument for argument, like in row.beside.items() if like == "value")]
        moved = np.any([np.asarray(gradients[argument])[..., 0].transpose(0, 2, 1) for argument in values], axis=0)
        np.testing.assert_array_equal(moved, seen[:, :, query])


@each_direction
def test_padding_may_hold_anything_and_examples_do_not_meet(name, variant, causal):
    setting = Setting(name, causal=causal)
    run = compiled(name, variant, causal)
    key_mask = setting.key_mask
    before = run(setting.inputs, key_mask, setting.d_output)
    for poison in (np.nan, np.inf):
        # A shared query and key is a query too: there padding stays finite, and its own rows tell nothing.
        poisoned = setting.with_tokens(
            lambda name, array, poison=poison: (
                array if name == "query" else np.where(on_keys(array, key_mask), array, poison)
            )
        )
        if "query_key" in setting.inputs:
            hole = ~key_mask[:, :, None, None]
            poisoned["query_key"] = np.where(hole, np.float32(1e4), setting.inputs["query_key"])
            d_output = np.where(hole, 0.0, setting.d_output).astype(np.float32)
            before = run(setting.inputs, key_mask, d_output)
            after = run(poisoned, key_mask, d_output)
            kept = (slice(None), slice(None), slice(None))
            np.testing.assert_array_equal(np.where(hole, 0, after[0]), np.where(hole, 0, before[0]))
            np.testing.assert_array_equal(after[1]["value"][kept], before[1]["value"][kept])
        else:
            after = run(poisoned, key_mask, setting.d_output)
            jax.tree.map(np.testing.assert_array_equal, after, before)
    # An example of padding alone: zeros, no gradient, and no trace in the other example.
    alone = np.array([[True], [False]]) & key_mask
    output, gradients = run(setting.inputs, alone, setting.d_output)
    assert not output[1].any()
    for token in {"query", "key", "query_key", "value"} & set(setting.inputs):
        assert not gradients[token][1].any(), token
        assert np.isfinite(gradients[token]).all(), token
        np.testing.assert_array_equal(gradients[token][0], run(setting.inputs, key_mask, setting.d_output)[1][token][0])
    np.testing.assert_array_equal(output[0], run(setting.inputs, key_mask, setting.d_output)[0][0])
    assert run._cache_size() == 1, "one trace serves every mask"


@pytest.mark.parametrize(
    ("name", "variant"),
    [pytest.param(*case, marks=() if case[1] == usual(case[0])[0] else slow) for case in VARIANTS],
    ids=["-".join(case) for case in VARIANTS],
)
def test_causal_never_lets_the_future_through_however_large(name, variant):
    setting = Setting(name, causal=True)
    row, sizes = setting.row, setting.sizes
    if not row.kind.causal:
        with pytest.raises(ValueError, match="causal"):
            setting.forward(variant, causal=True)
        return
    run = compiled(name, variant, True)
    offset = sizes.keys - sizes.queries
    cut = sizes.keys - 4

    def far(token, array):
        future = (np.arange(array.shape[1]) >= cut - (offset if token == "query" else 0))[None, :, None, None]
        if token == "value":
            return np.where(future, np.float32(1e30), array)
        # Where the choice of keys leaks, as the kind's docstring says, only contents are causal.
        return array if row.selection_leaks else np.where(future, np.float32(1e15), array)

    d_output = setting.d_output.copy()
    d_output[:, cut - offset :] = 0.0
    before = run(setting.inputs, setting.all_keys, d_output)
    after = run(setting.with_tokens(far), setting.all_keys, d_output)
    np.testing.assert_array_equal(after[0][:, : cut - offset], before[0][:, : cut - offset])
    for token in {"query", "key", "query_key", "value"} & set(setting.inputs):
        assert np.isfinite(after[1][token]).all(), token


@each_row_slow_but("local")
def test_degenerate_arguments_give_softmax_over_all_keys(name):
    row = ROWS[name]
    if row.degenerate is None:
        pytest.skip(f"{name} is never equal to softmax attention")
    for causal in (False, True):
        if not (row.kind.causal if causal else row.kind.bidirectional):
            continue
        setting = Setting(name, causal=causal)
        inputs = row.draw(setting.sizes, 0, row.degenerate_arguments)
        options = {"key_mask": setting.key_mask, "causal": causal}
        run = jax.jit(
            lambda inputs, d_output, options=options: with_gradients(
                lambda inputs: row.apply(inputs, {**row.degenerate, **options}), inputs, d_output
            )
        )
        dense = ATTENTION["shared_query_key" if row.kind.shared_query_key else "dense"]
        tensors = {key: inputs[key] for key in ("query", "key", "query_key", "value") if key in inputs}
        scale = {"scale": row.degenerate["scale"]} if "scale" in row.degenerate else {}
        reference = jax.jit(
            lambda inputs, d_output, options=options, scale=scale, dense=dense: with_gradients(
                lambda inputs: call(dense, dense.function, inputs, **options, **scale), inputs, d_output
            )
        )
        told = True if row.padding_queries else on_keys(setting.d_output, setting.key_mask)
        d_output = np.where(told, setting.d_output, np.float32(0))
        got, gradients = run(inputs, d_output)
        want, wanted = reference(tensors, d_output)
        close(got, np.where(told, want, 0), row)
        for token in tensors:
            close(gradients[token], wanted[token], row, err_msg=token)


@slow
@each_variant
def test_any_length(name, variant):
    row = ROWS[name]
    for length in row.lengths:
        setting = Setting(name, queries=length, keys=length)
        want, _, _ = expected(name, variant, setting.inputs, setting.all_keys, setting.causal, setting.d_output)
        got = setting.forward(variant, causal=setting.causal)
        assert got.shape == want.shape
        close(got, want, row, err_msg=f"length {length}")


@slow
@each_variant
def test_more_padding_changes_nothing(name, variant):
    row = ROWS[name]
    setting = Setting(name, queries=11, keys=11)
    run = jax.jit(
        lambda inputs, **options: row.apply(inputs, {**row.variants[variant], "causal": setting.causal, **options})
    )
    pad = [(0, 0), (0, 6), (0, 0), (0, 0)]
    inputs = setting.with_tokens(lambda name, array: np.pad(array, pad, constant_values=3.0))
    output = run(inputs, key_mask=(np.arange(17) < 11)[None].repeat(2, 0))
    close(output[:, :11], run(setting.inputs), row)


@each_row_slow_but("dense")
def test_grouped_heads_are_repeated_heads(name):
    row = ROWS[name]
    variant = next(iter(row.variants))
    if not row.kind.grouped_heads:
        with pytest.raises(ValueError, match="heads"):
            Setting(name, heads=6, kv_heads=3).forward(variant)
        return
    setting = Setting(name)
    group = setting.sizes.heads // setting.sizes.kv_heads
    repeated = setting.with_tokens(lambda name, array: array if name == "query" else array.repeat(group, 2))
    run = jax.jit(lambda inputs: row.apply(inputs, {**row.variants[variant], "causal": setting.causal}))
    close(run(setting.inputs), run(repeated), row)


@each_row_slow_but("dense")
def test_packed_documents_are_as_alone(name):
    row = ROWS[name]
    if not row.kind.segments:
        assert not row.kind.packing
        return
    variant = next(iter(row.variants))
    causal = row.kind.causal
    setting = Setting(name, queries=9, keys=9, causal=causal)
    options = {**row.variants[variant], "causal": causal}
    segments = np.array([[1] * 5 + [2] * 4] * 2, np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 2, np.int32)
    packed_options = {**options, "query_segments": segments, "key_segments": segments}
    if row.kind.positions:
        packed_options |= {"query_positions": positions, "key_positions": positions}
    packed = jax.jit(
        lambda inputs, d_output: with_gradients(lambda inputs: row.apply(inputs, packed_options), inputs, d_output)
    )
    separate = jax.jit(
        lambda inputs, d_output: with_gradients(lambda inputs: row.apply(inputs, options), inputs, d_output)
    )
    output, gradients = packed(setting.inputs, setting.d_output)
    tokens = {"query", "key", "query_key", "value"} & set(setting.inputs)
    if row.kind.packing:
        for part in (slice(0, 5), slice(5, 9)):
            alone = setting.with_tokens(lambda name, array, part=part: array[:, part])
            want, wanted = separate(alone, setting.d_output[:, part])
            close(output[:, part], want, row)
            for token in tokens:
                close(gradients[token][:, part], wanted[token], row, err_msg=token)
    first = segments[:, :, None, None] == 1
    changed = setting.with_tokens(lambda name, array: np.where(first, array + 1, array))
    np.testing.assert_array_equal(packed(changed, setting.d_output)[0][:, 5:], output[:, 5:])


@slow
@each_variant
def test_vmap_and_checkpoint_and_numpy_change_nothing(name, variant):
    setting = Setting(name)
    row = setting.row
    options = {**row.variants[variant], "causal": setting.causal}
    want, wanted = compiled(name, variant, setting.causal)(setting.inputs, setting.all_keys, setting.d_output)
    attend = jax.checkpoint(lambda inputs: row.apply(inputs, options))
    stacked = jax.tree.map(lambda array: jnp.stack([jnp.asarray(array)] * 2), setting.inputs)
    mapped = jax.jit(jax.vmap(lambda inputs: with_gradients(attend, inputs, jnp.asarray(setting.d_output))))
    output, gradients = mapped(stacked)
    for copy in range(2):
        close(output[copy], want, row)
        for argument in wanted:
            close(gradients[argument][copy], wanted[argument], row, err_msg=argument)
    holes, _ = compiled(name, variant, setting.causal)(setting.inputs, setting.key_mask, setting.d_output)
    with_numbers = {**options, "key_mask": setting.key_mask.astype(np.int32)}
    close(row.apply(setting.inputs, with_numbers), holes, row)


@slow
@each_variant
def test_float64_gradients_equal_differences_to_second_order(name, variant):
    setting = Setting(name)
    row = setting.row
    with jax.enable_x64(True):
        inputs = {
            key: jnp.asarray(array, jnp.float64 if np.asarray(array).dtype == np.float32 else None)
            for key, array in setting.inputs.items()
        }
        moving = {key for key in ("query", "key", "query_key", "value") if key in inputs}
        options = {**row.variants[variant], "causal": setting.causal}
        direction = jnp.asarray(setting.d_output, jnp.float64)

        def loss(moved):
            output = row.apply({**inputs, **moved}, options)
            assert output.dtype == jnp.float64
            return (jnp.sin(output) * direction).sum()

        start = {key: inputs[key] for key in moving}
        random = np.random.default_rng(3)
        way = {key: jnp.asarray(random.standard_normal(array.shape)) for key, array in start.items()}
        slope = jax.jit(jax.value_and_grad(loss))
        _, curvature = jax.jit(lambda start, way: jax.jvp(jax.grad(loss), (start,), (way,)))(start, way)
        step = 1e-5
        ahead, behind = (
            slope({key: array + sign * step * way[key] for key, array in start.items()}) for sign in (1, -1)
        )
        gradient = slope(start)[1]
        directional = sum((gradient[key] * way[key]).sum() for key in moving)
        np.testing.assert_allclose(directional, (ahead[0] - behind[0]) / (2 * step), rtol=1e-6, atol=1e-7)
        for key in moving:
            differences = (ahead[1][key] - behind[1][key]) / (2 * step)
            np.testing.assert_allclose(curvature[key], differences, atol=2e-6, rtol=1e-5)


@slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@each_row
def test_low_precision_is_close(name, dtype):
    setting = Setting(name)
    row = setting.row
    variant = next(iter(row.variants))
    run = jax.jit(
        lambda inputs: with_gradients(
            lambda inputs: row.apply(inputs, {**row.variants[variant], "causal": setting.causal}),
            inputs,
            jnp.asarray(setting.d_output, dtype),
        )
    )
    tokens = ("query", "key", "query_key", "value", *row.beside)
    rounded = setting.rounded(dtype)
    output, gradients = run(rounded)
    exact = {key: array.astype(jnp.float32) if key in tokens else array for key, array in rounded.items()}
    assert output.dtype == dtype
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    want, _ = compiled(name, variant, setting.causal)(exact, setting.all_keys, setting.d_output)
    np.testing.assert_allclose(output.astype(jnp.float32), want, atol=tolerance, rtol=tolerance)
    for key in set(tokens) & set(rounded):
        assert gradients[key].dtype == dtype
        assert np.isfinite(gradients[key].astype(jnp.float32)).all()


@slow
@each_row
def test_padding_and_causal_masks_together_in_float16(name):
    """Keys pad, pad, real: a query of padding sees nothing, and the real one takes the real value whole."""
    row = ROWS[name]
    variant, causal = usual(name)
    setting = Setting(name, queries=3, keys=3, causal=causal)
    options = {**row.variants[variant], "key_mask": np.array([[False, False, True]]), "causal": causal}
    output = jax.jit(lambda inputs: row.apply(inputs, options))(setting.rounded(jnp.float16))
    assert output.dtype == jnp.float16
    assert np.isfinite(output).all()
    if causal:
        assert not output[:, :2].any()
    if row.distribution:
        group = setting.sizes.heads // setting.sizes.kv_heads
        value = setting.inputs["value"][:, 2:].repeat(group, 2)
        np.testing.assert_allclose(output[:, 2:].astype(jnp.float32), value, atol=2e-3, rtol=2e-3)


@slow
@each_row
def test_no_tokens_give_nothing(name):
    setting = Setting(name, queries=0, keys=0)
    variant = next(iter(setting.row.variants))
    assert setting.forward(variant, causal=setting.causal).shape == (2, 0, setting.sizes.heads, 8)
    if setting.row.kind.cross:
        setting = Setting(name, queries=3, keys=0, causal=False)
        assert not setting.forward(variant).any()


@each_split
def test_cached_decoding_equals_the_full_pass(name, step_lengths):
    """A row without padding and one with two tokens of it on the left, in steps of several lengths."""
    row = ROWS[name]
    if not row.kind.decodes:
        assert row.kind.init_cache is None
        return
    kind, variant = row.kind, next(iter(row.variants))
    options = {key: value for key, value in row.variants[variant].items() if key != "implementation"}
    total = sum(step_lengths)
    setting = Setting(name, queries=total, keys=total, causal=True)
    sizes = setting.sizes
    starts = np.array([0, 2])
    positions = np.arange(total, dtype=np.int32)[None] - starts[:, None]
    key_mask = positions >= 0
    known = functools.partial(_known, options)
    cache = kind.init_cache(
        sizes.batch, total + 1, sizes.kv_heads, sizes.head_dim, value_dim=sizes.value_dim, **known(kind.init_cache)
    )

    @jax.jit
    def step(cache, inputs, positions, key_mask):
        return call(kind, kind.step, inputs, cache, positions=positions, key_mask=key_mask, **known(kind.step))

    outputs, first = [], 0
    for length in step_lengths:
        part = slice(first, first + length)
        inputs = setting.with_tokens(lambda name, array, part=part: array[:, part])
        output, cache = step(cache, inputs, np.maximum(positions[:, part], 0), key_mask[:, part])
        outputs.append(output)
        first += length
    assert step._cache_size() == len(set(step_lengths)), "one trace serves all steps of a length"
    decoded = np.concatenate(outputs, axis=1)
    for example, start in enumerate(starts):
        alone = setting.with_tokens(lambda name, array, e=example, s=start: array[e : e + 1, s:])
        alone = {key: array for key, array in alone.items()}
        if row.decode_oracle is None:
            want = jax.jit(lambda inputs: row.apply(inputs, {**row.variants[variant], "causal": True}))(alone)
        else:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                mask = jnp.ones((1, total - start), bool)
                want, _ = row.decode_oracle(alone, key_mask=mask, causal=True, **row.variants[variant])
        close(decoded[example : example + 1, start:], want, row)


def _known(options, function):
    return {key: value for key, value in options.items() if key in inspect.signature(function).parameters}


@each_row
def test_unfit_inputs_are_refused_by_name(name):
    setting = Setting(name)
    row, inputs = setting.row, setting.inputs
    first = "query_key" if row.kind.shared_query_key else "query"
    options = row.variants[next(iter(row.variants))]
    keys = setting.sizes.keys
    refused = [
        (first, {first: inputs[first][0]}, {}),
        (first, {first: inputs[first].astype(np.int32)}, {}),
        ("value", {"value": inputs["value"][:, :4]}, {}),
        (r"key_mask has shape \(2, 3\)", {}, {"key_mask": np.ones((2, 3), bool)}),
        ("key_mask", {}, {"key_mask": np.ones((2, keys), np.float32)}),
    ]
    if not row.kind.shared_query_key:
        refused += [
            ("batch", {"query": inputs["query"][:1]}, {}),
            ("dtype", {"query": inputs["query"].astype(np.float16)}, {}),
        ]
    if not row.kind.cross:
        shorter = {key: inputs[key][:, :4] for key in (first,)}
        refused.append(("tokens|queries|keys|shape|length", shorter, {}))
    for message, changed, given in refused:
        with pytest.raises(ValueError, match=message):
            row.apply({**inputs, **changed}, {**options, "causal": setting.causal, **given})
    for argument in row.kind.arguments:
        wrong = np.zeros((1, 2, 3, 1, 1, 1), np.float32)
        with pytest.raises(ValueError, match=argument):
            row.apply({**inputs, argument: wrong}, {**options, "causal": setting.causal})
    if not row.kind.bidirectional:
        with pytest.raises(ValueError, match="causal"):
            row.apply(inputs, {**options, "causal": False})
    if row.kind.decodes:
        kind, sizes, known = row.kind, row.size(queries=3, keys=3), functools.partial(_known, options)
        cache = kind.init_cache(
            sizes.batch, 4, sizes.kv_heads, sizes.head_dim, value_dim=sizes.value_dim, **known(kind.init_cache)
        )
        with pytest.raises(ValueError, match="layer goes with a stacked cache"):
            call(kind, kind.step, row.draw(sizes), cache, layer=0, **known(kind.step))
