"""Generation by a model whose probabilities are written down: scores by hand, and when it stops."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import beam_search, generate

EOS, A, B, OTHERS = 0, 1, 2, 997
# States: 0 at the start, 1 and 2 behind A and A A, 3 to 7 behind B, B B, …, 8 behind anything else.
SCRIPT = {
    **{(0, A): (-1.0, 1), (1, A): (-1.0, 2), (2, EOS): (-1.0, 8)},
    **{(0, B): (-0.75, 3), **{(state, B): (-0.75, state + 1) for state in range(3, 7)}, (7, EOS): (-0.75, 8)},
}


def _tables():
    """Log-probabilities and following states [9, V]; what the script leaves is shared by the other tokens."""
    log_probs, following = np.full((9, 3 + OTHERS), -60.0), np.full((9, 3 + OTHERS), 8)
    for state in range(9):
        left = 1.0
        for (at, token), (value, to) in SCRIPT.items():
            if at == state:
                log_probs[state, token], following[state, token] = value, to
                left -= np.exp(value)
        log_probs[state, 3:] = np.log(left / OTHERS)
    return log_probs.astype(np.float32), following.astype(np.int32)


LOG_PROBS, FOLLOWING = _tables()


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 3 + OTHERS


class Output(NamedTuple):
    logits: jax.Array
    aux: Any


class Aux(NamedTuple):
    cache: Any


class Scripted(nn.Module):
    """Prompts say nothing; calls are counted."""

    config: Config = Config()
    calls = 0

    @nn.nowrap
    def init_cache(self, batch_size, max_length):
        return jnp.full(batch_size, -1, jnp.int32)

    @nn.compact
    def __call__(self, tokens, *, positions, key_mask, cache, select):
        jax.debug.callback(Scripted.count)
        states = jnp.where(cache < 0, 0, jnp.asarray(FOLLOWING)[jnp.maximum(cache, 0), tokens[:, -1]])
        return Output(jnp.asarray(LOG_PROBS)[states][:, None], Aux(states))

    @staticmethod
    def count():
        Scripted.calls += 1


def calls_of(run):
    jax.effects_barrier()
    Scripted.calls = 0
    out = run()
    jax.effects_barrier()
    return out, Scripted.calls


@pytest.mark.parametrize(("penalty", "first"), [(1.0, "b"), (0.0, "a")])
def test_the_length_counts_new_tokens_and_the_end_but_nothing_of_the_prompt(penalty, first):
    """A prompt of 10 tokens, -3.0 over 3 tokens against -4.5 over 6; it stops when both have ended, not at 500."""
    options = {"max_new_tokens": 500, "eos_id": EOS, "num_beams": 2, "num_return": 2, "pad_id": -1}
    (tokens, scores), calls = calls_of(
        lambda: beam_search(Scripted(), {}, [[5] * 10], length_penalty=penalty, **options)
    )
    ways = {"a": [A, A, EOS], "b": [B] * 5 + [EOS]}
    expected = {"a": -3.0 / 3**penalty, "b": -4.5 / 6**penalty}
    order = [first, "b" if first == "a" else "a"]
    np.testing.assert_allclose(scores[0], [expected[name] for name in order], rtol=1e-5)
    for row, name in zip(tokens[0], order):
        np.testing.assert_array_equal(row[:6], ways[name] + [-1] * (6 - len(ways[name])))
        assert (row[6:] == -1).all()
    assert calls <= 7


def test_greedy_rows_stop_when_all_have_ended():
    out, calls = calls_of(lambda: generate(Scripted(), {}, [[5] * 10, [7]], max_new_tokens=500, eos_id=EOS, pad_id=-1))
    np.testing.assert_array_equal(out[:, :6], [[B] * 5 + [EOS]] * 2)
    assert (out[:, 6:] == -1).all()
    assert calls == 6, "one for the prompt and one for each token but the last"
