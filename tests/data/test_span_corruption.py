import json

import numpy as np
import pytest

from jaxformer.data import eval_batches, train_batches
from jaxformer.data.masking import random_numbers
from jaxformer.data.span_corruption import (
    SpanRows,
    corrupt_spans,
    noise_counts,
    raw_length,
    span_mask,
    split_prefix,
)

END, PAD, SENTINELS = 1, 0, np.arange(999, 899, -1)


def _rebuild(source, target, sentinels=SENTINELS):
    """The text, by copying the source and, at each sentinel, what the target has behind the same one."""
    known = set(sentinels.tolist())
    spans, key = {}, None
    for token in target:
        if token in known:
            key = token
            assert key not in spans
            spans[key] = []
        else:
            spans[key].append(token)
    used = [token for token in source if token in known]
    assert used == list(spans)
    assert used == sentinels[: len(used)].tolist()
    text = []
    for token in source:
        text.extend(spans[token] if token in known else [token])
    return text


def test_the_example_of_the_paper():
    # Thank you <for inviting> me to your party <last> week .
    text = np.arange(10, 21)
    mask = np.isin(text, [12, 13, 18])
    source, target = corrupt_spans(text, mask, SENTINELS)
    assert source.tolist() == [10, 11, 999, 14, 15, 16, 17, 998, 19, 20]
    assert target.tolist() == [999, 12, 13, 998, 18]
    with pytest.raises(ValueError, match="sentinels has 1 ids, must have one for each of 2 spans"):
        corrupt_spans(text, mask, SENTINELS[:1])


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_source_and_target_rebuild_every_text(count):
    random = np.random.default_rng(0)
    sentinels = np.arange(1100, 1000, -1)
    for number, length in enumerate(random.integers(2, 120, count).tolist()):
        density, mean_span = (0.15, 0.5, 0.05, 0.9)[number % 4], (1.0, 3.0, 10.0)[number % 3]
        text = random.integers(2, 900, length)
        mask = span_mask(length, density, mean_span, random_numbers(1, 0, 0, number, length))
        source, target = corrupt_spans(text, mask, sentinels)
        assert _rebuild(source.tolist(), target.tolist(), sentinels) == text.tolist()
        noise, spans = noise_counts(length, density, mean_span)
        assert mask.sum() == noise
        assert (len(source), len(target)) == (length - noise + spans, noise + spans)


def test_lengths_are_those_of_t5():
    assert raw_length(512, 0.15, 3.0) == (568, 114)
    assert noise_counts(568, 0.15, 3.0) == (85, 28)
    assert noise_counts(2, 0.15, 3.0) == (1, 1)


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 3.0), (0.5, 1.0), (0.85, 8.0)])
def test_the_raw_length_is_the_longest_that_fits(density, mean_span):
    def wanted(raw):
        noise = min(max(round(raw * density), 1), raw - 1)
        spans = min(max(round(noise / mean_span), 1), noise, raw - noise)
        return raw - noise + spans + 1, noise + spans + 1

    for width in range(3, 90, 7):
        raw, target = raw_length(width, density, mean_span)
        fitting = [length for length in range(2, 800) if wanted(length)[0] <= width]
        assert raw == max(fitting)
        assert target == max(wanted(length)[1] for length in fitting)


def test_all_spans_are_equally_likely():
    # 8 tokens, 3 cut out in 2 spans: 2 ways to part what is cut out, and 2 of 6 places between what stays.
    masks = [tuple(span_mask(8, 0.4, 1.5, random_numbers(3, 0, 0, index, 8)).tolist()) for index in range(1200)]
    counts = np.unique(masks, axis=0, return_counts=True)[1]
    assert len(counts) == 30
    assert np.abs(counts - 40).max() < 4.5 * np.sqrt(1200 / 30 * 29 / 30)


def _rows(count=230, width=20, dynamic=True):
    raw, target = raw_length(width, 0.15, 3.0)

    def draw(piece, numbers):
        return corrupt_spans(piece, span_mask(len(piece), 0.15, 3.0, numbers), SENTINELS)

    return SpanRows(np.arange(2, 2 + count), raw, (width, target), draw, PAD, END, PAD, 0, dynamic)


def test_full_rows_have_no_padding_and_rebuild_their_pieces():
    rows = _rows()
    assert rows.raw == 21
    batch = rows.batch(np.arange(len(rows) + 1))
    full = len(rows) - 1
    assert batch["source_mask"][:full].all()
    assert batch["key_mask"][:full].all()
    assert not batch["source_mask"][-1].any()
    assert (batch["targets"][-1] == -100).all()
    text = []
    for row in range(len(rows)):
        source = batch["source"][row][batch["source_mask"][row]].tolist()
        target = batch["targets"][row][batch["key_mask"][row]].tolist()
        assert source.pop() == END == target.pop()
        text += _rebuild(source, target)
    assert text == list(range(2, 232))
    # The decoder reads the start, then the targets but the last.
    assert (batch["tokens"][:, 0] == PAD).all()
    np.testing.assert_array_equal(batch["tokens"][:full, 1:], batch["targets"][:full, :-1])
    assert batch["tokens"].min() >= 0


def test_epochs_are_drawn_anew_unless_static_and_go_on_exactly():
    def epochs(rows, seed=3):
        batches = train_batches(rows, batch_size=len(rows), seed=seed)
        found = [next(batches) for _ in range(3)]
        return [
            {tuple(row[row >= 0].tolist()) for row in np.concatenate([b["source"], b["targets"]], axis=1)}
            for b in found
        ]

    first, second, third = epochs(_rows())
    assert len(first & second) + len(second & third) < len(first) // 2
    assert first != epochs(_rows(), seed=4)[0]
    first, second, third = epochs(_rows(dynamic=False))
    assert first == second == third
    arguments = {"batch_size": 4, "seed": 5}
    straight = train_batches(_rows(), **arguments)
    expected = [next(straight) for _ in range(9)]
    going = train_batches(_rows(), **arguments)
    for _ in range(5):
        next(going)
    resumed = train_batches(_rows(), **arguments)
    resumed.set_state(json.loads(json.dumps(going.get_state())))
    parts = [train_batches(_rows(), process_index=index, process_count=2, **arguments) for index in range(2)]
    for part in parts:
        part.set_state(going.get_state())
    for batch in expected[5:]:
        found, halves = next(resumed), [next(part) for part in parts]
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)


def test_evaluation_is_drawn_alike_each_time_and_unlike_training():
    one, two = (list(eval_batches(_rows(), batch_size=4)) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        np.testing.assert_array_equal(first["source"], second["source"])
    rows = _rows()
    drawn = rows.drawn_batch(0, np.zeros(4, np.int64), np.arange(4))
    assert not np.array_equal(drawn["source"], rows.batch(np.arange(4))["source"])


def test_a_prefix_and_its_rest():
    piece = np.arange(5, 12)
    splits = [split_prefix(piece, random_numbers(0, 0, 0, index, 1)) for index in range(1200)]
    for source, target in splits:
        assert [*source, *target] == piece.tolist()
    counts = np.bincount([len(source) for source, _ in splits], minlength=8)
    assert counts[0] == counts[7] == 0
    assert np.abs(counts[1:7] - 200).max() < 4.5 * np.sqrt(1200 / 6 * 5 / 6)
    rows = SpanRows(np.arange(2, 30), 7, (7, 7), split_prefix, PAD, END, PAD)
    batch = rows.batch(np.arange(4))
    assert (batch["source_mask"].sum(axis=1) + batch["key_mask"].sum(axis=1) == 9).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0.15, 3.0), "input_length is 2"),
        ((9, 1.0, 3.0), "density is 1"),
        ((9, 0.5, 0.5), "mean_span is 0"),
    ],
)
def test_lengths_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        raw_length(*arguments)
