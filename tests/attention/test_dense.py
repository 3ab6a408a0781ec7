"""Dense attention by hand-computed numbers, its biases, its dropout and its choice of an implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import dense_oracle, draw, see

from jaxformer.attention import dense as dense_module
from jaxformer.attention import dense_attention, dense_attention_weights
from jaxformer.functional import AlibiBias, RelativeBias, alibi_slopes, causal_mask

IMPLEMENTATIONS = {
    "xla": {"implementation": "xla"},
    "blockwise": {"implementation": "blockwise"},
    "blocks_of_2": {"implementation": "blockwise", "block_size": 2},
}
each_implementation = pytest.mark.parametrize("form", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
# Where a case is smaller than the usual block, blocks of 2 are the harder half of the same form.
each_program = pytest.mark.parametrize(
    "form",
    [
        IMPLEMENTATIONS["xla"],
        pytest.param(IMPLEMENTATIONS["blockwise"], marks=pytest.mark.slow),
        IMPLEMENTATIONS["blocks_of_2"],
    ],
    ids=list(IMPLEMENTATIONS),
)


def ramp(length, width=1):
    return np.arange(length * width, dtype=np.float32).reshape(1, length, 1, width)


def zeros(length):
    return np.zeros((1, length, 1, 1), np.float32)


@each_implementation
def test_a_row_without_keys_is_zero_and_passes_no_gradient(form):
    query, key = np.ones((1, 2, 1, 4), np.float32), np.ones((1, 3, 1, 4), np.float32)
    mask = np.array([[True, True, False], [False, False, False]])

    @jax.jit
    def attend(counted, *inputs):
        output, pull = jax.vjp(lambda *inputs: dense_attention(*inputs, mask=mask, **form), *inputs)
        return output, pull(jnp.broadcast_to(counted.reshape(1, 2, 1, 1), output.shape))

    output, gradients = attend(np.ones(2, np.float32), query, key, ramp(3, 4))
    np.testing.assert_allclose(output[0, :, 0], [[2, 3, 4, 5], [0, 0, 0, 0]], atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    _, of_row_1 = attend(np.array([0, 1], np.float32), query, key, ramp(3, 4))
    assert not any(gradient.any() for gradient in of_row_1)


@each_implementation
def test_padding_and_causal_masks_together_in_float16(form):
    ones = np.ones((1, 3, 1, 4), np.float16)
    value = np.arange(12, dtype=np.float16).reshape(1, 3, 1, 4)
    run = jax.jit(lambda *inputs: dense_attention(*inputs, causal=True, key_mask=np.array([[0, 0, 1]]), **form))
    output = run(ones, ones, value)
    np.testing.assert_array_equal(output[0, :, 0], [[0] * 4, [0] * 4, [8, 9, 10, 11]])


@each_implementation
def test_a_bias_row_of_minus_infinity_gives_zeros(form):
    bias = np.zeros((2, 3), np.float32)
    bias[1] = -np.inf
    bias[0, 2] = -np.inf

    @jax.jit
    def attend(*inputs):
        def loss(value, bias):
            output = dense_attention(zeros(2), zeros(3), value, bias=bias, **form)
            return output.sum(), output

        return jax.grad(loss, (0, 1), has_aux=True)(*inputs)

    gradients, output = attend(ramp(3), bias)
    np.testing.assert_allclose(output[0, :, 0, 0], [0.5, 0.0], atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[1][1].any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, bool) for shape in [(1, 1, 1, 4), (1, 2, 4, 4), (4,), (4, 4), (2, 4, 4)]]
    + [((1, 2, 4, 4), dtype) for dtype in (np.int32, np.uint8)],
    ids=str,
)
def test_a_mask_means_the_same_in_every_form(shape, dtype):
    query = np.zeros((1, 4, 2, 1), np.float32)
    mask = np.broadcast_to(np.array([5, 7, 0, 0]) != 0, shape).astype(dtype)

    @jax.jit
    def run(query, mask):
        outputs = [dense_attention(query, query, query + 1, mask=mask, **form) for form in IMPLEMENTATIONS.values()]
        return dense_attention_weights(query, query, mask=mask), outputs

    weights, outputs = run(query, mask)
    np.testing.assert_allclose(weights, np.broadcast_to([0.5, 0.5, 0.0, 0.0], (1, 2, 4, 4)))
    for output in outputs:
        np.testing.assert_allclose(output, np.ones((1, 4, 2, 1)), atol=1e-6)


def test_a_mask_that_does_not_broadcast_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"mask has shape \(4, 1, 3\).*\(1, 1, 2, 3\)"):
        dense_attention(zeros(2), zeros(3), ramp(3), mask=np.ones((4, 1, 3), bool))
    with pytest.raises(ValueError, match="bias"):
        dense_attention(zeros(2), zeros(3), ramp(3), mask=np.zeros((2, 3), np.float32))


@each_implementation
def test_causal_queries_are_the_last_positions(form):
    value = ramp(4) + 1
    run = jax.jit(lambda query: dense_attention(query, zeros(4), value, causal=True, **form))
    one, two = run(zeros(1)), run(zeros(2))
    np.testing.assert_allclose(one.ravel(), [2.5], atol=1e-6)
    np.testing.assert_allclose(two.ravel(), [2.0, 2.5], atol=1e-6)


def test_weights_are_a_distribution_even_in_low_precision():
    case = draw(batch=1, queries=6, keys=6, heads=1, kv_heads=1, causal=True)
    query, key, _ = (array.astype(jnp.bfloat16) for array in case.inputs)
    weights = dense_attention_weights(query, key, causal=True)
    assert weights.shape == (1, 1, 6, 6)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), np.ones((1, 1, 6)), atol=1e-6)
    np.testing.assert_array_equal(weights > 0, see(case))


BIASES = {
    "full": (2, 6, 7, 11),
    "heads": (6, 1, 1),
    "keys": (2, 1, 1, 11),
    "queries_and_keys": (7, 11),
}


@pytest.mark.parametrize("shape", BIASES.values(), ids=list(BIASES))
@each_program
def test_gradient_of_a_bias_array_equals_the_oracle(form, shape):
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    case = draw(causal=True, bias=bias)
    query, key, value = case.inputs

    def loss(bias):
        output = dense_attention(query, key, value, causal=True, bias=bias, **form)
        return (output * case.d_output).sum(), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(bias)
    expected = dense_oracle(case)
    np.testing.assert_allclose(output, expected.output, atol=1e-5)
    axes = [axis for axis, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1]
    np.testing.assert_allclose(gradient, expected.d_bias.sum(tuple(axes), keepdims=True).reshape(shape), atol=2e-5)


def make_biases():
    table = jnp.asarray(np.random.default_rng(2).standard_normal((8, 6)), jnp.float32)
    return {
        "alibi": AlibiBias(alibi_slopes(6)),
        "relative": RelativeBias(table, bidirectional=True, max_distance=20),
        "relative_decoder": RelativeBias(table, bidirectional=False, max_distance=20),
    }


@functools.cache
def with_bias_of_positions(name, form, evaluate):
    """(gradient by the bias, output) of a case with irregular positions; `evaluate` gives the bias as an array."""
    case = draw(causal=True)
    query_positions = np.random.default_rng(5).integers(0, 30, (2, 7)).astype(np.int32)
    key_positions = np.random.default_rng(6).integers(0, 30, (2, 11)).astype(np.int32)
    given = {"causal": True, "query_positions": query_positions, "key_positions": key_positions}

    def loss(bias):
        array = bias(query_positions, key_positions) if evaluate else bias
        output = dense_attention(*case.inputs, **given, bias=array, **IMPLEMENTATIONS[form])
        return (output * case.d_output).sum(), output

    return jax.jit(jax.grad(loss, has_aux=True))(make_biases()[name])


@pytest.mark.parametrize("name", list(make_biases()))
@pytest.mark.parametrize("form", ["xla", pytest.param("blockwise", marks=pytest.mark.slow), "blocks_of_2"])
def test_a_bias_of_positions_is_its_array_with_gradients(form, name):
    gradient, output = with_bias_of_positions(name, form, evaluate=False)
    expected, expected_output = with_bias_of_positions(name, "xla", evaluate=True)
    np.testing.assert_allclose(output, expected_output, atol=1e-5)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected)):
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert want.any()


def test_alibi_depends_on_positions_not_indices():
    case = draw(queries=11, causal=True)
    bias = AlibiBias(alibi_slopes(6))
    order = np.random.default_rng(0).permutation(11)
    query, key, value = case.inputs
    straight = dense_attention(query, key, value, causal=True, bias=bias)
    positions = np.arange(11, dtype=np.int32)[None]
    shuffled = dense_attention(
        query,
        key[:, order],
        value[:, order],
        causal=True,
        bias=bias,
        query_positions=positions,
        key_positions=positions[:, order],
    )
    np.testing.assert_allclose(shuffled, straight, atol=1e-5)


def test_more_queries_than_keys_are_fine_where_positions_do_not_matter():
    case = draw(queries=13, keys=5)
    xla, blocks = (dense_attention(*case.inputs, **IMPLEMENTATIONS[name]) for name in ("xla", "blocks_of_2"))
    np.testing.assert_allclose(blocks, xla, atol=1e-5)
    with pytest.raises(ValueError, match="13 queries over 5 keys"):
        dense_attention(*case.inputs, bias=AlibiBias(alibi_slopes(6)))


def test_positions_of_one_side_serve_both_in_self_attention():
    case = draw(queries=11)
    positions = np.arange(11, dtype=np.int32)[None, ::-1]
    both = dense_attention(*case.inputs, causal=True, query_positions=positions, key_positions=positions)
    for name in ("query_positions", "key_positions"):
        np.testing.assert_array_equal(dense_attention(*case.inputs, causal=True, **{name: positions}), both)
    mask = causal_mask(positions, positions)
    np.testing.assert_allclose(dense_attention(*case.inputs, mask=mask), both, atol=1e-6)


@pytest.mark.slow
def test_a_traced_scale_gets_a_gradient():
    case = draw()
    gradients = [
        jax.grad(lambda s, form=form: (dense_attention(*case.inputs, scale=s, **form) * case.d_output).sum())(
            jnp.float32(0.7)
        )
        for form in IMPLEMENTATIONS.values()
    ]
    np.testing.assert_allclose(gradients[1:], [gradients[0]] * 2, rtol=1e-4)
    assert abs(gradients[0]) > 1e-3


@each_implementation
def test_dropout_drops_the_stated_share_and_keeps_the_mean(form, rng):
    query = np.zeros((2, 64, 3, 4), np.float32)
    value = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (2, 64, 3, 64))
    dropped = dense_attention(query, query, value, dropout_rate=0.25, rng=rng, **{**form, **longer(form)})
    weights = np.asarray(dropped) * 64
    kept = weights > 0
    np.testing.assert_allclose(weights[kept], 4 / 3, rtol=1e-5)
    assert abs(kept.mean() - 0.75) < 0.02
    flat = kept.transpose(0, 2, 1, 3).reshape(-1, 64)
    assert len(np.unique(flat, axis=0)) == len(flat)  # Every query, head and example has a mask of its own.


def longer(form):
    return {"block_size": 24} if "block_size" in form else {}


@each_program
def test_dropout_is_the_same_in_the_backward_pass(form, rng):
    case = draw(batch=3, causal=True)
    direction = np.random.default_rng(1).standard_normal(case.value.shape).astype(np.float32)
    query, key, value = case.inputs

    @jax.jit
    def attend(key, value):
        return dense_attention(query, key, value, causal=True, dropout_rate=0.4, rng=rng, **form)

    slopes, gradient = jax.jit(jax.grad(lambda k, v: (attend(k, v) * case.d_output).sum(), (0, 1)))(key, value)
    # The output is linear in the value, so the gradient must reproduce it exactly.
    np.testing.assert_allclose((gradient * direction).sum(), (attend(key, direction) * case.d_output).sum(), rtol=1e-4)
    step = 1e-2 * np.random.default_rng(2).standard_normal(case.key.shape).astype(np.float32)
    slope = (slopes * step).sum()
    change = ((attend(key + step, value) - attend(key - step, value)) * case.d_output).sum() / 2
    np.testing.assert_allclose(slope, change, rtol=2e-3)


def test_no_rng_means_no_dropout(rng):
    case = draw()
    np.testing.assert_array_equal(dense_attention(*case.inputs, dropout_rate=0.5), dense_attention(*case.inputs))
    np.testing.assert_array_equal(dense_attention(*case.inputs, rng=rng), dense_attention(*case.inputs))


def test_bad_options_are_refused_by_name(rng):
    inputs = draw().inputs
    for message, options in [
        ("dropout_rate is 1.0", {"dropout_rate": 1.0, "rng": rng}),
        ("dropout_rate is -0.1", {"dropout_rate": -0.1}),
        ("jax.random.key", {"dropout_rate": 0.1, "rng": jax.random.key_data(rng)}),
        ("'flash'", {"implementation": "flash"}),
        ("block_size", {"implementation": "xla", "block_size": 4}),
        ("block_size is 0", {"block_size": 0}),
        ("cudnn", {"implementation": "cudnn"}),
        ("scale", {"scale": np.ones(3, np.float32)}),
        ("bias is int32", {"bias": np.ones((7, 11), np.int32)}),
        (r"bias has shape \(6, 11\)", {"bias": np.ones((6, 11), np.float32)}),
        ("the bias's result", {"bias": AlibiBias(alibi_slopes(4))}),
    ]:
        with pytest.raises(ValueError, match=message):
            dense_attention(*inputs, **options)


def test_cudnn_is_refused_with_the_first_reason():
    inputs = draw().inputs
    with pytest.raises(ValueError, match="does not support this case: it needs a GPU"):
        dense_attention(*inputs, implementation="cudnn")


def test_the_default_never_changes_the_meaning(monkeypatch):
    case = draw(queries=80, keys=80, causal=True)
    chosen = []
    for name in ("plain_attention", "blockwise_attention"):
        original = getattr(dense_module, name)
        monkeypatch.setattr(
            dense_module, name, lambda *args, name=name, original=original: (chosen.append(name), original(*args))[1]
        )
    long = dense_attention(*case.inputs, causal=True)
    short = dense_attention(*(array[:, :9] for array in case.inputs), causal=True)
    assert chosen == ["blockwise_attention", "plain_attention"]
    expected = dense_attention(*case.inputs, causal=True, implementation="xla")
    np.testing.assert_allclose(long, expected, atol=1e-5)
    np.testing.assert_allclose(short, expected[:, :9], atol=1e-5)
