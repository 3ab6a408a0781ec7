"""Beam search against enumeration of all continuations, against greedy choice, and its rows among themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import beam_search, generate, score
from jaxformer.models import Transformer, TransformerConfig

EOS = 2
SHAPE = {"num_layers": 1, "embed_dim": 12, "num_heads": 3, "max_length": 40, "init_stddev": 0.6}


@pytest.fixture(scope="module")
def tiny():
    """A decoder of four tokens, small enough to enumerate what it may say."""
    model = Transformer(TransformerConfig(**SHAPE, vocab_size=4, scan_layers=False))
    return model, jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))["params"]


@pytest.fixture(scope="module")
def translator():
    """An encoder-decoder."""
    config = TransformerConfig(**SHAPE, vocab_size=11, architecture="encoder_decoder", positions="relative")
    model = Transformer(config)
    tokens = jnp.zeros((1, 4), jnp.int32)
    return model, jax.jit(lambda key: model.init(key, tokens, source=tokens))(jax.random.key(5))["params"]


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(model, params, tokens):
    return jax.nn.log_softmax(model.apply({"params": params}, tokens).logits)


def _enumerate(model, params, prompt, most, penalty):
    """Every continuation with its score, best first: those that end, and those of full length that do not."""
    others = [token for token in range(model.config.vocab_size) if token != EOS]
    ways = [(*begin, EOS) for length in range(most) for begin in itertools.product(others, repeat=length)] + list(
        itertools.product(others, repeat=most)
    )
    rows = np.array([[*prompt, *way, *[0] * (most - len(way))] for way in ways])
    table = np.asarray(_log_probs(model, params, rows))
    found = []
    for row, way in enumerate(ways):
        places = len(prompt) - 1 + np.arange(len(way))
        found.append((table[row, places, list(way)].sum() / len(way) ** penalty, way))
    return sorted(found, key=lambda pair: -pair[0])


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_with_beams_enough_it_is_an_enumeration(tiny, penalty, early_stopping):
    prompts = [[1, 3, 0], [3]]
    tokens, scores = beam_search(
        *tiny,
        prompts,
        max_new_tokens=4,
        eos_id=EOS,
        num_beams=121,
        num_return=121,
        length_penalty=penalty,
        early_stopping=early_stopping,
        pad_id=-1,
    )
    for row, prompt in enumerate(prompts):
        expected = _enumerate(*tiny, prompt, 4, penalty)
        assert len(expected) == 121
        np.testing.assert_allclose(scores[row], [value for value, _ in expected], rtol=1e-5)
        for place in range(5):
            way = expected[place][1]
            np.testing.assert_array_equal(tokens[row, place], [*way, *[-1] * (4 - len(way))])


def test_one_beam_is_greedy(gpt, full_pass):
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7], [11]]
    expected = generate(*gpt, prompts, max_new_tokens=9)
    common = int(np.bincount(expected.ravel()).argmax())  # A token that does occur ends rows.
    for eos in (None, common):
        expected = generate(*gpt, prompts, max_new_tokens=9, eos_id=eos, pad_id=-1)
        tokens, _ = beam_search(*gpt, prompts, max_new_tokens=9, eos_id=eos, num_beams=1, pad_id=-1)
        np.testing.assert_array_equal(tokens[:, 0], expected)


def test_scores_count_new_tokens_alone_and_are_those_of_the_full_pass(gpt):
    prompts = [[5, 6, 7, 8, 9], [11]]
    for penalty in (0.0, 0.7, 2.0):
        tokens, scores = beam_search(
            *gpt, prompts, max_new_tokens=6, eos_id=4, num_beams=4, num_return=4, length_penalty=penalty, pad_id=-1
        )
        assert (np.diff(scores, axis=1) <= 0).all()
        for beam in range(4):
            ways = [row[row >= 0] for row in tokens[:, beam]]
            found = score(*gpt, prompts, ways)
            np.testing.assert_allclose(scores[:, beam], found.log_probs / found.lengths**penalty, rtol=1e-4)


def test_more_beams_find_nothing_worse(tiny):
    best = [
        beam_search(*tiny, [[1, 3, 0], [3]], max_new_tokens=4, eos_id=EOS, num_beams=beams, early_stopping=False).scores
        for beams in (1, 121)
    ]
    assert (best[1] >= best[0] - 1e-6).all()


@pytest.mark.slow
def test_rows_do_not_depend_on_their_batch_mates(translator):
    sources, starts = [[3, 4, 5, 6], [7], [8, 9]], [[1], [1], [1, 5]]
    options = {"max_new_tokens": 7, "eos_id": 0, "num_beams": 3, "num_return": 2, "pad_id": -1}
    together = beam_search(*translator, starts, sources=sources, **options)
    for row in range(3):
        alone = beam_search(*translator, starts[row : row + 1], sources=sources[row : row + 1], **options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-5)
    assert len({tuple(row[0]) for row in together.tokens}) > 1, "rows that are equal would prove little"


def test_an_encoder_decoder_generates_what_full_passes_say(translator):
    model, params = translator
    sources, starts = [[3, 4, 5, 6], [7]], [[1], [1, 2]]
    out = generate(model, params, starts, sources=sources, max_new_tokens=5)
    beams = beam_search(model, params, starts, sources=sources, max_new_tokens=5, eos_id=None, num_beams=1)
    np.testing.assert_array_equal(beams.tokens[:, 0], out)
    run = jax.jit(lambda tokens, source: model.apply({"params": params}, tokens, source=source).logits[0])
    for row in range(2):
        ids = [*starts[row]]
        for _ in range(5):
            # What stands behind a token does not reach it: one width serves every length.
            logits = run(jnp.asarray([[*ids, *[0] * (8 - len(ids))]]), jnp.asarray([sources[row]]))
            ids.append(int(logits[len(ids) - 1].argmax()))
        np.testing.assert_array_equal(out[row], ids[len(starts[row]) :])
    scored = score(model, params, starts, out, sources=sources)
    np.testing.assert_allclose(scored.log_probs / 5, beams.scores[:, 0], rtol=1e-5)


def test_places_without_a_continuation_are_empty(tiny):
    model, params = tiny
    # Of one new token there are four.
    tokens, scores = beam_search(
        model, params, [[1]], max_new_tokens=1, eos_id=EOS, num_beams=6, num_return=6, pad_id=7
    )
    assert np.isfinite(scores[0]).tolist() == [True] * 4 + [False] * 2
    np.testing.assert_array_equal(tokens[0, 4:], 7)
    np.testing.assert_allclose(np.exp(scores[0, :4]).sum(), 1, rtol=1e-5)


def test_ids_beyond_a_smaller_vocabulary_are_never_chosen(gpt):
    tokens, scores = beam_search(*gpt, [[5, 6]], max_new_tokens=5, eos_id=None, num_beams=3, num_return=3, vocab_size=6)
    assert tokens.max() < 6
    found = score(*gpt, [[5, 6]], tokens[:, 0], vocab_size=6)
    np.testing.assert_allclose(found.log_probs / 5, scores[:, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 must be an integer of at least 1"),
        ({"num_return": 3, "num_beams": 2}, "num_return=3 must be at most num_beams=2"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
        ({"sources": [[1]]}, "sources were given, but the model has no separate encoder"),
        ({"eos_id": 99}, r"eos_id=99 must be an integer in \[0, 23\)"),
        ({"max_new_tokens": 40}, "the model has max_length=40 positions"),
    ],
)
def test_wrong_arguments_are_refused_by_name(gpt, changes, message):
    with pytest.raises(ValueError, match=message):
        beam_search(*gpt, [[5, 6]], **{"max_new_tokens": 3, "eos_id": 1, **changes})


def test_sources_are_checked(translator):
    with pytest.raises(ValueError, match="sources is None; an encoder-decoder needs one for each prompt"):
        generate(*translator, [[1]], max_new_tokens=2)
    with pytest.raises(ValueError, match="sources has 2 rows; it must have 1"):
        generate(*translator, [[1]], sources=[[1], [2]], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"sources\[0\] holds the id 11; ids must be in \[0, 11\)"):
        beam_search(*translator, [[1]], sources=[[11]], max_new_tokens=2, eos_id=0)
    with pytest.raises(ValueError, match="continuations has 2 rows; it must have 1"):
        score(*translator, [[1]], [[1], [2]], sources=[[3]])
