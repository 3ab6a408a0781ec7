"""Pairs of a source and a target as a run needs them: rows for the loss, and texts and ids to translate."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from jaxformer.data import baselines
from jaxformer.data.mixtures import MixedPairRows
from jaxformer.data.packed_pairs import PackedPairRows
from jaxformer.data.packing import join_documents
from jaxformer.data.pair_rows import PairRows
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.vocabulary import has_sentinels


def decoder_start(tokenizer: Tokenizer) -> int:
    """The id that a decoder begins with: the start, or else the end, or else padding.

    With sentinels it is padding, as in T5 (Raffel et al. 2020, arXiv:1910.10683), whose vocabulary has no start.
    """
    if has_sentinels(tokenizer):
        return tokenizer.pad_id
    return next(token for token in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if token is not None)


@dataclass(frozen=True, eq=False)
class PairExamples:
    """Pairs of one split, as ids and as text.

    Args:
        sources: ids of each source, its end included.
        targets: ids of each target, its end included.
        source_texts: the sources.
        target_texts: the targets.
        labels: of each pair, what its figures are told apart by; None = nothing.
    """

    sources: Sequence[Int32[np.ndarray, " _"]]
    targets: Sequence[Int32[np.ndarray, " _"]]
    source_texts: Sequence[str]
    target_texts: Sequence[str]
    labels: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def up_to(self, length: int) -> "PairExamples":
        """The pairs with at most so many tokens on each side."""
        kept = [
            index
            for index, (source, target) in enumerate(zip(self.sources, self.targets))
            if max(len(source), len(target)) <= length
        ]
        return PairExamples(
            [self.sources[index] for index in kept],
            [self.targets[index] for index in kept],
            [self.source_texts[index] for index in kept],
            [self.target_texts[index] for index in kept],
            None if self.labels is None else [self.labels[index] for index in kept],
        )


@dataclass(frozen=True, eq=False)
class PairData:
    """Rows of pairs, and what is needed to translate and to read the loss.

    Args:
        train_rows: rows of the training pairs.
        validation_rows: rows of the validation pairs.
        test_rows: rows of the test pairs, where there are any; looked at after training only.
        tokenizer: of the targets.
        source_tokenizer: of the sources; the same object where both have one.
        start_id: what the decoder begins with.
        splits: texts and ids of the pairs of "validation" and, where there are any, "test".
        source: a line on where the pairs come from, and on those left out.
        counts: pairs of each split, that of training too.
    """

    train_rows: PairRows | PackedPairRows | MixedPairRows
    validation_rows: PairRows | PackedPairRows
    test_rows: PairRows | PackedPairRows | None
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer
    start_id: int
    splits: Mapping[str, PairExamples] = field(repr=False)
    source: str
    counts: Mapping[str, int]

    @property
    def rows(self) -> dict[str, PairRows | PackedPairRows]:
        """Rows of each of ``splits``."""
        rows: dict[str, PairRows | PackedPairRows] = {"validation": self.validation_rows}
        return rows if self.test_rows is None else {**rows, "test": self.test_rows}

    @property
    def buckets(self) -> dict[str, PairRows | PackedPairRows]:
        """Rows that are evaluated apart during training: none here."""
        return {}

    @property
    def bits_per(self) -> dict[str, int]:
        """What bits are counted by: nothing here."""
        return {}

    @property
    def max_length(self) -> int:
        """Tokens of the widest row of any side of any split."""
        return max(rows.length for rows in (self.train_rows, *self.rows.values()))

    @functools.cached_property
    def hash(self) -> str:
        """Digest of all that training reads, ids, borders, widths and start: 16 hexadecimal digits."""
        digest = hashlib.blake2b(f"{self.start_id};".encode(), digest_size=8)
        for rows in (self.train_rows, self.validation_rows):
            digest.update(f"{rows.layout};".encode())
            for side in (rows.sources, rows.targets):
                digest.update(np.array([len(ids) for ids in side], "<i8").tobytes())
                digest.update(np.concatenate([*side, np.zeros(0, np.int32)]).astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def baselines(self) -> str:
        """A line on what the predictor reaches that knows only how often each token occurs in training targets."""
        train, validation = (
            join_documents(rows.targets, start_id=self.start_id) for rows in (self.train_rows, self.validation_rows)
        )
        loss = baselines.unigram_loss(*train, *validation, self.tokenizer.vocab_size)
        return f"for scale, on the validation targets: unigram entropy {loss:.4f} nats per token"

    @property
    def summary(self) -> str:
        """A line on source, sizes and tokenizers."""
        rows = self.train_rows
        sizes = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        tokens = [sum(map(len, side)) for side in (rows.sources, rows.targets)]
        tokenizers = f"tokenizer {self.tokenizer.summary}"
        if self.source_tokenizer is not self.tokenizer:
            tokenizers = f"source {self.source_tokenizer.summary}, target {self.tokenizer.summary}"
        return (
            f"{self.source}; pairs: {sizes}; training tokens {tokens[0]:,} to {tokens[1]:,} in rows {rows.layout}, "
            f"{rows.fill:.0%} of them filled; {tokenizers}"
        )
