"""The draw: its distribution, its edges and what it must never return."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import check_sampling, sample_logits

DRAWS = 10_000
draw = jax.jit(sample_logits, static_argnames=("temperature", "top_k", "top_p", "min_p", "vocab_size"))


def draw_many(row, **options):
    """Tokens of DRAWS rows with the same logits."""
    logits = jnp.broadcast_to(jnp.asarray(row)[None], (DRAWS, len(row)))
    return np.asarray(draw(jax.random.key(7), logits, **options))


def probabilities_of(row, temperature=1.0):
    row = np.asarray(row, np.float64) / temperature
    return np.exp(row - row.max()) / np.exp(row - row.max()).sum()


def assert_drawn_from(tokens, probabilities):
    """Chi-square over bins of at least 20 expected draws, five standard deviations wide; nothing where p is 0."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * tokens.size
    common = expected >= 20
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    kept = expected > 1
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic < kept.sum() + 5 * np.sqrt(2 * kept.sum())


@pytest.mark.parametrize(
    ("temperature", "size"), [(1.0, 3), (0.7, 256), (1.0, 257), (2.5, 257), (0.7, 700), (2.5, 700)]
)
def test_tokens_are_drawn_from_the_softmax(size, temperature):
    row = np.random.default_rng(size).normal(size=size).astype(np.float32) * 2
    assert_drawn_from(draw_many(row, temperature=temperature), probabilities_of(row, temperature))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_are_drawn_from_as_they_are(dtype):
    row = jnp.asarray(np.random.default_rng(0).normal(size=11), dtype)
    assert_drawn_from(draw_many(row), probabilities_of(row.astype(jnp.float32)))


def test_rare_tokens_behind_a_likely_one_keep_their_share():
    """300 tokens of 1 in 100,000 each: together 0.3 %, about 30 of the draws."""
    probabilities = np.full(601, 1e-5)
    probabilities[301:] = 0
    probabilities[17] = 1 - probabilities.sum() + probabilities[17]
    row = np.where(probabilities > 0, np.log(np.maximum(probabilities, 1e-30)), -np.inf).astype(np.float32)
    tokens = draw_many(row)
    assert 10 <= (tokens != 17).sum() <= 60
    assert tokens.max() < 301


def test_cuts_combine_in_order():
    """top_k to .5 .25 .15, top_p then counts shares of what is left (.556 .278 .167), min_p shares of the highest."""
    row = np.log([0.5, 0.25, 0.15, 0.1]).astype(np.float32)
    assert set(draw_many(row, top_k=3)) == {0, 1, 2}
    assert set(draw_many(row, top_k=3, top_p=0.82)) == {0, 1}
    assert set(draw_many(row, top_p=0.82)) == {0, 1, 2}
    assert set(draw_many(row, top_k=3, min_p=0.4)) == {0, 1}
    np.testing.assert_allclose(np.bincount(draw_many(row, top_k=2)) / DRAWS, [2 / 3, 1 / 3], atol=0.025)


def test_temperature_acts_before_the_nucleus():
    row = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    assert set(draw_many(row, top_p=0.6)) == {0, 1}
    assert set(draw_many(row, top_p=0.6, temperature=0.2)) == {0}
    assert set(draw_many(row, top_p=0.6, temperature=5.0)) == {0, 1, 2}


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0, 0.0])
def test_temperature_zero_takes_the_highest_logit_without_a_key(options, temperature):
    logits = jnp.array([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [-jnp.inf, -jnp.inf, -4.0]])
    tokens = sample_logits(None, logits, temperature=float(temperature), **options)
    np.testing.assert_array_equal(tokens, [1, 0, 2])
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, temperature) for temperature in (0.01, 1e-30, 1e-45, 1e-300)]
    + [(options, 1e-45) for options in ({"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1})],
)
def test_tiny_temperatures_with_large_logits_stay_finite(rng, temperature, options):
    logits = jnp.array([[1000.0, 999.0, 0.0], [3e38, 0.0, -3e38], [-1e30, -2e30, -jnp.inf]])
    np.testing.assert_array_equal(draw(rng, logits, temperature=temperature, **options), [0, 0, 0])


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.5}])
@pytest.mark.parametrize("content", [0.0, 90.0, np.nan, np.inf])
def test_padded_vocabulary_is_never_drawn(options, content):
    row = np.zeros(8, np.float32)
    row[5:] = content
    tokens = draw_many(row, vocab_size=5, **options)
    assert set(tokens) <= set(range(5))
    if options.get("top_p") is None:
        assert set(tokens) == set(range(5))
    assert draw(None, row[None], temperature=0.0, vocab_size=5) == 0


def test_padding_the_vocabulary_changes_no_draw(rng):
    logits = 2 * jax.random.normal(rng, (5, 300))
    padded = jnp.pad(logits, ((0, 0), (0, 212)), constant_values=99.0)
    np.testing.assert_array_equal(draw(rng, padded, vocab_size=300), draw(rng, logits))


def test_excluded_tokens_are_never_drawn():
    row = np.where(np.arange(600) % 3 == 1, 0.0, -np.inf).astype(np.float32)
    tokens = draw_many(row)
    assert (tokens % 3 == 1).all()
    assert len(set(tokens)) == 200


def test_a_row_without_any_token_still_gives_one_in_range(rng):
    tokens = draw(rng, jnp.full((2, 5), -jnp.inf), top_p=0.5, min_p=0.5)
    assert ((tokens >= 0) & (tokens < 5)).all()


def test_one_candidate_is_the_greedy_choice(rng):
    logits = jnp.round(2 * jax.random.normal(rng, (40, 9)))
    greedy = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(draw(None, logits, temperature=0.0), greedy)
    np.testing.assert_array_equal(draw(rng, logits, top_k=1), greedy)
    np.testing.assert_array_equal(draw(rng, logits, top_p=1e-9), greedy)


def test_top_k_from_the_vocabulary_size_on_cuts_nothing(rng):
    logits = jax.random.normal(rng, (50, 9))
    for top_k in (9, 10, 10**6):
        np.testing.assert_array_equal(draw(rng, logits, top_k=top_k), draw(rng, logits))


def test_the_same_key_draws_the_same_and_others_differ(rng):
    logits = jnp.zeros((3, 1000))
    first, again = draw(rng, logits), draw(rng, logits)
    np.testing.assert_array_equal(first, again)
    assert len(set(first.tolist())) > 1
    assert not np.array_equal(first, draw(jax.random.fold_in(rng, 1), logits))


@pytest.mark.slow
def test_with_a_key_per_row_a_row_draws_alone_what_it_draws_in_a_batch(rng):
    keys = jax.random.split(rng, 5)
    logits = jax.random.normal(rng, (5, 400))
    together = draw(keys, logits, top_p=0.9)
    alone = [draw(keys[i : i + 1], logits[i : i + 1], top_p=0.9)[0] for i in range(5)]
    mapped = jax.vmap(lambda key, row: draw(key[None], row[None], top_p=0.9)[0])(keys, logits)
    np.testing.assert_array_equal(together, jnp.stack(alone))
    np.testing.assert_array_equal(together, mapped)


def test_a_traced_temperature_serves_every_value_with_one_compilation(rng):
    logits = 3 * jax.random.normal(rng, (4, 300))
    traces = []

    @jax.jit
    def draw_at(temperature):
        traces.append(temperature)
        return sample_logits(rng, logits, temperature=temperature, top_p=0.9)

    for temperature in (0.3, 4.0):
        expected = draw(rng, logits, temperature=temperature, top_p=0.9)
        np.testing.assert_array_equal(draw_at(jnp.float32(temperature)), expected)
    np.testing.assert_array_equal(draw_at(jnp.float32(1e-30)), jnp.argmax(logits, axis=-1))
    assert len(traces) == 1


def test_float64_logits_work():
    with jax.enable_x64(True):
        logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]] * 3, jnp.float64))
        tokens = sample_logits(jax.random.key(0), logits, top_k=2, top_p=0.5, min_p=0.5, temperature=0.5)
        np.testing.assert_array_equal(tokens, [0, 0, 0])
        assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_values_that_no_rule_can_follow_are_refused_by_name(rng, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        check_sampling(**{name: value})
    if name != "repetition_penalty":
        with pytest.raises(ValueError, match=name):
            sample_logits(rng, jnp.zeros((2, 3)), **{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["1", True, [0.5], 1j], ids=str)
def test_values_that_are_no_numbers_are_refused_by_name(name, value):
    check = inspect.unwrap(check_sampling)  # as users have it, without the tests' check of types
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a number"):
        check(**{name: value})
    check(**{name: np.float32(0.5)})


def test_values_at_the_edge_of_their_range_are_accepted():
    check_sampling(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, repetition_penalty=0.5)
    check_sampling(min_p=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rng": None}, "rng is None; a temperature above 0 needs"),
        ({"rng": jnp.zeros(2, jnp.uint32)}, "rng is uint32"),
        (
            {"rng": jax.random.split(jax.random.key(0), 3)},
            r"\(3,\); a temperature above 0 needs one jax.random.key, or 2",
        ),
        ({"logits": jnp.zeros(3)}, r"logits have shape \(3,\)"),
        ({"logits": np.zeros((2, 3), int)}, "logits is int"),
        ({"vocab_size": 4}, "vocab_size is 4"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    defaults = {"rng": jax.random.key(0), "logits": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=message):
        sample_logits(**(defaults | arguments))
