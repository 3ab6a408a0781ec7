"""Settings of the kinds in the layer: each is honoured with a cache as without, or refused by name."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import ATTENTION, kernel_attention, patterns
from jaxformer.layers import ATTENTION_ARGUMENTS, MultiHeadAttention, argument_defaults, check_decoding, check_settings

BATCH, LENGTH, WIDTH = 2, 6, 12
GIVEN = {"query", "key", "query_key", "value", "key_mask", "causal", "mask", "bias", "scale", "dropout_rate", "rng"}
GIVEN |= {f"{side}_{numbers}" for side in ("query", "key") for numbers in ("positions", "segments")}


def make(kind, args, **options):
    """A layer, its variables and input."""
    layer = MultiHeadAttention(num_heads=3, attention=ATTENTION[kind], attention_args=args, **options)
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
    variables = jax.jit(lambda: layer.init(jax.random.key(1), x))()
    return layer, jax.tree.map(lambda leaf: 15 * leaf, variables), x


def empty_cache(kind, args):
    names = set(inspect.signature(ATTENTION[kind].init_cache).parameters)
    return ATTENTION[kind].init_cache(
        BATCH, LENGTH, 3, 4, **{name: value for name, value in args.items() if name in names}
    )


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("sparse", {"pattern": patterns.strided(3), "num_added": 2}),
        ("kernel", {"leave_one_out": True}),
        ("kernel", {"width": (2, 1.0, 0.5), "block_size": 2}),
    ],
    ids=["added", "leave_one_out", "width"],
)
def test_steps_honour_the_settings_of_the_full_pass(kind, args):
    layer, variables, x = make(kind, args)
    apply = jax.jit(lambda variables, x, cache: layer.apply(variables, x, causal=True, cache=cache))
    cache, outputs = empty_cache(kind, args), []
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6)):
        output, cache, *_ = apply(variables, x[:, start:stop], cache)
        outputs.append(output)
    whole = apply(variables, x, None).output
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=1e-5)
    # The setting does something: without it, other outputs.
    plain = layer.clone(attention_args={"pattern": args["pattern"]} if "pattern" in args else {"width": 5.0})
    assert np.abs(jax.jit(lambda x: plain.apply(variables, x, causal=True).output)(x) - whole).max() > 1e-3


def test_a_fixed_width_is_no_parameter_and_the_functions_own():
    layer, variables, x = make("kernel", {"width": 2})
    assert set(variables["params"]) == {"query", "key", "value", "out"}
    shape = (BATCH, LENGTH, 3, 4)
    params = jax.tree.map(np.asarray, variables["params"])
    query, key, value = (
        np.asarray(x) @ params[name]["kernel"] + params[name]["bias"] for name in ("query", "key", "value")
    )
    attend = jax.jit(lambda *tensors: kernel_attention(*tensors, width=2.0))
    heads = attend(*(array.reshape(shape) for array in (query, key, value)))
    expected = np.asarray(heads).reshape(BATCH, LENGTH, -1) @ params["out"]["kernel"] + params["out"]["bias"]
    result = jax.jit(lambda x: layer.apply(variables, x, return_weights=True))(x)
    np.testing.assert_allclose(result.output, expected, atol=1e-5)
    np.testing.assert_allclose(result.weights.sum(-1), 1, atol=1e-5)
    learned = layer.clone(attention_args={})
    learned = jax.eval_shape(learned.init, jax.random.key(1), x)["params"]["arguments"]
    assert learned["log_width"].shape == (3,)
    for width, message in ((-1.0, "width is -1.0; it must be at least"), ((1.0, 2.0), r"must be \[\] or \[3\]")):
        with pytest.raises(ValueError, match=message):
            make("kernel", {"width": width})


def test_only_these_settings_exclude_decoding():
    """What the function takes and its step doesn't is either how whole sequences are computed, or refused."""
    refused = {"sparse": {"global_mask", "num_global"}}
    for name, kind in ATTENTION.items():
        settings = set(inspect.signature(kind.function).parameters) - GIVEN - set(kind.arguments)
        assert set(kind.whole_only) <= settings
        assert {argument for argument, _ in kind.excludes} <= settings
        if not kind.decodes:
            with pytest.raises(ValueError, match=f"attention='{name}' can't decode with a cache"):
                check_decoding(kind, {}, name)
            continue
        assert not set(kind.whole_only) & set(inspect.signature(kind.step).parameters)
        for setting in settings - set(kind.whole_only):
            check_decoding(kind, {setting: None}, name)
            check_decoding(kind, {setting: False}, name)
            if setting in refused.get(name, ()):
                with pytest.raises(ValueError, match=f"attention='{name}' can't decode with a cache with {setting}"):
                    check_decoding(kind, {setting: np.ones(2)}, name)
            else:
                check_decoding(kind, {setting: np.ones(2)}, name)


@pytest.mark.parametrize("kind", ATTENTION_ARGUMENTS)
def test_what_a_module_makes_is_refused_as_a_setting(kind):
    """All that it returns, with settings that make it return the most, is named; but for what it leaves to users."""
    module = ATTENTION_ARGUMENTS[kind]
    own = argument_defaults(kind)
    most = {"convolution": True, "num_added": 2}
    heads = jax.ShapeDtypeStruct((BATCH, LENGTH, 3, 4), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)

    def call(rng, x, query, key):
        sizes = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 4, "max_length": LENGTH}
        made = module(**sizes, **{name: value for name, value in most.items() if name in own})
        mask = jnp.ones((BATCH, LENGTH), bool)
        options = {"key_mask": mask, "causal": False, "deterministic": True}
        return made.init_with_output(rng, x, query, key, **options)[0][0]

    returned = set(jax.eval_shape(call, jax.random.key(0), x, heads, heads))
    assert returned == set(module.makes) | ({"width"} if kind == "kernel" else set())
    assert returned <= set(inspect.signature(ATTENTION[kind].function).parameters)
    needed = {"pattern": patterns.local(1), "window": 1, "num_clusters": 2, "chunk_size": 2}
    needed = {
        name: value for name, value in needed.items() if name in inspect.signature(ATTENTION[kind].function).parameters
    }
    for name in module.makes:
        with pytest.raises(ValueError, match=f"attention_args has '{name}', which attention='{kind}' makes itself"):
            check_settings(ATTENTION[kind], {**needed, name: np.ones(2)})


def test_what_the_layer_gives_is_refused_as_a_setting():
    for name in sorted(GIVEN - {"query", "key", "query_key", "value"}):
        with pytest.raises(ValueError, match=f"attention_args has '{name}', which the layer gives attention='dense'"):
            check_settings(ATTENTION["dense"], {name: 1.0})


def test_what_a_cache_can_not_honour_is_refused():
    layer, variables, x = make("dense", {}, dropout_rate=0.1)
    for message, options in {
        r"dropout_rate=0.1 and deterministic=False can't be given with a cache": {"deterministic": False},
        "return_weights can't be given with a cache": {"return_weights": True},
        "mask can't be given with a cache": {"mask": jnp.ones((LENGTH, LENGTH), bool)},
        "memory can't be given with a cache": {"memory": x},
    }.items():
        with pytest.raises(ValueError, match=message):
            layer.apply(variables, x, cache=empty_cache("dense", {}), **options)
    chosen = {"pattern": patterns.local(1), "global_mask": np.eye(1, LENGTH, dtype=bool), "num_global": 1}
    layer, variables, x = make("sparse", chosen)
    with pytest.raises(ValueError, match="attention='sparse' can't decode with a cache with global_mask"):
        layer.apply(variables, x, cache=empty_cache("sparse", chosen))
