"""Masked language modelling: which tokens are predicted, and what the model sees in their place."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Integer, UInt64

from jaxformer.data.packing import IGNORE_LABEL

# Streams of one seed: each draws numbers that no other does.
TRAINING, EVALUATION = range(2)


@dataclass(frozen=True, eq=False)
class Masking:
    """How tokens are chosen and replaced (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

    Each real token is chosen with probability ``fraction``, so of n tokens a binomial number, none at times in a short
    row (BERT rounds n * fraction, at least one). Of the chosen, one uniform draw makes ``mask_fraction`` the mask
    token, ``random_fraction`` a token drawn uniformly from all that are not special (it may be the same), and leaves
    the rest as they are. With whole words all tokens of a word are chosen or none, and each is replaced by its own
    draw; the share of tokens chosen stays ``fraction``.

    Args:
        mask_id: the mask token.
        ordinary_ids: ids that may stand for a random token: all that are not special [K].
        word_starts: whether an id begins a word [V]; None = tokens are chosen one by one.
        fraction: of real tokens that are predicted, in (0, 1).
        mask_fraction: of those, shown as the mask token.
        random_fraction: of those, shown as a random token.

    Raises:
        ValueError: a fraction is out of range, or no id is ordinary.
    """

    mask_id: int
    ordinary_ids: Integer[np.ndarray, " K"]
    word_starts: Bool[np.ndarray, " V"] | None = None
    fraction: float = 0.15
    mask_fraction: float = 0.8
    random_fraction: float = 0.1

    def __post_init__(self):
        if not 0.0 < self.fraction < 1.0:
            raise ValueError(f"fraction is {self.fraction}, must be above 0 and below 1.")
        if min(self.mask_fraction, self.random_fraction) < 0 or self.mask_fraction + self.random_fraction > 1.0:
            raise ValueError(
                f"mask_fraction is {self.mask_fraction} and random_fraction {self.random_fraction}; they must be at "
                "least 0 and together at most 1."
            )
        if not self.ordinary_ids.size:
            raise ValueError("ordinary_ids is empty: there is no token to show in place of another.")

    def apply(
        self, tokens: Int[np.ndarray, "B T"], maskable: Bool[np.ndarray, "B T"], numbers: UInt64[np.ndarray, "B 3 T"]
    ) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """What the model sees and what it is to predict.

        Args:
            tokens: ids [B, T].
            maskable: True where a real token stands: no special one, no padding [B, T].
            numbers: uniform random numbers [B, 3, T]: for the choice, the kind of replacement, and the random id.

        Returns:
            inputs and targets int32 [B, T]; targets are the ids at the chosen places and -100 elsewhere.
        """
        choice = as_fractions(numbers[:, 0])
        if self.word_starts is not None:
            choice = np.take_along_axis(choice, _first_of_word(self.word_starts[tokens], maskable), axis=1)
        chosen = maskable & (choice < self.fraction)
        kind = as_fractions(numbers[:, 1])
        random = self.ordinary_ids[numbers[:, 2] % np.uint64(self.ordinary_ids.size)]
        shown = np.where(kind < self.mask_fraction + self.random_fraction, random, tokens)
        shown = np.where(kind < self.mask_fraction, self.mask_id, shown)
        inputs = np.where(chosen, shown, tokens).astype(np.int32)
        return inputs, np.where(chosen, tokens, IGNORE_LABEL).astype(np.int32)


def _first_of_word(starts: Bool[np.ndarray, "B T"], maskable: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """Where the word of each token begins; what stands behind no real token begins a word in any case."""
    begins = starts.copy()
    begins[:, 0] = True
    begins[:, 1:] |= ~maskable[:, :-1]
    return np.maximum.accumulate(np.where(begins, np.arange(starts.shape[1]), 0), axis=1)


def as_fractions(numbers: UInt64[np.ndarray, "*shape"]) -> np.ndarray:
    """Random numbers of 64 bits as float64, uniform in [0, 1)."""
    return (numbers >> np.uint64(11)) * 2.0**-53


def random_numbers(seed: int, stream: int, epoch: int, index: int, count: int) -> UInt64[np.ndarray, " count"]:
    """Random numbers that are a pure function of where they are used: the same on every machine, in any order.

    Philox (Salmon et al. 2011) with the example and the epoch as the upper half of its counter, so that no two
    examples, epochs, streams or seeds share numbers.

    Args:
        seed: of the run, at least 0.
        stream: which stream of the seed, at least 0.
        epoch: how often the data were seen before, at least 0.
        index: the example, at least 0.
        count: how many numbers.

    Returns:
        Uniform integers of 64 bits [count].
    """
    return np.random.Philox(key=_philox_key(seed, stream), counter=[0, 0, index, epoch]).random_raw(count)


@functools.lru_cache(maxsize=64)
def _philox_key(seed: int, stream: int) -> UInt64[np.ndarray, " 2"]:
    # A leading number of its own keeps these keys from those of shuffles and tasks.
    return np.random.SeedSequence([0x6D61736B, seed, stream]).generate_state(2, np.uint64)


def row_numbers(
    seed: int, stream: int, epochs: Sequence[int], indices: Sequence[int], shape: tuple[int, ...]
) -> UInt64[np.ndarray, "B *shape"]:
    """``random_numbers`` of several examples [B, \\*shape]."""
    count = int(np.prod(shape))
    rows = [random_numbers(seed, stream, epoch, index, count) for epoch, index in zip(epochs, indices, strict=True)]
    return np.array(rows, np.uint64).reshape(len(rows), *shape)
