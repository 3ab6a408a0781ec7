import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import generate, stream

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7], [11]]


@pytest.mark.parametrize("max_new_tokens", [1, 9, 16])
def test_streamed_tokens_are_those_of_generate(gpt, max_new_tokens):
    options = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "rng": jax.random.key(2)}
    columns = list(stream(*gpt, PROMPTS, **options))
    assert all(column.shape == (3,) and column.dtype == np.int32 for column in columns)
    np.testing.assert_array_equal(np.stack(columns, axis=1), generate(*gpt, PROMPTS, **options))


def test_streaming_compiles_nothing_that_generate_has_not(gpt):
    from jaxformer.inference.loop import advance, start

    options = {"max_new_tokens": 16, "temperature": 1.0, "rng": jax.random.key(2)}
    generate(*gpt, PROMPTS, **options)
    compiled = start._cache_size(), advance._cache_size()
    list(stream(*gpt, PROMPTS, **options))
    assert (start._cache_size(), advance._cache_size()) == compiled


def test_a_stream_ends_when_all_rows_have(recurrent):
    state = {"averages": {"offset": jnp.asarray(0, jnp.int32)}}
    # 1, 1, 2, 4, 8, 16 and 3, 3, 6, 12, 1 (24 modulo 23), 2, 4, 8, 16 end in 16.
    columns = list(stream(recurrent, {}, [[1], [3]], max_new_tokens=1000, eos_id=16, pad_id=-7, model_state=state))
    expected = [[1, 2, 4, 8, 16, -7, -7, -7], [3, 6, 12, 1, 2, 4, 8, 16]]
    np.testing.assert_array_equal(np.stack(columns, axis=1), expected)


def test_nothing_runs_beyond_what_is_asked_for(gpt):
    endless = stream(*gpt, PROMPTS, max_new_tokens=16)
    first = [column.tolist() for column in itertools.islice(endless, 3)]
    np.testing.assert_array_equal(np.transpose(first), generate(*gpt, PROMPTS, max_new_tokens=3))


def test_wrong_input_is_refused_before_the_first_token_is_asked_for(gpt):
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        stream(*gpt, PROMPTS, max_new_tokens=0)
