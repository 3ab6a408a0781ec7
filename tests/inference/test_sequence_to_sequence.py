"""Generation from sources, by the Transformer and by the recurrent model: caches, padding, rows among themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import beam_search, generate, score, stream
from jaxformer.models import encoder_decoder, recurrent

EOS, PAD = 2, -1
SOURCE = jnp.array([[3, 4, 5, 6], [7, 8, 0, 0]])
MASK = jnp.array([[True] * 4, [True, True, False, False]])
TOKENS = jnp.array([[1, 9, 10, 2, 5, 4, 3], [1, 3, 3, 8, 2, 6, 9]])
SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16, "init_stddev": 0.6}
MAKERS = {
    "transformer": functools.partial(encoder_decoder, **SHAPE),
    "recurrent": functools.partial(recurrent, embed_dim=8, hidden_dim=8, init_stddev=1.0),
}
both = pytest.mark.parametrize("name", MAKERS)


def first(name):
    """That model in every run, the other with the slow tests."""
    cases = [pytest.param(other, marks=() if other == name else pytest.mark.slow) for other in MAKERS]
    return pytest.mark.parametrize("name", cases)


@functools.cache
def make(name):
    model = MAKERS[name](vocab_size=11)
    params = jax.jit(lambda key: model.init(key, SOURCE, source=SOURCE))(jax.random.key(5))["params"]
    return model, jax.tree.map(lambda leaf: 2 * leaf, params)


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, given):
    return model.apply({"params": params}, tokens, **given)


@functools.partial(jax.jit, static_argnums=0)
def _start(model, params):
    return model.apply({"params": params}, SOURCE, 9, source_mask=MASK, method="start")


@pytest.mark.slow
@both
@pytest.mark.parametrize("split", [(1,) * 7, (3, 1, 1, 1, 1), (2, 2, 3)], ids=str)
def test_cached_logits_are_those_of_the_full_pass(name, split):
    model, params = make(name)
    expected = _apply(model, params, TOKENS, {"source": SOURCE, "source_mask": MASK}).logits
    cache, start, pieces = _start(model, params), 0, []
    for size in split:
        out = _apply(model, params, TOKENS[:, start : start + size], {"cache": cache})
        cache, start = out.aux.cache, start + size
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=1e-5)


@pytest.mark.slow
@both
def test_left_padded_targets_are_read_as_if_alone(name):
    """Positions of the short row are 0, 1, 2 on its real tokens, and its next one is 3."""
    model, params = make(name)
    padded = jnp.array([[5, 6, 7, 8, 9], [0, 0, 5, 6, 7]])
    real = jnp.array([[True] * 5, [False, False, True, True, True]])
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    given = {"positions": positions, "key_mask": real, "cache": _start(model, params)}
    out = _apply(model, params, padded, given)
    last = jnp.array([[4], [4]])
    further = _apply(model, params, last, {"positions": jnp.array([[5], [3]]), "cache": out.aux.cache})
    # Both rows at the left, each with the token that follows it.
    alone = jnp.array([[5, 6, 7, 8, 9, 4, 0], [5, 6, 7, 4, 0, 0, 0]])
    expected = _apply(model, params, alone, {"source": SOURCE, "source_mask": MASK}).logits
    np.testing.assert_allclose(out.logits[0], expected[0, :5], atol=1e-5)
    np.testing.assert_allclose(out.logits[1, 2:], expected[1, :3], atol=1e-5)
    np.testing.assert_allclose(further.logits[:, 0], expected[jnp.arange(2), jnp.array([5, 3])], atol=1e-5)


def _ends(row):
    """Tokens of a row up to the one that ends it, and whether only padding follows."""
    hits = np.flatnonzero(row == EOS)
    length = hits[0] + 1 if hits.size else row.size
    return length, (row[length:] == PAD).all() and (row[:length] != PAD).all()


@first("transformer")
def test_sampled_rows_ignore_their_mates_end_in_padding_and_stop_together(name):
    model, params = make(name)
    options = {"eos_id": EOS, "pad_id": PAD, "temperature": 1.5, "rng": jax.random.key(3), "max_new_tokens": 12}
    starts, sources = [[1], [1, 5], [1], [1]], [[3, 4, 5, 6], [7, 8], [9], [10, 3]]
    out = generate(model, params, starts, sources=sources, **options)
    other = generate(
        model, params, [[6, 7, 8], starts[1], [1], [9]], sources=[[9] * 7, sources[1], [4, 4], [5]], **options
    )
    np.testing.assert_array_equal(out[1], other[1])
    assert (out[[0, 2, 3]] != other[[0, 2, 3]]).any(1).all()
    lengths, padded = zip(*map(_ends, out))
    assert all(padded)
    assert len({*lengths}) > 1, "rows of equal length would prove little"
    # As a stream it ends with the longest row.
    columns = list(stream(model, params, starts, sources=sources, **options))
    np.testing.assert_array_equal(np.stack(columns, 1), out[:, : max(lengths)])


@first("recurrent")
def test_beams_ignore_the_mates_of_their_row_and_end_in_padding(name):
    model, params = make(name)
    options = {"eos_id": EOS, "pad_id": PAD, "num_beams": 3, "num_return": 3, "max_new_tokens": 9}
    starts, sources = [[1], [1, 5], [1]], [[3, 4, 5, 6], [7, 8], [9]]
    out = beam_search(model, params, starts, sources=sources, **options)
    other = beam_search(model, params, [[6, 7, 8], starts[1], [9]], sources=[[9] * 7, sources[1], [4, 4]], **options)
    np.testing.assert_array_equal(out.tokens[1], other.tokens[1])
    np.testing.assert_allclose(out.scores[1], other.scores[1], rtol=1e-5)
    assert (out.scores[[0, 2]] != other.scores[[0, 2]]).any(1).all()
    lengths, padded = zip(*map(_ends, out.tokens.reshape(9, -1)))
    assert all(padded)
    assert len({*lengths}) > 1, "continuations of equal length would prove little"


@pytest.mark.slow
@both
def test_rows_are_what_they_are_alone(name):
    model, params = make(name)
    starts, sources = [[1], [1, 5]], [[3, 4, 5, 6], [7, 8]]
    options = {"eos_id": EOS, "pad_id": PAD, "max_new_tokens": 9}
    out = generate(model, params, starts, sources=sources, **options)
    beams = beam_search(model, params, starts, sources=sources, num_beams=3, **options)
    for row in range(2):
        one = {"prompts": starts[row : row + 1], "sources": sources[row : row + 1], **options}
        np.testing.assert_array_equal(generate(model, params, **one)[0], out[row])
        alone = beam_search(model, params, **one, num_beams=3)
        np.testing.assert_array_equal(alone.tokens[0], beams.tokens[row])
        np.testing.assert_allclose(alone.scores[0], beams.scores[row], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 1.0])
@both
def test_with_beams_enough_it_is_an_enumeration(name, penalty):
    """Four tokens, three at most: 13 continuations that end and 27 that do not."""
    model = MAKERS[name](vocab_size=4)
    source, others = [3, 1, 3, 0], (0, 1, 3)
    init = jax.jit(lambda key: model.init(key, SOURCE[:1] * 0, source=SOURCE[:1] * 0))
    params = jax.tree.map(lambda leaf: 2 * leaf, init(jax.random.key(5))["params"])
    ways = [(*way, EOS) for length in range(3) for way in itertools.product(others, repeat=length)]
    ways += itertools.product(others, repeat=3)
    scored = score(model, params, [[1]] * 40, ways, sources=[source] * 40)
    values = scored.log_probs / scored.lengths**penalty
    options = {"max_new_tokens": 3, "eos_id": EOS, "num_beams": 40, "num_return": 40, "pad_id": PAD}
    tokens, scores = beam_search(model, params, [[1]], sources=[source], length_penalty=penalty, **options)
    order = np.argsort(-values)
    np.testing.assert_allclose(scores[0], values[order], rtol=1e-4)
    for row, place in zip(tokens[0, :5], order):
        np.testing.assert_array_equal(row, [*ways[place], *[PAD] * (3 - len(ways[place]))])


@pytest.mark.slow
def test_padded_rows_of_the_vocabulary_are_no_continuations():
    """Five tokens in a table of eight rows, all logits zero."""
    model = MAKERS["transformer"](vocab_size=5, vocab_multiple=8)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), SOURCE, source=SOURCE))["params"]
    assert shapes["token_embedding"]["embedding"].shape[0] == 8
    silent = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    options = {"sources": [[1, 2]], "max_new_tokens": 2}
    tokens, scores = beam_search(model, silent, [[1]], **options, eos_id=None, num_beams=25, num_return=25)
    assert {tuple(way) for way in tokens[0]} == {(a, b) for a in range(5) for b in range(5)}
    np.testing.assert_allclose(scores, -1.6094379, rtol=1e-6)
