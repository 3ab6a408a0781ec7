"""Rows for masked language modelling: sentences as they are laid out, with tokens chosen anew in every epoch."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from jaxformer.data.full_sentences import FullSentences
from jaxformer.data.masking import EVALUATION, TRAINING, Masking, row_numbers
from jaxformer.data.packing import IGNORE_LABEL, Batch
from jaxformer.data.sentence_pairs import NextSentences


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Rows of which some tokens are to be predicted: a ``DrawnRows``.

    Args:
        texts: the rows without masks; pairs of sentences are drawn with the masks.
        masking: how tokens are chosen and replaced.
        maskable: whether each id may be chosen: True for all that are not special [V].
        pad_id: fills rows.
        evaluation_seed: of the draw that ``batch`` has.
        dynamic: whether each epoch has its own draw (RoBERTa); False = all have that of the first ("static").
    """

    texts: NextSentences | FullSentences
    masking: Masking
    maskable: Bool[np.ndarray, " V"]
    pad_id: int
    evaluation_seed: int = 0
    dynamic: bool = True

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.texts.length

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, always drawn alike; ``len(self)`` or more gives a row that is all padding."""
        return self._batch(self.evaluation_seed, EVALUATION, np.zeros(len(indices), np.int64), indices)

    def drawn_batch(self, seed: int, epochs: Integer[np.ndarray, " B"], indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, as drawn in an epoch of a seed.

        Returns:
            tokens (what the model sees) and targets (the ids at chosen places, -100 elsewhere) int32 [B, length], and
            of pairs of sentences key_mask bool, token_types int32 [B, length] (0, and 1 in the second) and
            next_sentence int32 [B] (0: it follows, 1: it is random, -100: no row); of full rows key_mask; of full rows
            with isolated documents segments (1, 2, …; 0 = padding) and positions int32 [B, length] in its place.
        """
        return self._batch(seed, TRAINING, epochs if self.dynamic else np.zeros_like(epochs), indices)

    def _batch(
        self, seed: int, stream: int, epochs: Integer[np.ndarray, " B"], indices: Integer[np.ndarray, " B"]
    ) -> Batch:
        pairs = self.texts if isinstance(self.texts, NextSentences) else None
        own = pairs.numbers if pairs else 0
        numbers = row_numbers(seed, stream, epochs.tolist(), indices.tolist(), (3 * self.length + own,))
        batch = self._pairs(pairs, indices, numbers[:, 3 * self.length :]) if pairs else self._full(indices)
        masks = numbers[:, : 3 * self.length].reshape(len(indices), 3, self.length)
        real = batch["segments"] > 0 if "segments" in batch else batch["key_mask"]
        maskable = self.maskable[batch["tokens"]] & real
        batch["tokens"], batch["targets"] = self.masking.apply(batch["tokens"], maskable, masks)
        return batch

    def _pairs(
        self, texts: NextSentences, indices: Integer[np.ndarray, " B"], numbers: UInt64[np.ndarray, "B n"]
    ) -> Batch:
        tokens, types, mask = self._empty(len(indices))
        labels = np.full(len(indices), IGNORE_LABEL, np.int32)
        for row, index in enumerate(indices.tolist()):
            if index < len(self):
                ids, kinds, labels[row] = texts.row(index, numbers[row])
                tokens[row, : len(ids)], types[row, : len(ids)], mask[row, : len(ids)] = ids, kinds, True
        return {"tokens": tokens, "token_types": types, "key_mask": mask, "next_sentence": labels}

    def _full(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        assert isinstance(self.texts, FullSentences)
        tokens, segments, mask = self._empty(len(indices))
        positions = np.zeros_like(tokens)
        for row, index in enumerate(indices.tolist()):
            if index < len(self):
                ids, parts, places = self.texts.row(index)
                tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
                segments[row, : len(ids)], positions[row, : len(ids)] = parts, places
        if self.texts.isolated:
            return {"tokens": tokens, "segments": segments, "positions": positions}
        return {"tokens": tokens, "key_mask": mask}

    def _empty(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = (count, self.length)
        return np.full(shape, self.pad_id, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)

    def counts(self) -> Int64[np.ndarray, " V"]:
        """How often each id may be chosen in all sentences."""
        tokens = self.texts.sentences.tokens
        return np.bincount(tokens, minlength=len(self.maskable)) * self.maskable
