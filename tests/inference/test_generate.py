import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import generate, stream
from jaxformer.models import Transformer

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7], [11]]


def greedy_by_full_pass(full_pass, model, params, prompt, num_tokens, penalty=1.0):
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = np.array(full_pass(model, params, ids))
        for token in set(ids):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        ids.append(int(np.argmax(logits)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"positions": "rotary", "num_kv_heads": 1, "norm": "rms", "activation": "swiglu", "use_bias": False},
        {"positions": "alibi", "scan_layers": False},
        pytest.param({"positions": "relative", "tie_embeddings": False}, marks=pytest.mark.slow),
        pytest.param({"positions": "sinusoidal", "norm_placement": "post"}, marks=pytest.mark.slow),
    ],
    ids=lambda fields: fields.get("positions", "learned"),
)
def test_greedy_tokens_of_unequal_prompts_are_those_of_full_passes_one_by_one(make_gpt, full_pass, fields):
    model, params = make_gpt(**fields)
    out = generate(model, params, PROMPTS, max_new_tokens=7)
    expected = [greedy_by_full_pass(full_pass, model, params, prompt, 7) for prompt in PROMPTS]
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == np.int32
    assert len({tuple(row) for row in expected}) > 1, "rows that are equal would prove little"


def test_repetition_penalty_counts_prompt_and_output(gpt, full_pass):
    out = generate(*gpt, PROMPTS, max_new_tokens=9, repetition_penalty=3.0)
    expected = [greedy_by_full_pass(full_pass, *gpt, prompt, 9, penalty=3.0) for prompt in PROMPTS]
    np.testing.assert_array_equal(out, expected)
    assert (out != generate(*gpt, PROMPTS, max_new_tokens=9)).any()


def test_last_position_of_the_model_can_be_reached(gpt, full_pass):
    prompt = [n % 23 for n in range(33)]
    out = generate(*gpt, [prompt], max_new_tokens=7)
    np.testing.assert_array_equal(out[0], greedy_by_full_pass(full_pass, *gpt, prompt, 7))


def test_arrays_and_lists_of_prompts_mean_the_same(gpt):
    lists = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    expected = generate(*gpt, lists, max_new_tokens=5)
    for prompts in (np.array(lists), jnp.asarray(lists), [np.array(row, np.uint8) for row in lists], tuple(lists)):
        np.testing.assert_array_equal(generate(*gpt, prompts, max_new_tokens=5), expected)


def test_rows_do_not_depend_on_their_batch_mates(gpt):
    options = {"max_new_tokens": 13, "temperature": 1.0, "rng": jax.random.key(5)}
    batch = generate(*gpt, PROMPTS, **options)
    np.testing.assert_array_equal(batch[1], generate(*gpt, [[1, 2], PROMPTS[1], [3]], **options)[1])
    # A mate that is long enough to change the size of everything.
    with_long_mate = generate(*gpt, [PROMPTS[0], [1] * 19], **options)
    np.testing.assert_array_equal(batch[0], with_long_mate[0])
    np.testing.assert_array_equal(batch[0], generate(*gpt, [PROMPTS[0]], **options)[0])


def test_rows_and_seeds_draw_differently(gpt):
    out = generate(*gpt, [[5, 6, 7]] * 3, max_new_tokens=16, temperature=2.0, rng=jax.random.key(5))
    other = generate(*gpt, [[5, 6, 7]] * 3, max_new_tokens=16, temperature=2.0, rng=jax.random.key(6))
    assert len({tuple(row) for row in [*out, *other]}) == 6
    assert len(set(out[0])) > 3, "steps must draw differently, too"


def test_tokens_of_top_1_and_of_a_tiny_temperature_are_greedy(gpt):
    expected = generate(*gpt, PROMPTS, max_new_tokens=9)
    rng = jax.random.key(0)
    for options in ({"temperature": 1e-42}, {"temperature": 3.0, "top_k": 1, "top_p": 0.9, "min_p": 0.1}):
        np.testing.assert_array_equal(generate(*gpt, PROMPTS, max_new_tokens=9, rng=rng, **options), expected)


def test_finished_rows_emit_padding_only(gpt):
    free = generate(*gpt, PROMPTS, max_new_tokens=16)
    eos_id = int(free[0, 4])
    expected = free.copy()
    for row in expected:
        hits = np.flatnonzero(row == eos_id)
        if hits.size:
            row[hits[0] + 1 :] = -1
    out = generate(*gpt, PROMPTS, max_new_tokens=16, eos_id=eos_id, pad_id=-1)
    np.testing.assert_array_equal(out, expected)
    assert 0 < (out == -1).sum() < out.size


def test_padded_rows_of_the_vocabulary_are_never_sampled(make_gpt):
    model, params = make_gpt(vocab_size=5, vocab_multiple=8)
    silent = jax.tree.map(jnp.zeros_like, params)
    out = generate(model, silent, [[1]] * 625, max_new_tokens=16, temperature=1.0, rng=jax.random.key(0))
    counts = np.bincount(out.ravel(), minlength=8)
    assert counts[5:].sum() == 0
    # 10,000 draws, each token with probability 1/5: four standard deviations are 160.
    np.testing.assert_allclose(counts[:5], 2000, atol=160)


class Counted(Transformer):
    """A Transformer that counts how often it is traced."""

    traces = 0

    def __call__(self, *args, **kwargs):
        Counted.traces += 1
        return super().__call__(*args, **kwargs)


def test_compilations_are_bounded_by_buckets_of_length(gpt):
    model, params = Counted(gpt[0].config), gpt[1]
    Counted.traces = 0
    options = {"temperature": 0.7, "rng": jax.random.key(0), "eos_id": None, "pad_id": 0}
    for length in range(1, 21):
        generate(model, params, [[1] * length], max_new_tokens=16, **options)
    # Widths of 16 and 32 tokens, for each a pass over the prompt and a loop over new tokens.
    assert Counted.traces == 4
    changed = {"temperature": 1.3, "rng": jax.random.key(1), "eos_id": 3, "pad_id": 5}
    for max_new_tokens, change in zip((1, 2, 9, 15), changed):
        generate(model, params, [[1, 2]], max_new_tokens=max_new_tokens, **{**options, change: changed[change]})
    assert Counted.traces == 4


def test_recurrent_models_generate_through_the_same_interface(recurrent):
    prompts = [[1, 2, 3], [10]]
    state = {"averages": {"offset": jnp.asarray(4, jnp.int32)}}
    out = generate(recurrent, {}, prompts, max_new_tokens=5, model_state=state)
    for row, prompt in zip(out, prompts):
        ids = list(prompt)
        for _ in range(5):
            ids.append((sum(ids) + 4) % 23)
        np.testing.assert_array_equal(row, ids[len(prompt) :])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty.*bos_id"),
        ({"prompts": [1, 2]}, r"prompts\[0\]=1 must be a sequence"),
        ({"prompts": np.array([1, 2])}, r"shape \(2,\).*\[batch, length\]"),
        ({"prompts": "text"}, "encode texts first"),
        ({"prompts": ["text"]}, r"prompts\[0\]='text'"),
        ({"prompts": [[1.0]]}, "float64; token ids must be integers"),
        ({"prompts": [[True]]}, "bool; token ids must be integers"),
        ({"prompts": [[1], [2, 23]]}, r"prompts\[1\] holds the id 23; ids must be in \[0, 23\)"),
        ({"prompts": [[-1]]}, "holds the id -1"),
        ({"prompts": [[1] * 36]}, "36 tokens and max_new_tokens=5, together 41.*max_length=40"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1.0}, "needs a PRNG key"),
        ({"temperature": 1.0, "rng": jax.random.PRNGKey(0)}, "rng must be one typed key"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"eos_id": 23}, r"eos_id=23 must be an integer in \[0, 23\)"),
        ({"pad_id": 2**31}, "pad_id=2147483648"),
    ],
    ids=lambda value: (
        "-".join(f"{name}={str(given)[:20]}" for name, given in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_wrong_input_is_refused_by_name(gpt, changed, message):
    model, params = gpt
    options = {"prompts": [[1, 2]], "max_new_tokens": 5, **changed}
    prompts = options.pop("prompts")
    with pytest.raises(ValueError, match=message):
        generate(model, params, prompts, **options)


def test_models_that_do_not_decode_are_refused(make_gpt):
    model, params = make_gpt(architecture="encoder")
    with pytest.raises(ValueError, match="no decoder"):
        generate(model, params, [[1]], max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 50.0}, {"temperature": 50.0, "top_k": 9, "top_p": 0.99}])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_ids_beyond_a_smaller_vocabulary_are_never_chosen(gpt, settings, penalty):
    settings = {**settings, "max_new_tokens": 15, "rng": jax.random.key(3), "repetition_penalty": penalty}
    prompts = [[22, 6, 7], [11], *[[3]] * 5]
    assert generate(*gpt, prompts, **settings).max() >= 5, "a limit that is kept anyway would prove nothing"
    tokens = generate(*gpt, prompts, vocab_size=5, **settings)
    assert tokens.min() >= 0
    assert tokens.max() < 5
    np.testing.assert_array_equal(np.transpose(list(stream(*gpt, prompts, vocab_size=5, **settings))), tokens)


def test_vocabulary_to_choose_from_is_checked(gpt):
    expected = generate(*gpt, PROMPTS, max_new_tokens=3)
    np.testing.assert_array_equal(generate(*gpt, PROMPTS, max_new_tokens=3, vocab_size=23), expected)
    for size, message in ((24, "vocab_size=24 must be at most the model's 23"), (0, "vocab_size=0")):
        with pytest.raises(ValueError, match=message):
            generate(*gpt, PROMPTS, max_new_tokens=3, vocab_size=size)
