import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference.steps import for_single_tokens, left_padded_positions, next_logits

TOKENS = [3, 14, 15, 9, 2, 6, 5]


@functools.partial(jax.jit, static_argnums=0)
def step(model, params, tokens, positions, cache):
    return next_logits(model, {"params": params}, tokens, positions=positions, cache=cache)


@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 1, 1, 1), (2, 2, 1, 1, 1)], ids=str)
def test_cached_logits_are_those_of_the_full_pass(gpt, full_pass, chunks):
    model, params = gpt
    cache, start = model.init_cache(1, 11), 0
    for size in chunks:
        end = start + size
        numbers = jnp.arange(start, end, dtype=jnp.int32)[None]
        logits, cache = step(model, params, jnp.asarray(TOKENS[start:end])[None], numbers, cache)
        np.testing.assert_allclose(logits[0], full_pass(model, params, TOKENS[:end]), atol=1e-5, rtol=1e-5)
        start = end
    assert start == len(TOKENS)


def test_positions_of_left_padded_rows_count_real_tokens():
    positions, real = left_padded_positions(jnp.asarray([3, 5, 1]), 5)
    np.testing.assert_array_equal(positions, [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(real.sum(axis=1), [3, 5, 1])
    assert real[:, -1].all()


def test_left_padding_does_not_change_logits(make_gpt, full_pass):
    model, params = make_gpt()
    positions, real = left_padded_positions(jnp.asarray([7, 4]), 7)
    tokens = jnp.asarray([TOKENS, [0, 0, 0, *TOKENS[:4]]])
    cache = model.init_cache(2, 11)
    logits, cache = next_logits(model, {"params": params}, tokens, positions=positions, key_mask=real, cache=cache)
    more, _ = step(model, params, jnp.asarray([[8], [8]]), jnp.asarray([[7], [4]]), cache)
    for row, prompt in enumerate((TOKENS, TOKENS[:4])):
        np.testing.assert_allclose(logits[row], full_pass(model, params, prompt), atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(more[row], full_pass(model, params, [*prompt, 8]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_arrangement_for_single_tokens_keeps_the_function(gpt, batch_size):
    model, params = gpt
    arranged, variables = for_single_tokens(model, {"params": params, "averages": {}}, batch_size)
    assert arranged.config != model.config
    assert variables["averages"] == {}
    tokens = jnp.asarray([TOKENS] * batch_size)
    np.testing.assert_allclose(
        arranged.apply(variables, tokens).logits, model.apply({"params": params}, tokens).logits, atol=1e-5
    )
    assert for_single_tokens(arranged, variables, batch_size) == (arranged, variables)


@pytest.mark.slow
def test_a_head_that_is_untied_for_speed_keeps_the_scale_of_logits(make_gpt):
    model, params = make_gpt(scale_logits=True)
    arranged, variables = for_single_tokens(model, {"params": params}, 1)
    tokens = jnp.asarray([TOKENS])
    logits = model.apply({"params": params}, tokens).logits
    np.testing.assert_allclose(arranged.apply(variables, tokens).logits, logits, atol=1e-5)
    plain = model.clone(config=dataclasses.replace(model.config, scale_logits=False))
    unscaled = plain.apply({"params": params}, tokens).logits
    np.testing.assert_allclose(logits, unscaled * model.config.embed_dim**-0.5, atol=1e-5)


def test_models_without_layers_are_left_as_they_are(recurrent):
    assert for_single_tokens(recurrent, {}, 1) == (recurrent, {})
