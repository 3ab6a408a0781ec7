import math

import numpy as np
import pytest

from jaxformer.data import lzma_bits_per_byte, unigram_loss
from jaxformer.data.packing import join_documents


def test_unigram_loss_equals_a_loop():
    train = [[7, 1, 1, 2], [7, 3, 1]]
    validation = [[7, 1, 4], [7, 2, 2, 1]]
    vocab_size = 9
    counts = [1.0] * vocab_size
    for document in train:
        for token in document[1:]:
            counts[token] += 1
    scored = [token for document in validation for token in document[1:]]
    expected = -sum(math.log(counts[token] / sum(counts)) for token in scored) / len(scored)
    found = unigram_loss(
        *join_documents([np.array(d) for d in train]), *join_documents([np.array(d) for d in validation]), vocab_size
    )
    assert found == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_without_training_is_uniform_and_without_targets_nan():
    nothing, some = join_documents([]), join_documents([np.array([1, 2, 3])])
    assert unigram_loss(*nothing, *some, 11) == pytest.approx(math.log(11))
    assert math.isnan(unigram_loss(*some, *nothing, 11))


def test_lzma_is_low_for_repeats_and_near_eight_bits_for_noise():
    noise = "".join(map(chr, np.random.default_rng(0).integers(0, 128, 50_000)))
    assert lzma_bits_per_byte(["all the same " * 5000]) < 0.05
    assert 6.9 < lzma_bits_per_byte([noise]) < 7.5
    assert math.isnan(lzma_bits_per_byte([]))


def test_lzma_reads_no_more_than_its_cap():
    text = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 3000)))
    assert lzma_bits_per_byte([text, "tail" * 100_000], most=3000) == lzma_bits_per_byte([text])
