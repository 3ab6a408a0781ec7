"""What every kind of attention keeps, for each row and variant of the contract table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import ROWS, Case, draw, see

import jaxformer.attention
from jaxformer.attention import ATTENTION

VARIANTS = [(row, variant) for row in ROWS.values() for variant in row.variants]
each_variant = pytest.mark.parametrize(
    ("row", "variant"), VARIANTS, ids=[f"{row.kind.name}-{variant}" for row, variant in VARIANTS]
)
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))


def random_mask(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.7


def integers(seed, high, *shape):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def hide_row(mask, row):
    """The mask with nothing left to see in one query's row."""
    mask = mask.copy()
    mask[..., row, :] = False
    return mask


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "key_mask": {"key_mask": random_mask(1, 2, 11)},
    "causal_key_mask": {"causal": True, "key_mask": random_mask(2, 2, 11)},
    "positions": {"causal": True, "query_positions": integers(3, 9, 2, 7), "key_positions": integers(4, 9, 2, 11)},
    "segments": {"causal": True, "query_segments": integers(5, 2, 2, 7), "key_segments": integers(6, 2, 2, 11)},
    "mask": {"mask": hide_row(random_mask(7, 2, 6, 7, 11), 3)},
    "mask_of_queries_and_keys": {"mask": random_mask(8, 7, 11).astype(np.int32), "scale": 0.3},
}


def value_and_gradients(call, case):
    def loss(*inputs):
        output = call(*inputs)
        return (output * jnp.asarray(case.d_output, output.dtype)).sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*case.inputs)
    return output, *gradients


def test_every_public_attention_has_a_record_and_a_row():
    public = {name.removesuffix("_attention") for name in jaxformer.attention.__all__ if name.endswith("_attention")}
    assert public == set(ATTENTION) == set(ROWS)


@each_row
def test_record_names_public_functions_of_the_kind(row):
    kind = row.kind
    assert ATTENTION[kind.name] is kind
    for function in (kind.function, kind.weights, kind.init_cache, kind.step):
        assert function is None or getattr(jaxformer.attention, function.__name__) is function
    assert kind.function.__name__ == f"{kind.name}_attention"
    assert "O(" in kind.cost
    assert "arXiv" in kind.paper
    assert kind.decodes == (kind.step is not None)


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@each_variant
def test_values_and_gradients_equal_the_oracle(row, variant, options):
    case = draw(**options)
    expected = row.oracle(case)
    actual = value_and_gradients(row.call(variant, case), case)
    for got, want in zip(actual, (expected.output, expected.d_query, expected.d_key, expected.d_value)):
        assert got.dtype == jnp.float32
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@each_row
def test_weights_equal_the_oracle_and_are_a_distribution(row, options):
    case = draw(**options)
    query, key, _ = case.inputs
    weights = row.kind.weights(query, key, **row.arguments(case), **case.options)
    np.testing.assert_allclose(weights, row.oracle(case).weights, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), see(case).any(-1).astype(np.float32), atol=1e-6)


@pytest.mark.parametrize("queries", [1, 3, 4, 8, 11])
@each_variant
def test_causal_aligns_the_last_query_with_the_last_key(row, variant, queries):
    case = draw(queries=queries, causal=True)
    output = jax.jit(row.call(variant, case))(*case.inputs)
    np.testing.assert_allclose(output, row.oracle(case).output, atol=1e-5)


@each_variant
def test_visibility_by_jacobian_is_exactly_the_mask(row, variant):
    options = {"causal": True, "key_mask": random_mask(2, 2, 11), "mask": random_mask(9, 2, 6, 7, 11)}
    case = draw(**options)
    query, key, value = case.inputs
    call = row.call(variant, case)
    # Each query head's first output feature by the first value feature of the head it reads.
    jacobian = jax.jit(jax.jacrev(lambda first: call(query, key, value.at[..., 0].set(first))[..., 0]))(value[..., 0])
    group = query.shape[2] // key.shape[2]
    moved = np.stack([[jacobian[b, :, n, b, :, n // group] for n in range(6)] for b in range(2)])
    np.testing.assert_array_equal(moved != 0, see(case))
    others = np.stack([[jacobian[b, :, n, 1 - b] for n in range(6)] for b in range(2)])
    assert not others.any()


@each_variant
def test_what_is_hidden_changes_nothing_however_large(row, variant):
    case = draw(causal=True, queries=11)
    query, key, value = case.inputs
    far = np.arange(11)[None, :, None, None] >= 6
    large = Case(case.query, np.where(far, 1e18, key), np.where(far, 1e30, value), case.d_output, case.options)
    call = row.call(variant, case)
    before = jax.jit(lambda *inputs: call(*inputs)[:, :6])(query, key, value)
    after = jax.jit(lambda *inputs: call(*inputs)[:, :6])(*large.inputs)
    np.testing.assert_array_equal(after, before)
    gradients = jax.jit(jax.grad(lambda *inputs: call(*inputs)[:, :6].sum(), (0, 1, 2)))(*large.inputs)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@each_variant
def test_missing_keys_may_hold_anything(row, variant, poison):
    key_mask = random_mask(1, 2, 11)
    case = draw(key_mask=key_mask)
    hole = ~key_mask[:, :, None, None]
    poisoned = Case(case.query, np.where(hole, poison, case.key), np.where(hole, poison, case.value), case.d_output)
    call = row.call(variant, case)
    for got, want in zip(value_and_gradients(call, poisoned), value_and_gradients(call, case)):
        np.testing.assert_array_equal(got, want)
    query, key, _ = poisoned.inputs
    weights = row.kind.weights(query, key, key_mask=key_mask, **row.arguments(case))
    assert np.isfinite(weights).all()


@each_variant
def test_more_padding_changes_nothing(row, variant):
    case = draw(keys=7, causal=True)
    pad = [(0, 0), (0, 6), (0, 0), (0, 0)]
    padded = Case(*(np.pad(a, pad, constant_values=3.0) for a in (case.query, case.key, case.value, case.d_output)))
    call = row.call(variant, case, causal=True, key_mask=(np.arange(13) < 7)[None].repeat(2, 0))
    output = jax.jit(call)(*padded.inputs)
    np.testing.assert_allclose(output[:, :7], jax.jit(row.call(variant, case))(*case.inputs), atol=1e-6)


@each_variant
def test_an_example_of_padding_alone_gives_zeros_and_no_gradient(row, variant):
    key_mask = np.array([[True] * 11, [False] * 11, [True] * 11])
    case = draw(batch=3, key_mask=key_mask)
    output, *gradients = value_and_gradients(row.call(variant, case), case)
    assert not output[1].any()
    assert not any(gradient[1].any() for gradient in gradients)
    kept = Case(*(a[::2] for a in (case.query, case.key, case.value, case.d_output)))
    expected = value_and_gradients(row.call(variant, kept), kept)
    for got, want in zip((output, *gradients), expected):
        np.testing.assert_allclose(got[::2], want, atol=1e-6)


@each_variant
def test_an_example_alone_is_as_in_its_batch(row, variant):
    case = draw(batch=3, causal=True, key_mask=random_mask(2, 3, 11))
    together = jax.jit(row.call(variant, case))(*case.inputs)
    alone = row.call(variant, case, key_mask=case.options["key_mask"][2:])(*(array[2:] for array in case.inputs))
    np.testing.assert_allclose(together[2:], alone, atol=1e-6)


@each_variant
def test_grouped_heads_are_repeated_heads(row, variant):
    case = draw(causal=True)
    repeated = Case(case.query, case.key.repeat(2, 2), case.value.repeat(2, 2), case.d_output)
    call = row.call(variant, case)
    output, d_query, d_key, d_value = value_and_gradients(call, case)
    expected = value_and_gradients(call, repeated)
    np.testing.assert_allclose(output, expected[0], atol=1e-6)
    np.testing.assert_allclose(d_query, expected[1], atol=1e-5)
    for got, want in ((d_key, expected[2]), (d_value, expected[3])):
        np.testing.assert_allclose(got, want.reshape(2, 11, 3, 2, -1).sum(3), atol=1e-5)


@each_variant
def test_packed_documents_are_as_alone(row, variant):
    case = draw(queries=5, keys=5, causal=True)
    segments = np.array([[1, 1, 1, 2, 2]] * 2, np.int32)
    positions = np.array([[0, 1, 2, 0, 1]] * 2, np.int32)
    call = row.call(variant, case, query_segments=segments, query_positions=positions)
    packed = value_and_gradients(call, case)
    for part in (slice(0, 3), slice(3, 5)):
        alone = Case(*(a[:, part] for a in (case.query, case.key, case.value, case.d_output)))
        for got, want in zip(packed, value_and_gradients(row.call(variant, case), alone)):
            np.testing.assert_allclose(got[:, part], want, atol=1e-5)
    changed = Case(
        *(np.where(segments[:, :, None, None] == 1, a + 1, a) for a in (case.query, case.key, case.value)), None
    )
    output = jax.jit(call)(*changed.inputs)
    np.testing.assert_array_equal(output[:, 3:], packed[0][:, 3:])


@each_variant
def test_jit_vmap_and_checkpoint_change_nothing(row, variant):
    case = draw(causal=True)
    call = row.call(variant, case)
    expected = call(*case.inputs)
    np.testing.assert_allclose(jax.jit(call)(*case.inputs), expected, atol=1e-6)
    stacked = [jnp.stack([array, array[::-1]]) for array in case.inputs]
    mapped = jax.jit(jax.vmap(call))(*stacked)
    np.testing.assert_allclose(mapped, jnp.stack([expected, expected[::-1]]), atol=1e-6)
    plain = value_and_gradients(call, case)
    for got, want in zip(value_and_gradients(jax.checkpoint(call), case), plain):
        np.testing.assert_allclose(got, want, atol=1e-6)


@each_variant
def test_numpy_inputs_do(row, variant):
    case = draw(causal=True, key_mask=random_mask(2, 2, 11).astype(np.int32))
    call = row.call(variant, case)
    np.testing.assert_array_equal(call(case.query, case.key, case.value), call(*case.inputs))


@each_variant
def test_gradients_in_float64_equal_finite_differences(row, variant):
    with jax.enable_x64(True):
        case = draw(causal=True, queries=5, keys=7)
        call = row.call(variant, case)
        inputs = [jnp.asarray(array, jnp.float64) for array in (case.query, case.key, case.value)]
        loss = jax.jit(lambda *inputs: (call(*inputs) * jnp.asarray(case.d_output, jnp.float64)).sum())
        assert call(*inputs).dtype == jnp.float64
        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)
        random = np.random.default_rng(3)
        for number, gradient in enumerate(gradients):
            direction = random.standard_normal(gradient.shape)
            ends = [
                loss(*(array + step * direction if i == number else array for i, array in enumerate(inputs)))
                for step in (1e-4, -1e-4)
            ]
            np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-4, rtol=1e-7)


@each_variant
def test_forward_over_reverse_equals_differences_of_gradients(row, variant):
    with jax.enable_x64(True):
        case = draw(causal=True, queries=5, keys=7)
        call = row.call(variant, case)
        inputs = [jnp.asarray(array, jnp.float64) for array in (case.query, case.key, case.value)]
        gradient = jax.grad(lambda *inputs: (call(*inputs) ** 2).sum(), (0, 1, 2))
        random = np.random.default_rng(3)
        direction = [jnp.asarray(random.standard_normal(array.shape)) for array in inputs]
        _, curvature = jax.jit(lambda *xs: jax.jvp(gradient, xs[:3], xs[3:]))(*inputs, *direction)
        ahead, behind = (
            jax.jit(gradient)(*(array + step * way for array, way in zip(inputs, direction))) for step in (1e-5, -1e-5)
        )
        for got, plus, minus in zip(curvature, ahead, behind):
            np.testing.assert_allclose(got, (plus - minus) / 2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@each_variant
def test_low_precision_is_close(row, variant, dtype):
    case = draw(causal=True)
    rounded = [array.astype(dtype) for array in case.inputs]
    call = row.call(variant, case)
    output = jax.jit(call)(*rounded)
    assert output.dtype == dtype
    exact = call(*(array.astype(jnp.float32) for array in rounded))
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(output.astype(jnp.float32), exact, atol=tolerance, rtol=tolerance)
    gradients = jax.jit(jax.grad(lambda *inputs: call(*inputs).astype(jnp.float32).sum(), (0, 1, 2)))(*rounded)
    assert all(gradient.dtype == dtype and np.isfinite(gradient.astype(jnp.float32)).all() for gradient in gradients)


@each_variant
def test_no_keys_and_no_queries_give_zeros_and_nothing(row, variant):
    case = draw()
    query, key, value = case.inputs
    call = row.call(variant, case)
    assert not call(query, key[:, :0], value[:, :0]).any()
    assert call(query[:, :0], key, value).shape == (2, 0, 6, 8)


@each_variant
def test_traced_once_for_many_masks(row, variant):
    case = draw()
    traces = []

    @jax.jit
    def run(query, key, value, key_mask):
        traces.append(0)
        return row.call(variant, case, key_mask=key_mask)(query, key, value)

    for seed in range(3):
        run(*case.inputs, random_mask(seed, 2, 11))
    assert len(traces) == 1


@each_row
def test_unfit_inputs_are_refused_by_name(row):
    case = draw()
    query, key, value = case.inputs
    attend = row.kind.function
    refused = [
        ("query", (query[0], key, value), {}),
        ("query", (query.astype(jnp.int32), key, value), {}),
        ("equal batch", (query[:1], key, value), {}),
        ("head_dim", (query[..., :4], key, value), {}),
        ("dtype", (query.astype(jnp.bfloat16), key, value), {}),
        ("5 heads and key has 3", (query[:, :, :5], key, value), {}),
        ("key has 0", (query, key[:, :, :0], value[:, :, :0]), {}),
        ("value", (query, key, value[:, :4]), {}),
        (r"key_mask has shape \(2, 7\)", (query, key, value), {"key_mask": np.ones((2, 7), bool)}),
        ("key_mask", (query, key, value), {"key_mask": np.ones((2, 11), np.float32)}),
        ("no more of them", (query, key[:, :5], value[:, :5]), {"causal": True}),
    ]
    if row.kind.positions:
        refused += [
            ("key_positions go together", (query, key, value), {"query_positions": integers(0, 9, 2, 7)}),
            ("query_positions has shape", (query, query, query), {"query_positions": integers(0, 9, 2, 5)}),
            ("query_positions is float32", (query, query, query), {"query_positions": np.ones((2, 7), np.float32)}),
        ]
    for message, inputs, options in refused:
        with pytest.raises(ValueError, match=message):
            attend(*inputs, **options)
