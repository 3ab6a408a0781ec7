"""Documents of token ids laid out in rows of one length, each (input, target) pair exactly once.

The one shift of language modelling is done here: ``targets`` is ``tokens`` moved by one inside each document, and no
later part shifts again. The rows are computed when asked for, from one flat array of all ids, so laying out costs
nothing and a row set holds each token once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Int64, Integer

IGNORE_LABEL = -100
"""The target of a position that is not scored."""

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of ``length`` pairs over the pairs of all documents, one document after the other.

    A document of n ids has n - 1 pairs (id, next id). All pairs stand in one line, which is cut every ``length`` pairs:
    every row but the last is full, and a document that meets a cut goes on in the next row.

    Args:
        tokens: ids of all documents, one after the other [N].
        offsets: where each document starts in tokens, and N at the end [D + 1]; each document has two ids or more.
        length: pairs in a row (tokens).
        isolated: whether rows carry segments and positions, so that documents do not see each other.
        pad_id: the id that fills the end of the last row; it has target -100 and segment 0.
    """

    tokens: Integer[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " boundaries"]
    length: int
    isolated: bool = True
    pad_id: int = 0

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length is {self.length}: a row must have at least 1 token.")

    @property
    def num_pairs(self) -> int:
        """Scored (input, target) pairs in all rows."""
        return int(self.offsets[-1]) - (len(self.offsets) - 1)

    @property
    def num_documents(self) -> int:
        """Documents that have at least one pair."""
        return len(self.offsets) - 1

    @property
    def fill(self) -> float:
        """Fraction of the row positions that hold a pair, in [0, 1]."""
        return self.num_pairs / max(1, len(self) * self.length)

    @cached_property
    def _first_pairs(self) -> Int64[np.ndarray, " D"]:
        """First pair of each document. It has one pair less than ids, so pair k of document d stands at id k + d."""
        return self.offsets[:-1] - np.arange(self.num_documents)

    def __len__(self) -> int:
        return -(-self.num_pairs // self.length)

    def __getitem__(self, index: int) -> Batch:
        """The row ``index`` (0 <= index < len) as arrays [length]."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {name: array[0] for name, array in self.batch(np.array([index])).items()}

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, as the training step takes them.

        Args:
            indices: rows wanted [B]; ``len(self)`` or more gives an empty row (all padding).

        Returns:
            tokens and targets, and if isolated segments (1, 2, .. in the row; 0 = padding) and positions (0, 1, ..
            from the start of the document, or of the row where the document began in an earlier one), each int32
            [B, length]. Targets are -100 where there is no pair.
        """
        pair = indices.astype(np.int64)[:, None] * self.length + np.arange(self.length)
        real = pair < self.num_pairs
        pair = np.where(real, pair, 0)
        document = np.searchsorted(self._first_pairs, pair, side="right") - 1
        place = pair + document
        batch = {
            "tokens": np.where(real, self.tokens[place], self.pad_id),
            "targets": np.where(real, self.tokens[place + 1].astype(np.int32), IGNORE_LABEL),
        }
        if self.isolated:
            began = np.maximum(self._first_pairs[document], pair[:, :1])
            batch["segments"] = np.where(real, document - document[:, :1] + 1, 0)
            batch["positions"] = np.where(real, pair - began, 0)
        return {name: array.astype(np.int32) for name, array in batch.items()}


def join_documents(
    documents: Sequence[Integer[np.ndarray, " _"]], *, start_id: int | None = None, end_id: int | None = None
) -> tuple[Integer[np.ndarray, " N"], Int64[np.ndarray, " boundaries"]]:
    """All documents in one array, with a start and an end id around each.

    Args:
        documents: ids of each document, any integer type.
        start_id: put before each document, if given.
        end_id: put after each document, if given.

    Returns:
        The ids [N], as uint16 where they fit and int32 otherwise, and the start of each document, and N, int64 [D + 1].
        A document that ends up with fewer than two ids has nothing to predict and is left out.
    """
    edges = (start_id is not None) + (end_id is not None)
    documents = [document for document in documents if len(document) + edges >= 2]
    lengths = np.array([len(document) + edges for document in documents], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.empty(offsets[-1], _id_type([*documents, np.array([start_id or 0, end_id or 0])]))
    inset = int(start_id is not None)
    for document, offset in zip(documents, offsets, strict=False):
        tokens[offset + inset : offset + inset + len(document)] = document
    if start_id is not None:
        tokens[offsets[:-1]] = start_id
    if end_id is not None:
        tokens[offsets[1:] - 1] = end_id
    return tokens, offsets


def _id_type(documents: Sequence[np.ndarray]) -> type:
    """Uint16 if every id fits, else int32; -1 and below stay visible for ``check_ids``."""
    small = all(
        array.dtype in (np.uint8, np.uint16) or not array.size or (array.min() >= 0 and array.max() < 2**16)
        for array in documents
    )
    return np.uint16 if small else np.int32


def pack_documents(documents: Sequence[np.ndarray], length: int, *, pad_id: int = 0) -> TokenRows:
    """Full rows in which documents never see each other: segment ids, and positions that restart.

    Args:
        documents: ids of each document, start and end ids included where wanted.
        length: tokens in a row.
        pad_id: fills the end of the last row.

    Returns:
        The rows: each (input, target) pair of each document exactly once. A document that meets the end of a row goes
        on in the next one, without sight of its first part, its positions starting again at 0.
    """
    tokens, offsets = join_documents([np.asarray(document) for document in documents])
    return TokenRows(tokens, offsets, length, isolated=True, pad_id=pad_id)


def stream_documents(documents: Sequence[np.ndarray], length: int, *, pad_id: int = 0) -> TokenRows:
    """One long stream of all documents, cut in rows: no segments, so a row sees across document borders.

    The rows hold the same pairs in the same places as ``pack_documents``: where a document ends, its last id is the
    target of the position before, and the next document's first id (its start id) is the next input. With a tokenizer
    whose start and end ids are one, as GPT-2's, that is the usual stream with one separator between documents.

    Args and Returns: as ``pack_documents``.
    """
    tokens, offsets = join_documents([np.asarray(document) for document in documents])
    return TokenRows(tokens, offsets, length, isolated=False, pad_id=pad_id)


def check_ids(
    tokens: Int[np.ndarray, " N"] | Integer[np.ndarray, " N"],
    offsets: Int64[np.ndarray, " boundaries"],
    *,
    vocab_size: int,
    dataset: str,
    names: Sequence[str],
) -> None:
    """Refuses ids that the model has no embedding for.

    Args:
        tokens: ids of all documents [N].
        offsets: start of each document, and N [D + 1].
        vocab_size: ids must be in 0 .. vocab_size - 1.
        dataset: name of the dataset, for the message.
        names: name of each document [D], for the message.

    Raises:
        ValueError: an id is negative or not below vocab_size; names the dataset, the document, the id and the size.
    """
    if not tokens.size or (tokens.max() < vocab_size and tokens.min() >= 0):
        return
    place = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
    document = int(np.searchsorted(offsets, place, side="right")) - 1
    raise ValueError(
        f"dataset {dataset!r}, document {names[document]!r}: token id {int(tokens[place])} at position "
        f"{place - int(offsets[document])} is outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1})."
    )
