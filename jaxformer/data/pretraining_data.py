"""Rows for pretraining that are drawn anew in every epoch, with what is needed to read their loss."""

import functools
import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from jaxformer.data.datasets import Documents
from jaxformer.data.masked_rows import MaskedRows
from jaxformer.data.packing import IGNORE_LABEL
from jaxformer.data.pair_data import decoder_start
from jaxformer.data.span_corruption import SpanRows
from jaxformer.data.subword_tokenizer import SubwordTokenizer


@dataclass(frozen=True, eq=False)
class PretrainingData:
    """Rows that are drawn anew in every epoch, and what is needed to read their loss.

    Args:
        train_rows: rows of the training documents.
        validation_rows: rows of the validation documents, always drawn alike.
        tokenizer: that of the rows.
        layout: a line on how rows are made.
        train_documents: training text.
        validation_documents: validation text.
    """

    train_rows: MaskedRows | SpanRows
    validation_rows: MaskedRows | SpanRows
    tokenizer: SubwordTokenizer
    layout: str
    train_documents: Documents = field(repr=False)
    validation_documents: Documents = field(repr=False)

    @property
    def start_id(self) -> int:
        """What a decoder begins with."""
        return decoder_start(self.tokenizer)

    @property
    def source_tokenizer(self) -> SubwordTokenizer:
        """The tokenizer: sources and targets have one."""
        return self.tokenizer

    @property
    def buckets(self) -> dict[str, MaskedRows | SpanRows]:
        """Rows that are evaluated apart by name: none here."""
        return {}

    @property
    def bits_per(self) -> dict[str, int]:
        """What bits are counted by: nothing here."""
        return {}

    @property
    def max_length(self) -> int:
        """Tokens of the longest row, of source or target."""
        return self.train_rows.length

    @functools.cached_property
    def hash(self) -> str:
        """Digest of what training reads, by its layout, tokens and the first rows as drawn: 16 hexadecimal digits."""
        digest = hashlib.blake2b(f"{self.layout};".encode(), digest_size=8)
        for rows in (self.train_rows, self.validation_rows):
            tokens = rows.tokens if isinstance(rows, SpanRows) else rows.texts.sentences.tokens
            digest.update(tokens.astype("<i4").tobytes())
            first = np.arange(min(16, len(rows)))
            for name, array in sorted(rows.drawn_batch(0, np.ones_like(first), first).items()):
                digest.update(name.encode() + array.astype("<i4").tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def unigram(self) -> tuple[float, float]:
        """What the predictor reaches that knows only how often each id occurs in training, on the validation rows.

        Returns:
            Nats per target (counts plus one), and the share of targets that are the most frequent id.
        """
        smoothed = _target_counts(self.train_rows, self.tokenizer.vocab_size) + 1.0
        scored = _scored_counts(self.validation_rows, self.tokenizer.vocab_size)
        if not scored.sum():
            return math.nan, math.nan
        loss = -(scored @ np.log(smoothed / smoothed.sum())) / scored.sum()
        return float(loss), float(scored[smoothed.argmax()] / scored.sum())

    @property
    def baselines(self) -> str:
        """A line on what that predictor reaches."""
        loss, accuracy = self.unigram
        return (
            f"for scale, on the validation targets: unigram entropy {loss:.4f} nats per token, and an accuracy of "
            f"{accuracy:.4f} for the most frequent token"
        )

    @property
    def summary(self) -> str:
        """A line on source, layout, sizes and tokenizer."""
        sides = [
            f"{name} {len(documents.texts):,} documents, {documents.num_bytes:,} bytes in {len(rows):,} rows"
            for name, documents, rows in (
                ("training", self.train_documents, self.train_rows),
                ("validation", self.validation_documents, self.validation_rows),
            )
        ]
        source = self.train_documents.source
        return f"{source}; {self.layout}; {'; '.join(sides)}; tokenizer {self.tokenizer.summary}"


def _target_counts(rows: MaskedRows | SpanRows, vocab_size: int) -> Int64[np.ndarray, " V"]:
    """How often each id is a target in training: of masks as often as it may be chosen, else in the first rows."""
    return rows.counts() if isinstance(rows, MaskedRows) else _scored_counts(rows, vocab_size, 8192)


def _scored_counts(rows: MaskedRows | SpanRows, vocab_size: int, most: int | None = None) -> Int64[np.ndarray, " V"]:
    """How often each id is a target in the rows, or in so many of the first."""
    counts = np.zeros(vocab_size, np.int64)
    end = len(rows) if most is None else min(most, len(rows))
    for start in range(0, end, 64):
        targets = rows.batch(np.arange(start, min(start + 64, end)))["targets"]
        counts += np.bincount(targets[targets != IGNORE_LABEL], minlength=vocab_size)
    return counts
