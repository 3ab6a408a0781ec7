import collections
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxformer.data import (
    ByteTokenizer,
    MixedPairRows,
    PairRows,
    data_loader,
    eval_batches,
    load_text_task_data,
    mixing_rates,
    train_batches,
)
from jaxformer.data.text_tasks import number_text


def _write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def tasks(tmp_path):
    """A task of each kind; 12, 8, 6 and 5 training pairs."""
    films = [f"film {n} was {'bad' if n % 2 else 'good'}\t{n % 2}" for n in range(12)]
    pairs = [{"premise": f"p{n}", "hypothesis": f"h{n}", "grade": "entails" if n < 4 else None} for n in range(6)]
    lines = [json.dumps({key: value for key, value in pair.items() if value}) for pair in pairs[:4]]
    alike = [f"one {n}\tother {n}\t{score}" for n, score in enumerate(("0.13", "2.5", "4.9", "5", "3.25", "1"))]
    words = {"0": "positive", "1": "negative"}
    numbers = {"train_examples": 8, "validation_examples": 3, "test_examples": 2, "max_length": 4}
    film = {"name": "tsv_labels", "fields": ("0",), "label": "1", "words": words, "prefix": "sentiment: "}
    nli = {"name": "jsonl_labels", "fields": ("premise", "hypothesis"), "label": "grade", "prefix": "nli "}
    sts = {"name": "tsv_labels", "fields": ("0", "1"), "label": "2", "step": 0.2, "prefix": "stsb "}
    return {
        "film": {**film, "train": (_write(tmp_path / "f", films),), "validation": (_write(tmp_path / "v", films[:3]),)},
        "nli": {**nli, **dict.fromkeys(("train", "validation"), (_write(tmp_path / "n", lines),))},
        "sts": {**sts, **dict.fromkeys(("train", "validation"), (_write(tmp_path / "s", alike),))},
        "copy": {"name": "copy_pairs", "numbers": numbers, "prefix": "copy: "},
    }


def _texts(data, split="validation"):
    examples = data.splits[split]
    return {key: (a, b) for key, a, b in zip(examples.labels, examples.source_texts, examples.target_texts)}


def test_each_kind_of_task_becomes_texts_with_its_prefix(tasks):
    data = load_text_task_data(tasks=tasks)
    last = _texts(data)
    assert last["film"] == ("sentiment: film 2 was good", "positive")
    assert last["nli"] == ("nli premise: p3 hypothesis: h3", "entails")
    assert last["sts"] == ("stsb sentence1: one 5 sentence2: other 5", "1.0")
    assert last["copy"][0] == f"copy: {last['copy'][1]}"
    assert set(_texts(data, "test")) == {"copy"}
    assert data.counts == {"training": 12 + 4 + 6 + 8, "validation": 3 + 4 + 6 + 3, "test": 2}
    assert data.tokenizer == ByteTokenizer()
    assert bytes(data.splits["validation"].sources[-1][:-1].tolist()).decode() == last["sts"][0]
    assert data.splits["validation"].targets[-1].tolist() == [*b"1.0", 257]
    parts = load_text_task_data(tasks={"sts": {**tasks["sts"], "parts": ("a ", "b ")}})
    assert _texts(parts)["sts"][0] == "stsb a one 5 b other 5"
    assert "copy 0.267, film 0.400, nli 0.133, sts 0.200" in data.summary
    assert "unigram entropy" in data.baselines


def test_numbers_are_rounded_as_t5_rounds_them():
    given = ["0.13", "2.5", "4.9", "5", "3.25", "2.57", "-0.05", "1e0", " 2.7 "]
    assert [number_text(one, 0.2) for one in given] == ["0.2", "2.4", "4.8", "5.0", "3.2", "2.6", "0.0", "1.0", "2.8"]
    assert number_text("2.6", 1) == "3"
    for wrong in ("nan", "inf", "x", ""):
        with pytest.raises(ValueError, match="is not a number that can be rounded"):
            number_text(wrong, 0.2)


def test_rates_by_hand():
    np.testing.assert_allclose(mixing_rates([10, 30]), [0.25, 0.75])
    np.testing.assert_allclose(mixing_rates([10, 300], limit=30), [0.25, 0.75])
    np.testing.assert_allclose(mixing_rates([100, 900], temperature=2.0), [0.25, 0.75])
    np.testing.assert_allclose(mixing_rates([5, 90], temperature=1e9), [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(mixing_rates([10, 30], weights=[3, 1]), [0.5, 0.5])
    for arguments in (
        {"sizes": []},
        {"sizes": [0, 3]},
        {"sizes": [3], "limit": 0},
        {"sizes": [3], "temperature": 0.5},
        {"sizes": [3], "weights": [1.0, 2.0]},
        {"sizes": [3], "weights": [0.0]},
    ):
        with pytest.raises(ValueError, match="must be"):
            mixing_rates(**arguments)


def _mixed():
    """Tasks of 3, 50 and 7 pairs, of lengths in two groups; an epoch has 4, 10 and 5. Ids tell the pairs apart."""
    owners = np.repeat(np.arange(3), [3, 50, 7])
    lengths = np.where(np.arange(60) % 5 == 0, 12, 5)
    sources = [np.full(length, 100 + pair) for pair, length in enumerate(lengths.tolist())]
    targets = [np.array([100 + pair, 1]) for pair in range(60)]
    return MixedPairRows(PairRows(sources, targets, ((8, 8), (16, 8)), 0), owners, (4, 10, 5))


def test_every_epoch_has_its_share_of_each_task_and_every_pair_comes_equally_often():
    rows = _mixed()
    per_epoch = sum(-(-len(group) // 4) for group in rows.groups)
    batches = train_batches(rows, batch_size=4, seed=3)
    seen, epochs = collections.Counter(), []
    for _epoch in range(21):
        found = []
        for _ in range(per_epoch):
            batch = next(batches)
            given = batch["targets"][:, 0]
            np.testing.assert_array_equal(batch["source"][given >= 0, 0], given[given >= 0])
            assert (batch["source_mask"].any(axis=1) == (given >= 0)).all()
            found += (given[given >= 0] - 100).tolist()
        tasks = np.bincount(rows.owners[found], minlength=3)
        assert np.abs(tasks - [4, 10, 5]).max() <= 1
        seen.update(found)
        epochs.append(found)
        # Of one width those of a task have come equally often, up to one.
        for task in range(3):
            for group in rows.rows.groups:
                counts = [seen[pair] for pair in group.tolist() if rows.owners[pair] == task]
                assert max(counts) - min(counts) <= 1
    assert [seen[pair] for pair in (0, 2, 53, 59)] == [28, 28, 15, 15]
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_batches_go_on_exactly_and_other_seeds_draw_others():
    straight = train_batches(_mixed(), batch_size=4, seed=1)
    expected = [next(straight) for _ in range(12)]
    resumed = train_batches(_mixed(), batch_size=4, seed=1)
    for _ in range(7):
        next(resumed)
    state = json.loads(json.dumps(resumed.get_state()))
    parts = [train_batches(_mixed(), batch_size=4, seed=1, process_index=i, process_count=2) for i in range(2)]
    for part in parts:
        part.set_state(state)
    for batch in expected[7:]:
        halves = [next(part) for part in parts]
        for key, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([half[key] for half in halves]), array)
    other = train_batches(_mixed(), batch_size=4, seed=2)
    assert any(not np.array_equal(next(other)["targets"], batch["targets"]) for batch in expected)


def test_data_of_a_config_are_those_of_mappings_and_what_is_read_is_in_the_hash(tasks):
    data = data_loader("text_tasks")(tasks=tasks, batching="padded", limit=6)
    config = ConfigDict({"tasks": json.loads(json.dumps(tasks)), "batching": "padded", "limit": 6})
    again = load_text_task_data(**dict(config.items()))
    assert again.hash == data.hash
    assert data.train_rows.counts == (6, 6, 4, 6)
    assert load_text_task_data(tasks=tasks, batching="padded", temperature=2.0, limit=6).hash != data.hash
    assert load_text_task_data(tasks={**tasks, "film": {**tasks["film"], "weight": 2}}, limit=6).hash != data.hash
    batch = next(train_batches(data.train_rows, batch_size=32, seed=0))
    scored = batch["targets"][:, 0] != -100
    assert (batch["tokens"][:, 0] == 256).all()
    assert scored.sum() == 22
    assert len(list(eval_batches(data.validation_rows, batch_size=4))) == 4
    assert data.max_length == data.train_rows.length


def test_what_cannot_be_is_refused(tasks, tmp_path):
    film, nli, copy = tasks["film"], tasks["nli"], tasks["copy"]
    empty = _write(tmp_path / "e", ["a\t"])
    for described, message in (
        ({**film, "colour": 1}, "task 'x': a task has no field 'colour'; there are name, train"),
        ({"train": ()}, "a task has a field name"),
        ({**film, "name": "tsv"}, "name is 'tsv'; must be one of parallel, tsv_pairs"),
        ({**film, "numbers": {"years": 1}}, "'tsv_labels' take no numbers"),
        ({**copy, "words": {"a": "b"}}, "'copy_pairs' take no words"),
        ({**copy, "numbers": {"years": (1, 2)}}, "'copy_pairs' take no years"),
        ({**film, "step": 0.2, "label": "0"}, "is not a number that can be rounded"),
        ({**film, "step": 0.0}, "step is 0.0, must be above 0"),
        ({**nli, "parts": ("a",)}, "parts is .* must be 2, one for each text"),
        ({**film, "train": (empty,)}, "task 'x' has no training pair\\."),
        ({"name": "parallel", "train": ("a", "b"), "fields": ("a",)}, "fields is .* must be two"),
        ({**film, "weight": 0.0}, "weights is"),
    ):
        with pytest.raises(ValueError, match=message):
            load_text_task_data(tasks={"x": described})
    with pytest.raises(ValueError, match="need tasks"):
        load_text_task_data()
    with pytest.raises(ValueError, match="batching is 'packed'; tasks are mixed"):
        load_text_task_data(tasks=tasks, batching="packed")
    with pytest.raises(ValueError, match="'film' has no training pair of at most length = 25 tokens"):
        load_text_task_data(tasks={"copy": copy, "film": film}, length=25)
    with pytest.raises(ValueError, match="owners are 2; must be 60"):
        MixedPairRows(_mixed().rows, np.zeros(2, np.int64), (1,))
    with pytest.raises(ValueError, match="counts is"):
        MixedPairRows(_mixed().rows, np.zeros(60, np.int64), (1, 1))
