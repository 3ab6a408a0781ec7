import collections

import numpy as np
import pytest

from jaxformer.data import TASKS, SymbolTokenizer, load_algorithmic_data, load_tokenizer, train_batches
from jaxformer.data.sources import data_loader


def _sum(question):
    left, right = (text.split() for text in question.split("+"))
    total = sum(int("".join(reversed(number))) for number in (left, right))
    return " ".join(reversed(str(total).zfill(len(left) + 1)))


ORACLES = {
    "copy": lambda question: question,
    "reverse": lambda question: " ".join(reversed(question.split())),
    "sort": lambda question: " ".join(sorted(question.split(), key=int)),
    "addition": _sum,
    "duplicate": lambda question: question.removeprefix("0 ").removesuffix(" 0"),
    "parity": lambda question: "odd" if question.split().count("1") % 2 else "even",
}


def _read(data, batch):
    """(question, answer) of each row as text, the answer's targets standing where they are predicted."""
    names = data.tokenizer.symbols
    for tokens, targets, mask in zip(batch["tokens"], batch["targets"], batch["key_mask"]):
        places = np.flatnonzero(targets != -100)
        assert (np.diff(places) == 1).all()
        # One shift: what is a target here is the next token.
        assert (tokens[places[1:]] == targets[places[:-1]]).all()
        assert mask.sum() == places[-1] + 2
        assert mask[: places[-1] + 2].all()
        yield [names[token] for token in tokens[: places[0] + 1]], [names[token] for token in targets[places]]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_answer_is_right_and_alone_is_scored(name):
    data = load_algorithmic_data(name=name, max_length=7, test_lengths=(3, 11))
    rows = [*_read(data, data.train_rows.batch(5, np.arange(40)))]
    for bucket in data.buckets.values():
        rows += _read(data, bucket.batch(np.arange(20)))
    for question, answer in rows:
        if TASKS[name].ends:
            assert answer.pop() == "<end>"
        if name != "duplicate":
            assert question.pop() == "="
        assert " ".join(answer) == ORACLES[name](" ".join(question))
        assert len(question) > 0


def test_answers_to_stated_questions():
    stated = {
        "addition": ([9, 5, 0, 9, 7, 0], "9 5 0 + 9 7 0 =", "8 3 1 0"),  # 59 + 79 = 138
        "sort": ([4, 1, 4, 0], "4 1 4 0 =", "0 1 4 4"),
        "duplicate": ([3, 126], "0 4 127 0", "4 127"),
        "parity": ([1, 0, 1], "1 -1 1 0 0 =", "even"),
    }
    for name, (numbers, question, answer) in stated.items():
        data = load_algorithmic_data(name=name, max_length=5, test_lengths=())
        rows = data.train_rows
        length = len(numbers) // (2 if name == "addition" else 1)
        found = TASKS[name].example(np.array([*numbers, 0, 0, 0], np.uint64), length, rows.size)
        assert [data.tokenizer.decode(ids) for ids in found] == [question, answer]


def test_examples_depend_on_seed_and_index_alone():
    rows = load_algorithmic_data(name="reverse", max_length=9).train_rows
    indices = np.array([0, 7, 2**40, 3, 2**63 - 1])
    together = rows.batch(4, indices)
    for place, index in enumerate(indices):
        alone = rows.batch(4, np.array([index]))
        for name, values in together.items():
            np.testing.assert_array_equal(values[place], alone[name][0])
    others = {rows.batch(seed, np.arange(20))["tokens"].tobytes() for seed in range(5)}
    assert len(others) == 5


def test_the_examples_of_a_seed_are_fixed():
    # Stated as numbers: a run resumed after an upgrade must go on with the same examples.
    rows = load_algorithmic_data(name="copy", max_length=6).train_rows
    assert [rows.example(0, index)[0].tolist() for index in range(2)] == [[5, 6, 10], [8, 2, 2, 9, 1, 3, 10]]


def test_lengths_and_symbols_are_uniform():
    rows = load_algorithmic_data(name="copy", min_length=3, max_length=7, num_symbols=5).train_rows
    words = [rows.example(1, index)[0][:-1] for index in range(2000)]
    lengths = collections.Counter(map(len, words))
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert all(330 < count < 470 for count in lengths.values())  # 400 ± 4 standard deviations
    symbols = np.bincount(np.concatenate(words), minlength=5) / sum(map(len, words))
    np.testing.assert_allclose(symbols, 0.2, atol=0.02)


def test_validation_and_tests_are_other_examples_whatever_the_training_seed():
    data = load_algorithmic_data(name="copy", min_length=15, max_length=20, test_lengths=(20, 31))
    drawn = [data.train_rows.batch(seed, np.arange(200))["tokens"] for seed in (0, 1)]
    sides = [*drawn, data.validation_rows.batch(np.arange(100)), data.buckets["length_20"].batch(np.arange(100))]
    rows = [row.tobytes() for side in sides for row in (side if isinstance(side, np.ndarray) else side["tokens"])]
    assert len(set(rows)) == len(rows)
    again = load_algorithmic_data(name="copy", min_length=15, max_length=20, test_lengths=(31,))
    expected, found = (other.buckets["length_31"].batch(np.arange(5)) for other in (data, again))
    np.testing.assert_array_equal(expected["tokens"], found["tokens"])
    assert set(data.buckets) == {"length_20", "length_31"}
    assert (data.buckets["length_31"].length, data.max_length, data.train_rows.length) == (64, 64, 42)


def test_rows_after_the_last_are_padding_alone():
    data = load_algorithmic_data(name="sort", max_length=5, test_lengths=(5,), test_examples=3)
    batch = data.buckets["length_5"].batch(np.array([2, 3, 9]))
    assert (batch["targets"][0] != -100).sum() == 6
    assert (batch["targets"][1:] == -100).all()
    assert not batch["key_mask"][1:].any()
    assert (batch["tokens"][1:] == data.tokenizer.pad_id).all()


def test_a_stream_goes_on_exactly_from_a_saved_position():
    rows = load_algorithmic_data(name="addition", max_length=4).train_rows
    straight = train_batches(rows, batch_size=6, seed=3)
    expected = [next(straight) for _ in range(7)]
    stopped = train_batches(rows, batch_size=6, seed=3)
    for _ in range(4):
        next(stopped)
    state = stopped.get_state()
    resumed = train_batches(rows, batch_size=6, seed=3, prefetch=0)
    resumed.set_state(state)
    for batch in expected[4:]:
        found = next(resumed)
        for name, values in batch.items():
            np.testing.assert_array_equal(found[name], values)


def test_parts_of_processes_make_up_the_batch():
    rows = load_algorithmic_data(name="copy", max_length=4).train_rows
    whole = train_batches(rows, batch_size=6, seed=3)
    parts = [train_batches(rows, batch_size=6, seed=3, process_index=i, process_count=3) for i in range(3)]
    for _ in range(3):
        found = np.concatenate([next(part)["tokens"] for part in parts])
        np.testing.assert_array_equal(found, next(whole)["tokens"])


def test_the_hash_follows_everything_that_training_reads():
    changes = [{}, {"max_length": 9}, {"min_length": 2}, {"num_symbols": 7}, {"length": 50}, {"name": "reverse"}]
    hashes = {load_algorithmic_data(**change).hash for change in changes}
    assert len(hashes) == len(changes)
    assert load_algorithmic_data().hash == load_algorithmic_data(test_lengths=(3,), test_seed=5).hash


def test_symbols_are_written_and_read_again(tmp_path):
    tokenizer = load_algorithmic_data(name="parity", max_length=3).tokenizer
    assert tokenizer.encode(" 1 -1  0 = odd") == [1, 2, 0, 3, 5]
    assert tokenizer.decode([2, 2, 3, 4, tokenizer.pad_id]) == "-1 -1 = even"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path) == tokenizer
    with pytest.raises(ValueError, match="'7' is none of the symbols"):
        tokenizer.encode("1 7")
    with pytest.raises(ValueError, match="different names"):
        SymbolTokenizer(("a", "b", "a"), pad_id=0)
    with pytest.raises(ValueError, match="eos_id is 2, must be in 0 to 1"):
        SymbolTokenizer(("a", "b"), pad_id=0, eos_id=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "sorting"}, "name is 'sorting'; must be one of copy"),
        ({"min_length": 0}, "min_length is 0"),
        ({"min_length": 9, "max_length": 8}, "min_length is 9 and max_length 8"),
        ({"test_lengths": (3, 0)}, "test_lengths holds 0"),
        ({"num_symbols": 2}, "num_symbols is 2, must be at least 3"),
        ({"name": "parity", "num_symbols": 4}, "parity has symbols of its own"),
        ({"length": 41}, "length is 41, must be at least the 42 tokens of the longest copy"),
        ({"test_examples": 0}, "test_examples is 0"),
        ({"test_seed": -1}, "test_seed is -1"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load_algorithmic_data(**change)


def test_names_choose_their_loader():
    assert data_loader("sort") is load_algorithmic_data
    assert data_loader("digits").__name__ == "load_pixel_data"
    assert data_loader("python_stdlib").__name__ == "load_language_model_data"
