"""Full sentences: rows filled with the sentences of one document after the other, as RoBERTa was trained."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32

from jaxformer.data.sentence_pairs import Sentences


@dataclass(frozen=True, eq=False)
class FullSentences:
    """Rows of whole sentences, contiguous, over the ends of documents.

    Liu et al. 2019, arXiv:1907.11692, section 4.2, FULL-SENTENCES: a row is ``<s> A </s> B </s>``, where B begins
    another document. Isolated, each document has a start of its own, ``<s> A </s> <s> B </s>``, and segments and
    positions, so that none sees another.

    Args:
        sentences: of all documents, none longer than length - 2.
        length: tokens of a row.
        start_id: ``<s>``, or ``[CLS]``.
        end_id: ``</s>``, or ``[SEP]``.
        isolated: whether documents in a row are kept apart.

    Raises:
        ValueError: length has no room for a token.
    """

    sentences: Sentences
    length: int
    start_id: int
    end_id: int
    isolated: bool = False

    def __post_init__(self):
        if self.length < 3:
            raise ValueError(f"length is {self.length}, must be at least 3 tokens.")

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def rows(self) -> list[list[tuple[int, int]]]:
        """Of each row its parts, each of one document: first sentence, and the one behind the last."""
        offsets = self.sentences.offsets.tolist()
        rows: list[list[tuple[int, int]]] = []
        room = 0
        for begin, end in zip(self.sentences.documents[:-1].tolist(), self.sentences.documents[1:].tolist()):
            begun = False
            for sentence in range(begin, end):
                size = offsets[sentence + 1] - offsets[sentence]
                marks = 0 if begun else 1 + self.isolated
                if not rows or size + marks > room:
                    rows.append([])
                    room = self.length - (0 if self.isolated else 1)
                    marks, begun = 1 + self.isolated, False
                room -= size + marks
                first = rows[-1].pop()[0] if begun else sentence
                rows[-1].append((first, sentence + 1))
                begun = True
        return rows

    def row(self, index: int) -> tuple[Int32[np.ndarray, " L"], Int32[np.ndarray, " L"], Int32[np.ndarray, " L"]]:
        """Ids of a row, at most ``length``; and for isolated documents segments 1, 2, … and positions in each."""
        parts = []
        for place, (first, end) in enumerate(self.rows[index]):
            start = [self.start_id] if self.isolated or place == 0 else []
            parts.append(np.concatenate([start, self.sentences.span(first, end), [self.end_id]]).astype(np.int32))
        sizes = [len(part) for part in parts]
        segments = np.repeat(np.arange(1, len(parts) + 1, dtype=np.int32), sizes)
        positions = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        return np.concatenate(parts), segments, positions
