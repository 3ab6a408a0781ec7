"""Sentences of documents, and pairs of them that follow each other or don't: BERT's next-sentence prediction."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt64

from jaxformer.data.datasets import Documents
from jaxformer.data.masking import as_fractions, random_numbers
from jaxformer.data.prose import split_sentences
from jaxformer.data.tokenizers import Tokenizer, encode_texts

IS_NEXT, IS_RANDOM = 0, 1
"""Labels of next-sentence prediction, as published BERT heads have them."""

# Random numbers of a pair besides the bits of its truncation.
_FEW = 4
# The stream of lengths that are drawn once, for all epochs.
_LAYOUT = 2


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences of documents as ids, all in one array.

    Args:
        tokens: ids of all sentences [N].
        offsets: where each sentence starts in tokens, and N [S + 1]; none is empty.
        documents: the first sentence of each document, and S [D + 1]; each document has one or more.
    """

    tokens: Integer[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " sentences"]
    documents: Int64[np.ndarray, " boundaries"]

    def span(self, first: int, end: int) -> Integer[np.ndarray, " _"]:
        """Ids of the sentences first to end - 1."""
        return self.tokens[self.offsets[first] : self.offsets[end]]


def encode_sentences(documents: Documents, tokenizer: Tokenizer, *, dataset: str, most: int) -> Sentences:
    """Splits documents into sentences and these into ids.

    Args:
        documents: the texts.
        tokenizer: theirs.
        dataset: name of the data, for messages.
        most: tokens of a sentence at most; longer ones are cut into several.

    Returns:
        The sentences; those without a token are left out, and documents without a sentence.
    """
    split = [split_sentences(text) for text in documents.texts]
    # A blank in front of all but a document's first, as it stands in running text.
    texts = [f" {text}" if place else text for sentences in split for place, text in enumerate(sentences)]
    names = [name for name, sentences in zip(documents.names, split) for _ in sentences]
    encoded = encode_texts(tokenizer, texts, names=names, dataset=dataset)
    owner = np.repeat(np.arange(len(split)), [len(sentences) for sentences in split])
    pieces = [-(-len(ids) // most) for ids in encoded]
    lengths = [min(most, len(ids) - start) for ids in encoded for start in range(0, len(ids), most)]
    per_document = np.bincount(np.repeat(owner, pieces), minlength=len(split))
    return Sentences(
        np.concatenate([np.zeros(0, np.uint8), *encoded]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(per_document[per_document > 0].astype(np.int64))]),
    )


def pair_layout(
    first: Integer[np.ndarray, " n"],
    second: Integer[np.ndarray, " m"] | None,
    *,
    start_id: int,
    end_id: int,
    separators: int = 1,
) -> tuple[Int32[np.ndarray, " L"], Int32[np.ndarray, " L"]]:
    """One text or two as an encoder reads them: ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``.

    Args:
        first: ids of A.
        second: ids of B; None = A alone.
        start_id: ``[CLS]``.
        end_id: ``[SEP]``.
        separators: how many stand between A and B: one of BERT, two of RoBERTa.

    Returns:
        Ids, and token types: 0 up to the last ``[SEP]`` before B, 1 from there on.

    Raises:
        ValueError: separators is below 1.
    """
    if separators < 1:
        raise ValueError(f"separators is {separators}, must be at least 1.")
    ids = [np.array([start_id]), first, np.full(separators if second is not None else 1, end_id)]
    before = 1 + len(first) + len(ids[-1])
    if second is not None:
        ids += [second, np.array([end_id])]
    tokens = np.concatenate(ids).astype(np.int32)
    return tokens, (np.arange(len(tokens)) >= before).astype(np.int32)


def truncated_lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """Lengths of a pair with at most so many tokens in all, cut one by one from the longer, from B where both are."""
    if first + second <= most:
        return first, second
    if min(first, second) <= most - min(first, second):
        return (most - second, second) if first > second else (first, most - first)
    return most - most // 2, most // 2


@dataclass(frozen=True, eq=False)
class NextSentences:
    """Pairs A, B of neighbouring sentences of a document, or with B from another document.

    Devlin et al. 2019, arXiv:1810.04805, appendix A.2. The documents are cut once into chunks of two sentences or more
    that fill a row. A row's draw cuts its chunk in two between sentences at random; half the time B is what follows A,
    and else as much text from a random sentence of a random other document. Each row is as likely to be one as the
    other, whatever its length, and every epoch draws anew. Unlike in BERT's own code the true rest of a chunk whose B
    is random is not put back: other epochs have it.

    Args:
        sentences: of all documents, none longer than length - 3.
        length: tokens of a row.
        start_id: ``[CLS]``.
        end_id: ``[SEP]``.
        short_fraction: share of chunks that have a random shorter length, as what is read later does.
        seed: of these lengths.

    Raises:
        ValueError: there is only one document, so that none is another; or length or short_fraction is out of range.
    """

    sentences: Sentences
    length: int
    start_id: int
    end_id: int
    short_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self):
        if self.length < 8:
            raise ValueError(f"length is {self.length}, must be at least 8 tokens for a pair of sentences.")
        if not 0.0 <= self.short_fraction <= 1.0:
            raise ValueError(f"short_fraction is {self.short_fraction}, must be in 0 to 1.")
        if len(self) and len(self.sentences.documents) < 3:
            raise ValueError("next-sentence prediction needs two documents or more: B may be from another.")

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def numbers(self) -> int:
        """Random numbers that a row takes."""
        return _FEW + 2 * (-(-3 * self.length // 64))

    @cached_property
    def chunks(self) -> Int64[np.ndarray, "rows 4"]:
        """Document, first sentence, sentence behind the last, and wanted tokens of each row."""
        borders = self.sentences.documents
        found = [
            (document, *chunk)
            for document in range(len(borders) - 1)
            for chunk in self._chunks_of(document, int(borders[document]), int(borders[document + 1]))
        ]
        return np.array(found, np.int64).reshape(-1, 4)

    def _chunks_of(self, document: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Chunks of a document: whole sentences until the wanted length is reached, two or more."""
        most = self.length - 3
        kinds = as_fractions(random_numbers(self.seed, _LAYOUT, 0, document, 2 * (end - first)))
        offsets = self.sentences.offsets
        while end - first > 1:
            short, size = kinds[2 * (first - end) :][:2]
            wanted = 2 + int(size * (most - 1)) if short < self.short_fraction else most
            stop = max(first + 2, int(np.searchsorted(offsets, offsets[first] + wanted)))
            # A sentence left over joins the chunk: alone it has none that follows.
            stop = end if stop >= end - 1 else stop
            yield first, stop, wanted
            first = stop

    def row(self, index: int, numbers: UInt64[np.ndarray, " _"]) -> tuple[np.ndarray, np.ndarray, int]:
        """A row as drawn.

        Args:
            index: which [0, len).
            numbers: ``self.numbers`` uniform random numbers.

        Returns:
            Ids and token types, at most ``length``, and the label: ``IS_NEXT`` or ``IS_RANDOM``.
        """
        document, begin, end, wanted = self.chunks[index].tolist()
        kind, cut, other, place = as_fractions(numbers[:_FEW]).tolist()
        middle = begin + 1 + int(cut * (end - begin - 1))
        first, second = self.sentences.span(begin, middle), self.sentences.span(middle, end)
        label = IS_RANDOM if kind < 0.5 else IS_NEXT
        if label == IS_RANDOM:
            second = self._elsewhere(document, max(1, wanted - len(first)), other, place)
        lengths = truncated_lengths(len(first), len(second), self.length - 3)
        bits = np.split(numbers[_FEW:], 2)
        sides = [_cut(side, size, drawn) for side, size, drawn in zip((first, second), lengths, bits)]
        tokens, types = pair_layout(sides[0], sides[1], start_id=self.start_id, end_id=self.end_id)
        return tokens, types, label

    def _elsewhere(self, document: int, wanted: int, other: float, place: float) -> Integer[np.ndarray, " _"]:
        """Whole sentences from a random one of another document on, until so many tokens are reached."""
        borders, offsets = self.sentences.documents, self.sentences.offsets
        chosen = int(other * (len(borders) - 2))
        chosen += chosen >= document
        begin = int(borders[chosen] + int(place * (borders[chosen + 1] - borders[chosen])))
        stop = int(np.searchsorted(offsets, offsets[begin] + wanted))
        return self.sentences.span(begin, min(stop, int(borders[chosen + 1])))


def _cut(ids: Integer[np.ndarray, " n"], size: int, numbers: UInt64[np.ndarray, " _"]) -> Integer[np.ndarray, " size"]:
    """A text cut to a size, each token away from its beginning or its end by a random bit."""
    bits = np.unpackbits(numbers.astype("<u8").view(np.uint8))[: len(ids) - size]
    start = int(bits.sum())
    return ids[start : start + size]
