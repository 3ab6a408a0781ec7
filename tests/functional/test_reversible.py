"""The reversible stack against the same loop of two streams written plainly and differentiated by JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import merge_streams, reversible_stack, split_streams

WIDTH = 4
RATE = 0.3


def drop(x, key):
    return jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x / (1 - RATE), jnp.zeros_like(x))


def mix(params, x, index, shared):
    """F: tokens are mixed by learned logits, a mask, a bias and a memory; with dropout, a loss and a state."""
    key = jax.random.fold_in(shared["key"], index)
    logits = params["scores"].astype(x.dtype) @ shared["bias"].astype(x.dtype)
    logits = jnp.where(shared["mask"], logits, -30.0)
    hidden = jax.nn.softmax(logits, -1) @ jnp.tanh(x @ params["kernel"].astype(x.dtype))
    out = drop(hidden + shared["memory"].astype(x.dtype).mean(0, keepdims=True), key)
    loss = (params["kernel"] ** 2).sum() * jnp.square(x).mean().astype(params["kernel"].dtype)
    return out, {"size": loss}, {"seen": params["count"] + 1, "mean": x.mean()}


def feed(params, x, index, shared):
    """G: a hidden layer with dropout."""
    key = jax.random.fold_in(jax.random.fold_in(shared["key"], index), 1)
    return drop(jnp.tanh(x @ params["up"].astype(x.dtype)), key) @ params["down"].astype(x.dtype), {}, None


def gate(params, x, index, shared):
    """Another G: a gate, with a loss of another name."""
    return x * jax.nn.sigmoid(x @ params["gate"].astype(x.dtype)), {"gate": jnp.abs(params["gate"]).sum()}, None


def make(count, dtype=jnp.float32, seed=0, length=5):
    """Parameters of ``count`` layers (F, G), the input and what is shared."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape) * 0.5, dtype)

    params = (
        {
            "kernel": normal(count, WIDTH, WIDTH),
            "scores": normal(count, length, length),
            "count": jnp.arange(count, dtype=jnp.int32),
        },
        {"up": normal(count, WIDTH, 7), "down": normal(count, 7, WIDTH)},
    )
    shared = {
        "key": jax.random.key(3),
        "mask": jnp.asarray(draw.random((length, length)) < 0.7),
        "bias": normal(length, length),
        "memory": normal(3, WIDTH),
        "nothing": None,
    }
    return [params], normal(length, WIDTH), shared


def plain(layers, params, streams, shared):
    """The loop of the paper, one layer after the other."""
    first, second = streams
    losses, state = [], []
    count = len(jax.tree.leaves(params)[0])
    for period in range(count):
        for place, ((f, g), pair) in enumerate(zip(layers, params)):
            index = jnp.asarray(period * len(layers) + place, jnp.int32)
            of_f, of_g = jax.tree.map(lambda leaf, period=period: leaf[period], pair)
            change, loss, kept = f(of_f, second, index, shared)
            first = first + change.astype(first.dtype)
            change, more, _ = g(of_g, first, index, shared)
            second = second + change.astype(second.dtype)
            losses.append({**loss, **more})
            state.append(kept)
    return (first, second), losses, state


def floating(tree):
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree)


def with_floating(tree, changed):
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, tree, changed, is_leaf=lambda x: x is None)


def wave(leaf):
    return jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)


def measure(outputs):
    """A scalar of everything that comes out."""
    (first, second), losses, _ = outputs
    total = (first * wave(first)).sum()
    total = total + jnp.square(second).sum()
    return total + sum((jnp.sum(loss).astype(total.dtype) for loss in jax.tree.leaves(losses)), jnp.zeros_like(total))


def gradients(stack, layers, params, x, shared):
    """The measure with what came out, and its gradients."""

    def loss(changed, x, changed_shared):
        outputs = stack(layers, with_floating(params, changed), (x, x), with_floating(shared, changed_shared))
        return measure(outputs), outputs

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(floating(params), x, floating(shared))


def assert_close(found, wanted, tolerance):
    """Relative to the largest entry of a leaf, and at least to a thousandth of the largest of all."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        scale = max(float(jnp.abs(b).max()), 1e-3 * largest)
        assert float(jnp.abs(a - b).max()) <= tolerance * scale


PAIR = [(mix, feed)]
reversible_gradients = jax.jit(functools.partial(gradients, reversible_stack, PAIR))


def test_values_losses_extras_and_gradients_are_those_of_the_plain_loop():
    params, x, shared = make(3)
    (value, outputs), found = reversible_gradients(params, x, shared)
    (wanted_value, wanted_outputs), wanted = jax.jit(functools.partial(gradients, plain, PAIR))(params, x, shared)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    streams, losses, state = wanted_outputs
    assert_close(outputs.streams, streams, 1e-6)
    np.testing.assert_allclose(outputs.losses[0]["size"], [loss["size"] for loss in losses], rtol=1e-5)
    np.testing.assert_array_equal(outputs.extras[0][0]["seen"], [1, 2, 3])
    np.testing.assert_allclose(outputs.extras[0][0]["mean"], [kept["mean"] for kept in state], rtol=1e-4)
    assert_close(found, wanted, 1e-5)
    for leaf in jax.tree.leaves(found):
        assert float(jnp.abs(leaf).max()) > 0


@pytest.mark.slow
def test_layers_that_take_turns_have_their_own_functions_losses_and_indices():
    (one,), x, shared = make(2)
    (other,), _, _ = make(2, seed=1)
    params = [one, (other[0], {"gate": other[1]["up"][..., :WIDTH]})]
    layers = [(mix, feed), (mix, gate)]
    (value, outputs), found = jax.jit(functools.partial(gradients, reversible_stack, layers))(params, x, shared)
    (wanted_value, _), wanted = jax.jit(functools.partial(gradients, plain, layers))(params, x, shared)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert_close(found, wanted, 1e-5)
    assert [sorted(names) for names in outputs.losses] == [["size"], ["gate", "size"]]


def test_gradients_are_finite_differences_in_float64():
    with jax.enable_x64(True):
        params, x, shared = make(3, jnp.float64)
        _, gradient = reversible_gradients(params, x, shared)
        point = (floating(params), x, floating(shared))
        direction = jax.tree.map(
            lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), point
        )

        def at(step):
            changed, x, changed_shared = jax.tree.map(lambda a, b: a + step * b, point, direction)
            return reversible_gradients(with_floating(params, changed), x, with_floating(shared, changed_shared))[0][0]

        # Fourth-order differences: errors of rounding and of the series are below 1e-9 here.
        step = 1e-3
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        wanted = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
        np.testing.assert_allclose(slope, wanted, rtol=1e-6)


def test_forward_mode_over_the_gradient():
    """Products of the Hessian with a direction."""

    def both(params, x, index, shared):
        return jnp.tanh(x @ params) * shared, {}, None

    kernels = tuple(jax.random.normal(jax.random.key(seed), (2, 3, 3)) for seed in range(2))
    scale = jnp.asarray(0.7)

    def product(stack):
        def loss(params, scale):
            first, second = stack([(both, both)], params, (jnp.ones((2, 3)),) * 2, scale)[0]
            return jnp.square(first).sum() + jnp.sin(second).sum()

        at = ([kernels], scale)
        return jax.jvp(jax.grad(loss, (0, 1)), at, jax.tree.map(wave, at))[1]

    assert_close(jax.jit(lambda: product(reversible_stack))(), jax.jit(lambda: product(plain))(), 1e-4)


def test_a_batch_of_stacks_is_each_alone():
    """Mapped over inputs, keys and a memory, gradients included."""
    params, x, shared = make(3)
    xs, keys = jnp.stack([x, x[::-1] * 2]), jax.random.split(jax.random.key(5), 2)
    memories = jnp.stack([shared["memory"], -shared["memory"]])

    def one(x, key, memory):
        return reversible_gradients(params, x, {**shared, "key": key, "memory": memory})

    (values, _), found = jax.vmap(one)(xs, keys, memories)
    for i in range(2):
        (value, _), wanted = one(xs[i], keys[i], memories[i])
        np.testing.assert_allclose(values[i], value, rtol=1e-5)
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], found), wanted, 1e-5)


def reconstructed(params, x, shared):
    """The first streams as the backward pass finds them: what F of the first layer is given."""
    seen = []

    def watching(params, x, index, shared):
        jax.debug.callback(lambda index, x: seen.append((int(index), np.asarray(x, np.float64))), index, x)
        return mix(params, x, index, shared)

    run = jax.jit(functools.partial(gradients, reversible_stack, [(watching, feed)]))
    jax.block_until_ready(run(params, x, shared))
    jax.effects_barrier()
    first = [x for index, x in seen if index == 0]
    assert len(first) == 2, "once in the forward pass, once in the backward pass"
    return np.abs(first[0] - first[1]).max() / np.abs(first[0]).max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-5), pytest.param(jnp.bfloat16, 0.1, marks=pytest.mark.slow)]
)
def test_the_backward_pass_finds_the_inputs_again(dtype, tolerance):
    params, x, shared = make(3)
    assert reconstructed(params, x.astype(dtype), shared) < tolerance


def test_streams_of_a_bfloat16_input_are_float32_and_lose_nothing():
    """Functions in bfloat16 around float32 streams."""
    params, x, shared = make(2)
    layers = [tuple(functools.partial(_in_bfloat16, function) for function in (mix, feed))]

    def run(stack):
        def of(layers, params, x, shared):
            def through_split(layers, params, streams, shared):
                return stack(layers, params, split_streams(streams[0].astype(jnp.bfloat16)), shared)

            return gradients(through_split, layers, params, x, shared)

        return jax.jit(functools.partial(of, layers))(params, x, shared)

    ((value, _), found), ((wanted_value, _), wanted) = run(reversible_stack), run(plain)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert_close(found, wanted, 0.02)


def _in_bfloat16(function, params, x, index, shared):
    return function(params, x.astype(jnp.bfloat16), index, shared)


def temporaries(depth):
    """XLA's temporary bytes of the gradient, beyond the parameters and their gradients."""
    params, x, shared = make(depth, length=96)
    compiled = jax.jit(functools.partial(gradients, reversible_stack, PAIR)).lower(params, x, shared).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("depth", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_depth(depth):
    assert temporaries(depth) <= 1.02 * temporaries(4)


def test_splits_and_merges():
    x = jnp.arange(12.0).reshape(3, 4)
    first, second = split_streams(x)
    np.testing.assert_array_equal(merge_streams((first, second + 2)), x + 1)
    np.testing.assert_array_equal(merge_streams(split_streams(x, "halve"), "concatenate"), x)
    assert split_streams(x.astype(jnp.bfloat16))[0].dtype == jnp.float32
    assert merge_streams((first, second), dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_what_is_wrong_is_named():
    params, x, shared = make(2)

    def run(layers=PAIR, params=params, streams=(x, x), shared=shared):
        return reversible_stack(layers, params, streams, shared)

    with pytest.raises(ValueError, match="params has 1 pairs for the 2 of layers"):
        run(layers=PAIR * 2)
    with pytest.raises(ValueError, match=r"leading axes \[2, 3\]"):
        run(params=[(params[0][0], make(3)[0][0][1])])
    with pytest.raises(ValueError, match="must be alike"):
        run(streams=(x, x[1:]))
    with pytest.raises(ValueError, match="must be floating"):
        run(streams=(x, jnp.zeros((5, 4), jnp.int32)))
    with pytest.raises(ValueError, match=r"complex64 leaf \(2,\)"):
        run(shared={**shared, "more": jnp.zeros(2, jnp.complex64)})
    with pytest.raises(ValueError, match=r"\['size'\] from both"):
        run(layers=[(mix, lambda params, x, index, shared: (x, {"size": x.sum()}, None))])
    with pytest.raises(ValueError, match=r"'count' of dtype int32"):
        run(layers=[(mix, lambda params, x, index, shared: (x, {"count": index}, None))])
    with pytest.raises(ValueError, match=r"returns \(4,\)"):
        run(layers=[(mix, lambda params, x, index, shared: (x[0], {}, None))])
    with pytest.raises(ValueError, match="how='thirds'"):
        split_streams(x, "thirds")
    with pytest.raises(ValueError, match="how='sum'"):
        merge_streams((x, x), "sum")
    with pytest.raises(ValueError, match="3 features"):
        split_streams(x[:, :3], "halve")
