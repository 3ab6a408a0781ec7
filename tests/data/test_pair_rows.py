import itertools
import json

import numpy as np
import pytest

from jaxformer.data import (
    PackedPairRows,
    PairRows,
    Rows,
    bucket_widths,
    eval_batches,
    packed_widths,
    shift_right,
    train_batches,
)
from jaxformer.data.pair_rows import fitting_widths

START, PAD, SOURCE_PAD = 900, 901, 902


def _ids(length):
    return np.zeros(length, np.int32)


def _sides(count=41, seed=0, longest=30):
    """Sources and targets whose ids all differ, so that a wrong or missing token shows; some sources are one id."""
    lengths = 1 + np.random.default_rng(seed).integers(0, longest, (count, 2))
    ids = iter(range(10_000, 10**6))
    return tuple(
        [np.array([next(ids) for _ in range(length)], np.int32) for length in side] for side in lengths.T.tolist()
    )


def _rows(num_buckets=3, **arguments):
    sources, targets = _sides(**arguments)
    return PairRows(sources, targets, bucket_widths(sources, targets, num_buckets), START, SOURCE_PAD, PAD)


def _pairs(batch):
    """(source, decoder input, target) of each row that has a target, as tuples of ids, by the masks."""
    found = []
    for row in range(len(batch["tokens"])):
        source = batch["source"][row][batch["source_mask"][row]]
        scored = batch["targets"][row] != -100
        np.testing.assert_array_equal(scored, batch["key_mask"][row])
        if scored.any():
            found.append((tuple(source), tuple(batch["tokens"][row][scored]), tuple(batch["targets"][row][scored])))
    return found


def _expected(rows):
    return [(tuple(source), (START, *target[:-1]), tuple(target)) for source, target in zip(rows.sources, rows.targets)]


def test_the_decoder_reads_the_targets_shifted_once_and_no_ignored_id():
    # Case D9: labels, start 0, padding 0, end 1.
    shifted = shift_right(np.array([10, 11, 1, -100, -100]), 0, 0)
    assert shifted.tolist() == [0, 10, 11, 1, 0]
    assert shifted.dtype == np.int32
    both = shift_right(np.array([[7, 8, 2], [9, 2, -100]]), 5, 3)
    assert both.tolist() == [[5, 7, 8], [5, 9, 2]]
    assert shift_right(np.array([[-100, -100]]), 5, 3).tolist() == [[5, 3]]
    assert shift_right(np.zeros((2, 0), np.int32), 5, 3).shape == (2, 0)


def test_a_batch_is_the_pairs_padded_to_the_widths_of_their_group():
    sources = [np.array([11, 12, 2], np.int32), np.array([2], np.int32)]
    targets = [np.array([21, 2], np.int32), np.array([31, 32, 33, 2], np.int32)]
    rows = PairRows(sources, targets, ((4, 5),), START, SOURCE_PAD, PAD)
    batch = rows.batch(np.array([1, 0, 2]), 0)
    assert {name: array.tolist() for name, array in batch.items()} == {
        "source": [[2, SOURCE_PAD, SOURCE_PAD, SOURCE_PAD], [11, 12, 2, SOURCE_PAD], [SOURCE_PAD] * 4],
        "source_mask": [[True, False, False, False], [True, True, True, False], [False] * 4],
        "tokens": [[START, 31, 32, 33, 2], [START, 21, 2, PAD, PAD], [START, PAD, PAD, PAD, PAD]],
        "targets": [[31, 32, 33, 2, -100], [21, 2, -100, -100, -100], [-100] * 5],
        "key_mask": [[True] * 4 + [False], [True] * 2 + [False] * 3, [False] * 5],
    }


def _places(sources, targets, cuts, keys):
    """Places in all rows where groups end at the keys in ``cuts``, each as wide as its longest sides need."""
    total, before = 0, 0
    for cut in cuts:
        inside = [(len(s), len(t)) for s, t, key in zip(sources, targets, keys) if before < key <= cut]
        if inside:
            total += len(inside) * sum(-(-max(side) // 8) * 8 for side in zip(*inside))
        before = cut
    return total


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_widths_are_the_best_of_all_cuts(num_buckets, seed):
    sources, targets = _sides(23, seed, 50)
    keys = [-(-max(len(source), len(target)) // 8) * 8 for source, target in zip(sources, targets)]
    widths = bucket_widths(sources, targets, num_buckets)
    assert len(widths) <= num_buckets
    assert all(width % 8 == 0 for pair in widths for width in pair)
    choices = sorted(set(keys))
    best = min(
        _places(sources, targets, (*cuts, choices[-1]), keys)
        for count in range(min(num_buckets, len(choices)))
        for cuts in itertools.combinations(choices[:-1], count)
    )
    rows = PairRows(sources, targets, widths, START)
    places = sum(len(group) * sum(pair) for group, pair in zip(rows.groups, widths))
    # A pair may fit into a narrower group than that of its neighbours.
    assert places <= best
    assert rows.fill == sum(map(len, [*sources, *targets])) / places


def test_widths_of_few_or_very_long_pairs():
    assert bucket_widths([], [], 3) == ((8, 8),)
    assert bucket_widths([_ids(1)] * 5, [_ids(9)] * 5, 3) == ((8, 16),)
    long = [_ids(length) for length in range(1, 20_000, 37)]
    widths = bucket_widths(long, long, 4)
    assert len(widths) == 4
    assert widths[-1][0] >= 19_981
    with pytest.raises(ValueError, match="num_buckets is 0"):
        bucket_widths(long, long, 0)


def test_pairs_beyond_all_widths_get_one_more():
    widths = ((8, 8), (16, 24))
    assert fitting_widths([_ids(16)], [_ids(2)], widths) == widths
    assert fitting_widths([], [], widths) == widths
    assert fitting_widths([_ids(3)], [_ids(25)], widths) == (*widths, (16, 32))
    with pytest.raises(ValueError, match=r"pair 1 has \(3, 25\) tokens"):
        PairRows([_ids(1), _ids(3)], [_ids(1), _ids(25)], widths, START)


def _epoch(batches, count):
    return [pair for _ in range(count) for pair in _pairs(next(batches))]


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_each_epoch_holds_each_pair_exactly_once_in_batches_of_one_group(batch_size):
    rows = _rows()
    per_epoch = sum(-(-len(group) // batch_size) for group in rows.groups)
    batches = train_batches(rows, batch_size=batch_size, seed=3)
    epochs = [_epoch(batches, per_epoch) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(_expected(rows))
    assert epochs[0] != epochs[1] != epochs[2]
    assert _epoch(train_batches(rows, batch_size=batch_size, seed=4), per_epoch) != epochs[0]


def test_batches_of_all_groups_are_mixed():
    rows = _rows(count=400)
    batches = train_batches(rows, batch_size=4, seed=0)
    widths = [next(batches)["tokens"].shape[1] for _ in range(100)]
    changes = sum(first != second for first, second in itertools.pairwise(widths))
    assert changes > 40
    orders = {tuple(next(train_batches(rows, batch_size=4, seed=seed))["source"].shape) for seed in range(20)}
    assert len(orders) == 3


@pytest.mark.parametrize("stop", [0, 1, 5, 13, 30])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_restored_iterator_of_groups_goes_on_exactly(stop, prefetch):
    arguments = {"batch_size": 4, "seed": 1, "prefetch": prefetch}
    straight = train_batches(_rows(), **arguments)
    expected = [next(straight) for _ in range(stop + 15)][stop:]
    stopped = train_batches(_rows(), **arguments)
    for _ in range(stop):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    restored = train_batches(_rows(), **arguments)
    next(restored)
    restored.set_state(state)
    for batch in expected:
        found = next(restored)
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", ["groups", "packed"])
@pytest.mark.parametrize("evaluated", [True, False])
def test_processes_together_get_the_batch_of_one(kind, evaluated):
    rows = _rows() if kind == "groups" else PackedPairRows(*_sides(), (32, 32), START)
    make = eval_batches if evaluated else train_batches
    arguments = {"batch_size": 6, **({} if evaluated else {"seed": 5})}
    parts = [make(rows, process_index=index, process_count=2, **arguments) for index in range(2)]
    for whole in itertools.islice(make(rows, **arguments), 12):
        pieces = [next(part) for part in parts]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces]), array)
    if evaluated:
        assert all(next(part, None) is None for part in parts)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_evaluation_goes_through_each_group_once_in_order(batch_size):
    rows = _rows()
    batches = list(eval_batches(rows, batch_size=batch_size))
    assert len(batches) == sum(-(-len(group) // batch_size) for group in rows.groups)
    expected = _expected(rows)
    in_order = [expected[index] for group in rows.groups for index in group]
    assert [pair for batch in batches for pair in _pairs(batch)] == in_order
    assert sorted(np.concatenate(rows.groups).tolist()) == list(range(len(rows)))
    assert {batch["source"].shape[0] for batch in batches} == {batch_size}
    shapes = {(batch["source"].shape[1], batch["tokens"].shape[1]) for batch in batches}
    assert shapes <= set(rows.widths)


def test_the_order_of_a_seed_is_fixed():
    # Stated as numbers: a run resumed after an upgrade must go on in the same order.
    ids = [np.array([index] * (1 + 9 * (index % 2)), np.int32) for index in range(7)]
    batches = train_batches(PairRows(ids, ids, ((8, 8), (16, 16)), START), batch_size=2, seed=42)
    found = [next(batches)["targets"][:, 0].tolist() for _ in range(8)]
    assert found == [[2, 0], [4, 6], [5, 3], [1, -100], [1, -100], [3, 5], [2, 0], [4, 6]]


def test_groups_may_be_empty_but_not_all():
    rows = PairRows([np.array([3])], [np.array([4])], ((8, 8), (16, 16)), START)
    assert [_pairs(batch) for batch in eval_batches(rows, batch_size=2)] == [_expected(rows)]
    nothing = PairRows([], [], ((8, 8),), START)
    assert list(eval_batches(nothing, batch_size=2)) == []
    with pytest.raises(ValueError, match="no rows to train on"):
        train_batches(nothing, batch_size=2, seed=0)


@pytest.mark.parametrize("widths", [(30, 30), (48, 32), (200, 100)])
def test_packed_rows_hold_each_pair_once_and_whole(widths):
    sources, targets = _sides(97)
    rows = PackedPairRows(sources, targets, widths, START, SOURCE_PAD, PAD)
    assert isinstance(rows, Rows)
    assert sorted(pair for row in rows.rows for pair in row) == list(range(97))
    batch = rows.batch(np.arange(len(rows) + 1))
    assert {batch[name].shape[1] for name in ("source", "source_segments", "source_positions")} == {widths[0]}
    assert {batch[name].shape[1] for name in ("tokens", "targets", "segments", "positions")} == {widths[1]}
    found = []
    for row in range(len(rows) + 1):
        pairs = [number for number in np.unique(batch["segments"][row]) if number]
        assert pairs == [number for number in np.unique(batch["source_segments"][row]) if number]
        assert pairs == list(range(1, len(pairs) + 1))
        for number in pairs:
            ours, theirs = batch["segments"][row] == number, batch["source_segments"][row] == number
            for side, inside in (("positions", ours), ("source_positions", theirs)):
                np.testing.assert_array_equal(batch[side][row][inside], np.arange(inside.sum()))
            sides = (batch["source"][row][theirs], batch["tokens"][row][ours], batch["targets"][row][ours])
            found.append(tuple(tuple(ids.tolist()) for ids in sides))
        empty = batch["segments"][row] == 0
        assert (batch["targets"][row][empty] == -100).all()
        assert (batch["tokens"][row][empty] == PAD).all()
        assert (batch["source"][row][batch["source_segments"][row] == 0] == SOURCE_PAD).all()
    assert sorted(found) == sorted(_expected(rows))
    assert rows.fill == sum(map(len, [*sources, *targets])) / (len(rows) * sum(widths))


def test_packed_sides_are_as_wide_as_they_have_tokens():
    sources, targets = [_ids(length) for length in (20, 30, 9)], [_ids(length) for length in (5, 20, 4)]
    assert packed_widths(sources, targets, None) == (32, 24)  # of 32 × 29 / 59 and 20 tokens
    assert packed_widths(sources, targets, 32) == (32, 24)
    assert packed_widths(sources, targets, 100) == (104, 56)
    assert packed_widths(targets, sources, 100) == (56, 104)
    assert packed_widths([], [], None) == (8, 8)


def test_packing_leaves_little_padding_and_refuses_what_does_not_fit():
    rows = PackedPairRows(*_sides(2000, longest=40), (160, 160), START)
    assert rows.fill > 0.9
    with pytest.raises(ValueError, match=r"pair 0 has \(3, 9\) tokens; widths is \(8, 8\)"):
        PackedPairRows([_ids(3)], [_ids(9)], (8, 8), START)
