"""Span corruption: pieces of a text are cut out, each leaves a sentinel, and the model writes them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, UInt64

from jaxformer.data.masking import EVALUATION, TRAINING, as_fractions, random_numbers
from jaxformer.data.packing import IGNORE_LABEL, Batch
from jaxformer.data.pair_rows import shift_right


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """How many of so many tokens are cut out, and in how many spans: at least one of each, and one token stays.

    Raffel et al. 2020, arXiv:1910.10683, section 3.1.4; T5's own rounding. Needs two tokens.
    """
    noise = min(max(round(length * density), 1), length - 1)
    spans = min(max(round(noise / mean_span), 1), noise, length - noise)
    return noise, spans


def raw_length(input_length: int, density: float, mean_span: float) -> tuple[int, int]:
    """How many tokens of text give an input of exactly so many, or as near below as can be.

    Args:
        input_length: tokens of an input: those that stay, a sentinel for each span, and the end.
        density: share of tokens cut out.
        mean_span: their mean number in a span.

    Returns:
        Tokens of text, and those of the target that belongs to it: a sentinel and the tokens of each span, and the
        end. T5's 512 at 0.15 and 3 give 568 and 114.

    Raises:
        ValueError: input_length has no room, or density or mean_span is out of range.
    """
    if not 0.0 < density < 1.0:
        raise ValueError(f"density is {density}, must be above 0 and below 1.")
    if mean_span < 1.0:
        raise ValueError(f"mean_span is {mean_span}, must be at least 1.")
    if input_length < 3:
        raise ValueError(f"input_length is {input_length}, must be at least 3: a token, a sentinel and the end.")

    def lengths(raw: int) -> tuple[int, int]:
        noise, spans = noise_counts(raw, density, mean_span)
        return raw - noise + spans + 1, noise + spans + 1

    # An input never has fewer tokens for one token of text more, so the last text that fits is the longest.
    raw = 2
    most = 2 * math.ceil(input_length / (1.0 - density)) + 2
    while raw < most and lengths(raw + 1)[0] <= input_length:
        raw += 1
    return raw, max(lengths(shorter)[1] for shorter in range(2, raw + 1))


def span_mask(
    length: int, density: float, mean_span: float, numbers: UInt64[np.ndarray, " _"]
) -> Bool[np.ndarray, " length"]:
    """Which tokens are cut out: spans of random lengths at random places, a token or more between them.

    All ways to place so many spans of so many tokens in all are equally likely. T5's own code has a token before the
    first span and the last span at the end of every text, so in a short text with one span always the same is cut out;
    lengths of input and target are the same in both.

    Args:
        length: tokens of the text, at least 2.
        density: share of tokens cut out.
        mean_span: their mean number in a span.
        numbers: uniform random numbers, at least ``length``.

    Returns:
        True where a token is cut out [length].
    """
    noise, spans = noise_counts(length, density, mean_span)
    kept = length - noise
    parts = np.empty(2 * spans + 1, np.int64)
    # One token more at each end, which is taken away again: what stays there may be nothing.
    parts[0::2] = _random_parts(kept + 2, spans + 1, numbers[: kept + 1])
    parts[[0, -1]] -= 1
    parts[1::2] = _random_parts(noise, spans, numbers[kept + 1 : length])
    return np.repeat(np.arange(2 * spans + 1) % 2 == 1, parts)


def _random_parts(total: int, count: int, numbers: UInt64[np.ndarray, " _"]) -> Int64[np.ndarray, " count"]:
    """``total`` as a sum of ``count`` numbers of at least 1, all such sums equally likely."""
    cuts = np.sort(np.argsort(numbers[: total - 1], kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupt_spans(
    tokens: Integer[np.ndarray, " n"], mask: Bool[np.ndarray, " n"], sentinels: Integer[np.ndarray, " _"]
) -> tuple[Int32[np.ndarray, " a"], Int32[np.ndarray, " b"]]:
    """A text without its spans, and the spans without their text; each with sentinels in place of the other.

    Args:
        tokens: ids of the text.
        mask: True where a token is cut out; the k-th run of True is span k.
        sentinels: the id that stands for each span, from the first on; as many as spans or more.

    Returns:
        Of text a B C d E with the capitals cut out and sentinels 9, 8: a 9 d 8, and 9 B C 8 E.

    Raises:
        ValueError: there are fewer sentinels than spans.
    """
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    if begins.sum() > len(sentinels):
        raise ValueError(f"sentinels has {len(sentinels)} ids, must have one for each of {begins.sum()} spans.")
    marked = np.repeat(tokens.astype(np.int32), begins + 1)
    # The first of the two that a span's first token became is its sentinel.
    first = np.flatnonzero(begins) + np.arange(begins.sum())
    marked[first] = sentinels[: len(first)]
    is_sentinel = np.zeros(len(marked), bool)
    is_sentinel[first] = True
    cut = np.repeat(mask, begins + 1)
    return marked[~cut | is_sentinel], marked[cut]


def split_prefix(
    tokens: Integer[np.ndarray, " n"], numbers: UInt64[np.ndarray, " _"]
) -> tuple[Int32[np.ndarray, " a"], Int32[np.ndarray, " b"]]:
    """Prefix language modelling: the beginning of a text is given and its rest is written, one token each at least."""
    at = 1 + int(as_fractions(numbers[:1])[0] * (len(tokens) - 1))
    return tokens[:at].astype(np.int32), tokens[at:].astype(np.int32)


@dataclass(frozen=True, eq=False)
class SpanRows:
    """Texts cut into pieces of one length, each drawn anew in every epoch: a ``DrawnRows`` with batches of pairs.

    Args:
        tokens: ids of all documents, one after the other without a sign between them, as T5 has them [N].
        raw: tokens of a piece; the last one has what is left and is dropped if that is one token.
        widths: tokens of source and target rows, each end included.
        draw: source and target of a piece, from its ids and as many random numbers.
        start_id: what the decoder begins with.
        end_id: ends source and target.
        pad_id: fills rows.
        evaluation_seed: of the draw that ``batch`` has.
        dynamic: whether each epoch has its own draw; False = all have that of the first.
    """

    tokens: Integer[np.ndarray, " N"]
    raw: int
    widths: tuple[int, int]
    draw: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    start_id: int
    end_id: int
    pad_id: int = 0
    evaluation_seed: int = 0
    dynamic: bool = True

    def __len__(self) -> int:
        full, rest = divmod(len(self.tokens), self.raw)
        return full + (rest > 1)

    @property
    def length(self) -> int:
        """Tokens of the wider side of a row."""
        return max(self.widths)

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, always drawn alike; ``len(self)`` or more gives a row that is all padding."""
        return self._batch(self.evaluation_seed, EVALUATION, np.zeros(len(indices), np.int64), indices)

    def drawn_batch(self, seed: int, epochs: Integer[np.ndarray, " B"], indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, as drawn in an epoch of a seed.

        Returns:
            source int32 and source_mask bool [B, source width], and tokens (what the decoder reads), targets (-100
            behind the end) int32 and key_mask bool [B, target width].
        """
        return self._batch(seed, TRAINING, epochs if self.dynamic else np.zeros_like(epochs), indices)

    def example(self, seed: int, stream: int, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of source and target of a piece, ends included."""
        piece = self.tokens[index * self.raw : (index + 1) * self.raw]
        sides = self.draw(piece, random_numbers(seed, stream, epoch, index, self.raw))
        source, target = (np.append(side, np.int32(self.end_id)) for side in sides)
        return source, target

    def _batch(self, seed: int, stream: int, epochs: np.ndarray, indices: np.ndarray) -> Batch:
        source = np.full((len(indices), self.widths[0]), self.pad_id, np.int32)
        source_mask = np.zeros(source.shape, bool)
        targets = np.full((len(indices), self.widths[1]), IGNORE_LABEL, np.int32)
        for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist())):
            if index < len(self):
                given, wanted = self.example(seed, stream, epoch, index)
                source[row, : len(given)], source_mask[row, : len(given)] = given, True
                targets[row, : len(wanted)] = wanted
        return {
            "source": source,
            "source_mask": source_mask,
            "tokens": shift_right(targets, self.start_id, self.pad_id),
            "targets": targets,
            "key_mask": targets != IGNORE_LABEL,
        }
