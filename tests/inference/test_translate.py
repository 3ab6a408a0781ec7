"""Many sources decoded in batches of like length, against each decoded by itself."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import beam_search, generate, score, translate
from jaxformer.models import recurrent

START, EOS = 1, 2
OPTIONS = {"start_id": START, "eos_id": EOS, "max_new_tokens": 7, "batch_size": 3}
# Lengths out of order, so that sorting and putting back show.
SOURCES = [[3, 4, 5, 2], [6, 2], [7, 8, 9, 10, 3, 4, 2], [5, 2], [9, 9, 2]]


@pytest.fixture(scope="module")
def model():
    """A recurrent model with parameters large enough that its choices vary."""
    made = recurrent(vocab_size=11, embed_dim=8, hidden_dim=12, attention="dot", init_stddev=1.0)
    tokens = jnp.zeros((1, 3), jnp.int32)
    params = jax.jit(lambda key: made.init(key, tokens, source=tokens))(jax.random.key(1))["params"]
    return made, jax.tree.map(lambda leaf: 2 * leaf, params)


def _until_end(tokens):
    return tokens[: list(tokens).index(EOS)] if EOS in tokens else tokens


def test_greedy_translations_are_those_of_each_source_alone(model):
    found = translate(*model, SOURCES, **OPTIONS)
    different = set()
    for source, row in zip(SOURCES, found, strict=True):
        alone = generate(*model, [[START]], sources=[source], max_new_tokens=7, eos_id=EOS)[0]
        (hypothesis,) = row
        np.testing.assert_array_equal(hypothesis.tokens, _until_end(alone))
        different.add(tuple(hypothesis.tokens.tolist()))
        # The score is the mean log-probability of the tokens, the end among them.
        whole = [*hypothesis.tokens, EOS] if EOS in alone else hypothesis.tokens
        expected = score(*model, [[START]], [whole], sources=[source]).log_probs[0] / len(whole)
        assert hypothesis.score == pytest.approx(expected, rel=1e-4)
    assert len(different) > 1


def test_beams_give_the_best_of_each_source_first(model):
    found = translate(*model, SOURCES, **OPTIONS, num_beams=4, num_return=2, length_penalty=0.5)
    for source, row in zip(SOURCES, found, strict=True):
        options = {"num_beams": 4, "num_return": 2, "length_penalty": 0.5, "max_new_tokens": 7, "eos_id": EOS}
        alone = beam_search(*model, [[START]], sources=[source], **options)
        assert len(row) == 2
        for hypothesis, tokens, value in zip(row, alone.tokens[0], alone.scores[0]):
            np.testing.assert_array_equal(hypothesis.tokens, _until_end(tokens))
            assert hypothesis.score == pytest.approx(value, rel=1e-4)


def test_samples_are_drawn_by_the_key_and_differ(model):
    options = {**OPTIONS, "temperature": 1.5, "num_return": 3}
    first, again, other = (translate(*model, SOURCES, rng=jax.random.key(seed), **options) for seed in (0, 0, 1))

    def ids(found):
        return [[hypothesis.tokens.tolist() for hypothesis in row] for row in found]

    assert ids(first) == ids(again) != ids(other)
    assert all(len(row) == 3 for row in first)
    assert any(len({tuple(tokens) for tokens in row}) > 1 for row in ids(first))
    assert all(math.isnan(hypothesis.score) for row in first for hypothesis in row)


def test_no_sources_give_no_translations(model):
    assert translate(*model, [], **OPTIONS) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "top_k": 3}, "top_k"),
        ({"num_return": 2}, "num_return=2 must be at most num_beams=1"),
        ({"num_return": 2, "repetition_penalty": 1.2}, "num_return=2"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_options_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        translate(*model, SOURCES, **{**OPTIONS, **options})
