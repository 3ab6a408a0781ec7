import numpy as np
import pytest

from jaxformer.inference.prompts import bucket, check_count, check_token, pad_prompts


def test_prompts_stand_at_the_right_end_of_one_bucket():
    batch = pad_prompts([[3, 1, 4], [1], list(range(1, 18))], vocab_size=23, max_new_tokens=2, position_limit=None)
    np.testing.assert_array_equal(batch.lengths, [3, 1, 17])
    assert batch.tokens.shape == (3, 32)
    for row, length in zip(batch.tokens, batch.lengths):
        assert (row[:-length] == 0).all()
    np.testing.assert_array_equal(batch.tokens[0, -3:], [3, 1, 4])
    np.testing.assert_array_equal(batch.tokens[2, -17:], range(1, 18))


def test_buckets_are_powers_of_two_within_the_limit():
    assert [bucket(length) for length in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]
    assert [bucket(length, 40) for length in (1, 33, 40)] == [16, 40, 40]


@pytest.mark.parametrize("count", [0, -3, 2.5, True, None, "7"])
def test_counts_are_integers_of_at_least_one(count):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        check_count(count, "max_new_tokens")
    assert check_count(np.int64(3), "max_new_tokens") == 3


def test_counts_whose_room_exceeds_int32_are_refused():
    assert check_count(2**30, "max_new_tokens") == 2**30
    for count in (2**30 + 1, 10**12):
        with pytest.raises(ValueError, match=f"max_new_tokens={count} must be at most 1073741824"):
            check_count(count, "max_new_tokens")


def test_tokens_are_integers_within_their_range():
    assert check_token(np.int32(4), "eos_id", 5) == 4
    assert check_token(-1, "pad_id") == -1
    for token in (5, -1, 1.0, True):
        with pytest.raises(ValueError, match=r"eos_id=.*\[0, 5\)"):
            check_token(token, "eos_id", 5)


def test_ids_beyond_64_bits_signed_are_out_of_range():
    with pytest.raises(ValueError, match="ids must be in"):
        pad_prompts(np.array([[2**64 - 1]], np.uint64), vocab_size=5, max_new_tokens=1, position_limit=None)
