import json
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from jaxformer.data import eval_batches, pack_documents, stream_documents, train_batches


def _rows(count, length=2):
    """Rows whose first token is their number."""
    return stream_documents([np.arange(count * length + 1)], length)


def _numbers(batch, length=2):
    return (batch["tokens"][:, 0] // length).tolist()


def _take(rows, steps, **arguments):
    batches = train_batches(rows, **arguments)
    return [number for _ in range(steps) for number in _numbers(next(batches))]


@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (7, 3), (3, 11), (1, 5)])
def test_each_epoch_holds_each_row_exactly_once(count, batch_size):
    epochs = 6
    steps = -(-count * epochs // batch_size)
    numbers = _take(_rows(count), steps, batch_size=batch_size, seed=3)
    for epoch in range(epochs):
        assert sorted(numbers[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_differ_in_order():
    epochs = {
        (seed, epoch): tuple(numbers[epoch * 10 : (epoch + 1) * 10])
        for seed in range(4)
        for numbers in [_take(_rows(10), 10, batch_size=4, seed=seed)]
        for epoch in range(4)
    }
    assert len(set(epochs.values())) == len(epochs)


def test_the_order_of_a_seed_is_fixed():
    # Stated as numbers: a run resumed after an upgrade must go on in the same order.
    assert _take(_rows(10), 3, batch_size=5, seed=42) == [0, 1, 4, 2, 6, 8, 5, 9, 7, 3, 7, 3, 4, 2, 5]


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 12])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_restored_iterator_goes_on_exactly(stop, prefetch):
    arguments = {"batch_size": 4, "seed": 1, "prefetch": prefetch}
    straight = train_batches(_rows(10), **arguments)
    expected = [next(straight) for _ in range(stop + 6)][stop:]
    stopped = train_batches(_rows(10), **arguments)
    for _ in range(stop):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    restored = train_batches(_rows(10), **arguments)
    next(restored)
    restored.set_state(state)
    for batch in expected:
        found = next(restored)
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)


RESUME = """
import json, sys
import numpy as np
from jaxformer.data import stream_documents, train_batches
batches = train_batches(stream_documents([np.arange(21)], 2), batch_size=4, seed=1, prefetch=3)
batches.set_state(json.loads(sys.argv[1]))
print(json.dumps([next(batches)["tokens"].tolist() for _ in range(5)]))
"""


def test_a_fresh_process_goes_on_exactly_and_exits_in_silence():
    batches = train_batches(_rows(10), batch_size=4, seed=1)
    for _ in range(4):
        next(batches)
    state = json.dumps(batches.get_state())
    expected = [next(batches)["tokens"].tolist() for _ in range(5)]
    command = [sys.executable, "-W", "error", "-c", RESUME, state]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stderr == ""
    assert result.returncode == 0
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_together_get_the_batch_of_one(processes):
    rows = pack_documents([np.arange(5 + 7 * index) for index in range(6)], 5)
    arguments = {"batch_size": 6, "seed": 5}
    whole = train_batches(rows, **arguments)
    parts = [
        train_batches(rows, process_index=index, process_count=processes, **arguments) for index in range(processes)
    ]
    for _ in range(10):
        pieces = [next(part) for part in parts]
        for name, array in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces]), array)


@pytest.mark.parametrize(
    ("count", "batch_size", "processes"), [(10, 4, 1), (10, 4, 2), (8, 4, 2), (3, 6, 3), (1, 2, 1)]
)
def test_evaluation_scores_each_pair_once_in_batches_of_one_shape(count, batch_size, processes):
    rows = pack_documents([np.arange(count * 3)], 3)
    scored = []
    lengths = set()
    for index in range(processes):
        batches = list(eval_batches(rows, batch_size=batch_size, process_index=index, process_count=processes))
        lengths.add(len(batches))
        for batch in batches:
            assert batch["tokens"].shape == (batch_size // processes, 3)
            scored.extend(batch["targets"][batch["targets"] != -100].tolist())
    assert sorted(scored) == list(range(1, count * 3))
    assert lengths == {-(-count // batch_size)}


def test_evaluation_of_nothing_is_empty():
    assert list(eval_batches(pack_documents([], 3), batch_size=2)) == []


def test_iterators_start_fast_use_one_thread_and_leave_none():
    rows = _rows(100_000)
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(train_batches(rows, batch_size=8, seed=0))  # what is loaded once
        start = time.perf_counter()
        batches = train_batches(rows, batch_size=8, seed=0, prefetch=4)
        next(batches)
        elapsed = time.perf_counter() - start
        assert len(set(threading.enumerate()) - before) <= 2
        batches.close()
        with pytest.raises(ValueError, match="closed"):
            next(batches)
        del batches
    assert elapsed < 1.0
    deadline = time.perf_counter() + 10.0
    while set(threading.enumerate()) - before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def test_a_row_that_cannot_be_made_ends_the_iteration_with_its_error():
    class Broken:
        def __len__(self):
            return 3

        def batch(self, indices):
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(train_batches(Broken(), batch_size=2, seed=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 5, "process_count": 2}, "batch_size is 5, must be a multiple of process_count = 2"),
        ({"process_index": 2, "process_count": 2}, "process_index is 2"),
        ({"seed": -1}, "seed is -1"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        train_batches(_rows(3), **{"batch_size": 4, "seed": 0, **change})


def test_training_needs_rows():
    with pytest.raises(ValueError, match="no rows to train on"):
        train_batches(pack_documents([], 3), batch_size=1, seed=0)
