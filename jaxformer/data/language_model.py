"""From a dataset's name to training and validation rows of a language model."""

import functools
import hashlib
import math
from dataclasses import dataclass, field

from jaxformer.data import baselines
from jaxformer.data.datasets import Documents, load_documents
from jaxformer.data.packing import TokenRows, check_ids, join_documents
from jaxformer.data.splits import limit_bytes, split_documents
from jaxformer.data.tokenizers import Tokenizer, encode_texts, load_tokenizer

PACKINGS = ("packed", "contiguous")


@dataclass(frozen=True)
class LanguageModelData:
    """Rows, and what is needed to read their loss.

    Args:
        train_rows: rows of the training documents; none if all are validation.
        validation_rows: rows of the validation documents.
        tokenizer: that of the rows.
        source: where the documents come from.
        train_documents: training text.
        validation_documents: validation text, cut to the cap.
    """

    train_rows: TokenRows
    validation_rows: TokenRows
    tokenizer: Tokenizer
    source: str
    train_documents: Documents = field(repr=False)
    validation_documents: Documents = field(repr=False)

    @functools.cached_property
    def hash(self) -> str:
        """Digest of all that training reads, ids, borders, length and packing: 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        for rows in (self.train_rows, self.validation_rows):
            for array in (rows.tokens, rows.offsets):
                # Bytes in one order on every machine; copied only where they are not so already.
                digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
            digest.update(f"{rows.tokens.dtype.kind} {rows.length} {rows.isolated} {rows.pad_id};".encode())
        return digest.hexdigest()

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self.train_rows.length

    @property
    def buckets(self) -> dict[str, TokenRows]:
        """Rows that are evaluated apart by name: none here."""
        return {}

    @property
    def bits_per(self) -> dict[str, int]:
        """What bits of the whole validation text are divided by, by the figure's name."""
        return {"bits_per_byte": self.validation_bytes}

    @property
    def baselines(self) -> str:
        """A line on what predictors that need no model reach on the validation text; takes up to a second."""
        return (
            f"for scale, on the validation text: unigram entropy {self.unigram_loss:.4f} nats per token = "
            f"{self.unigram_bits_per_byte:.4f} bits per byte; lzma {self.lzma_bits_per_byte:.4f} bits per byte"
        )

    @property
    def validation_bytes(self) -> int:
        """UTF-8 bytes of the validation text: what bits per byte divide by."""
        return self.validation_documents.num_bytes

    @functools.cached_property
    def unigram_loss(self) -> float:
        """Nats per validation token of the predictor that knows the training frequencies only (see ``baselines``)."""
        train, validation = self.train_rows, self.validation_rows
        return baselines.unigram_loss(
            train.tokens, train.offsets, validation.tokens, validation.offsets, self.tokenizer.vocab_size
        )

    @property
    def unigram_bits_per_byte(self) -> float:
        """The unigram predictor's loss over all validation tokens, in bits, by the bytes of their text."""
        return self.unigram_loss * self.validation_rows.num_pairs / math.log(2.0) / self.validation_bytes

    @functools.cached_property
    def lzma_bits_per_byte(self) -> float:
        """Bits per byte of the validation text alone (its first million bytes) under LZMA; takes up to a second."""
        return baselines.lzma_bits_per_byte(self.validation_documents.texts)

    @property
    def summary(self) -> str:
        """A line on source, tokenizer, and sizes of both sides."""
        sides = [
            f"{name} {len(documents.texts):,} documents, {documents.num_bytes:,} bytes, {rows.num_pairs:,} tokens in "
            f"{len(rows):,} rows of {rows.length}"
            for name, documents, rows in (
                ("training", self.train_documents, self.train_rows),
                ("validation", self.validation_documents, self.validation_rows),
            )
        ]
        skipped = self.train_documents.skipped
        left_out = f" ({skipped} files or entries skipped: empty or unreadable)" if skipped else ""
        return f"{self.source}{left_out}; {'; '.join(sides)}; tokenizer {self.tokenizer.summary}"


def load_language_model_data(
    *,
    name: str = "python_stdlib",
    path: str | None = None,
    field: str | None = None,
    tokenizer: str | Tokenizer = "bytes",
    length: int = 256,
    packing: str = "packed",
    validation_fraction: float = 0.05,
    training_bytes: int | None = None,
    validation_bytes: int | None = None,
    vocab_size: int | None = None,
    split_seed: int = 0,
) -> LanguageModelData:
    """Loads text, splits it, turns it into ids and lays them out in rows.

    Each document stands between the tokenizer's start and end ids, so that its first token and its end are predicted.

    Args:
        name: a dataset of ``DATASETS``.
        path: where its files are, if it needs that.
        field: which field holds the text, if it needs that.
        tokenizer: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer.
        length: tokens a row.
        packing: "packed": documents never see each other (segments, positions that restart); "contiguous": one stream
            of all documents, cut in rows.
        validation_fraction: share of documents for validation, in (0, 1]; at 1 all are, and there are no rows to train
            on (see ``split_documents``).
        training_bytes: training text at most, bytes; None = all. It does not change the validation data.
        validation_bytes: validation text at most, bytes; None = all. What is over is used for nothing, so the cap
            does not change the training data.
        vocab_size: ids must be below it; None = the tokenizer's.
        split_seed: chooses the documents for validation.

    Returns:
        The data; its baselines are computed when first asked for.

    Raises:
        ValueError: an argument cannot be used, there is no text, or an id is out of range.
    """
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; must be one of {', '.join(PACKINGS)}.")
    if length < 1:
        raise ValueError(f"length is {length}, must be at least 1 token.")
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    documents = load_documents(name, path=path, field=field)
    train, validation = split_documents(documents, validation_fraction, seed=split_seed)
    train = limit_bytes(train, training_bytes, seed=split_seed, name="training_bytes")
    validation = limit_bytes(validation, validation_bytes, seed=split_seed)

    def rows(side: Documents) -> TokenRows:
        return _make_rows(side, loaded, name, length, packing == "packed", vocab_size or loaded.vocab_size)

    return LanguageModelData(rows(train), rows(validation), loaded, documents.source, train, validation)


def _make_rows(
    documents: Documents, tokenizer: Tokenizer, dataset: str, length: int, isolated: bool, vocab_size: int
) -> TokenRows:
    encoded = encode_texts(tokenizer, documents.texts, names=documents.names, dataset=dataset)
    tokens, offsets = join_documents(encoded, start_id=tokenizer.bos_id, end_id=tokenizer.eos_id)
    edges = (tokenizer.bos_id is not None) + (tokenizer.eos_id is not None)
    names = [name for name, document in zip(documents.names, encoded) if len(document) + edges >= 2]
    check_ids(tokens, offsets, vocab_size=vocab_size, dataset=dataset, names=names)
    return TokenRows(tokens, offsets, length, isolated=isolated, pad_id=min(tokenizer.pad_id, vocab_size - 1))
