"""From a text dataset to what an encoder is pretrained on (masks), or an encoder-decoder (spans)."""

import functools
from collections.abc import Callable

import numpy as np

from jaxformer.data.datasets import Documents, load_documents
from jaxformer.data.full_sentences import FullSentences
from jaxformer.data.masked_rows import MaskedRows
from jaxformer.data.masking import Masking
from jaxformer.data.pair_data import decoder_start
from jaxformer.data.pretraining_data import PretrainingData
from jaxformer.data.sentence_pairs import NextSentences, encode_sentences
from jaxformer.data.span_corruption import SpanRows, corrupt_spans, noise_counts, raw_length, span_mask, split_prefix
from jaxformer.data.splits import limit_bytes, split_documents
from jaxformer.data.tokenizer_training import TRAINERS, train_tokenizer
from jaxformer.data.tokenizers import Tokenizer, encode_texts, load_tokenizer
from jaxformer.data.vocabulary import (
    mask_id,
    ordinary_ids,
    sentinel_ids,
    with_mask,
    with_sentinels,
    word_starts,
)

MASKED, SPANS = "masked:", "spans:"
"""What a config puts in front of a dataset's name for these data."""

SENTENCES = ("pairs", "full", "isolated")
OBJECTIVES = ("spans", "prefix")


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument} is {value!r}; must be one of {', '.join(choices)}.")


def _split(
    name: str, path: str | None, field: str | None, fraction: float, most: int | None, seed: int
) -> tuple[Documents, Documents]:
    """Training and validation documents."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_fraction is {fraction}; must be above 0 and below 1.")
    documents = load_documents(name, path=path, field=field)
    train, validation = split_documents(documents, fraction, seed=seed)
    return train, limit_bytes(validation, most, seed=seed)


def _tokenizer(tokenizer: str | Tokenizer, documents: Documents, size: int, lowercase: bool) -> Tokenizer:
    """The tokenizer that is named, or one trained on the documents."""
    if isinstance(tokenizer, str) and tokenizer in TRAINERS:
        return train_tokenizer(tokenizer, documents.texts, size, lowercase=lowercase, name=tokenizer)
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer


def _ends(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids in front of a row and behind a text."""
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise ValueError(f"tokenizer {tokenizer.name!r} has no start or no end token, which a row needs.")
    return tokenizer.bos_id, tokenizer.eos_id


def _corrupt(
    piece: np.ndarray, numbers: np.ndarray, *, density: float, mean_span: float, sentinels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of a piece of text, without ends."""
    return corrupt_spans(piece, span_mask(len(piece), density, mean_span, numbers), sentinels)


def _checked(data: PretrainingData) -> PretrainingData:
    """The data, which have rows on both sides."""
    for side, rows in (("training", data.train_rows), ("validation", data.validation_rows)):
        if not len(rows):
            raise ValueError(f"{data.train_documents.source}: the {side} documents have too little text for a row.")
    return data


def load_masked_language_data(
    *,
    name: str = "python_docs",
    path: str | None = None,
    field: str | None = None,
    tokenizer: str | Tokenizer = "wordpiece",
    tokenizer_size: int = 8192,
    lowercase: bool = False,
    length: int = 128,
    sentences: str = "pairs",
    masking: str = "dynamic",
    whole_words: bool = False,
    mask_fraction: float = 0.15,
    short_fraction: float = 0.1,
    validation_fraction: float = 0.05,
    validation_bytes: int | None = None,
    split_seed: int = 0,
) -> PretrainingData:
    """Loads text for masked language modelling, with next-sentence prediction or without.

    Args:
        name: a dataset of ``DATASETS``, with "masked:" in front or not.
        path: where its files are, if it needs that.
        field: which field holds the text, if it needs that.
        tokenizer: "wordpiece", "bpe" or "unigram": trained on the training text; or "bytes", a ``tokenizer.json`` or
            its folder, or a tokenizer. One without a mask token gets ``[MASK]`` at its end.
        tokenizer_size: tokens at most of one that is trained.
        lowercase: whether one that is trained drops capitals and accents (wordpiece only).
        length: tokens a row.
        sentences: "pairs": two a row, to tell whether they follow each other (BERT); "full": rows full of sentences
            (RoBERTa); "isolated": the same, documents in a row kept apart.
        masking: "dynamic": tokens and pairs are drawn anew in every epoch; "static": as in the first.
        whole_words: whether all tokens of a word are chosen or none.
        mask_fraction: share of tokens that are chosen.
        short_fraction: share of pairs that have a random shorter length.
        validation_fraction: share of documents for validation, in (0, 1).
        validation_bytes: validation text at most, bytes; None = all.
        split_seed: chooses the documents for validation, the shorter lengths, and the draw of validation.

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, or there is no text.
    """
    _check_choice("sentences", sentences, SENTENCES)
    _check_choice("masking", masking, ("dynamic", "static"))
    train, validation = _split(
        name.removeprefix(MASKED), path, field, validation_fraction, validation_bytes, split_seed
    )
    loaded = with_mask(_tokenizer(tokenizer, train, tokenizer_size, lowercase))
    start, end = _ends(loaded)
    ordinary = ordinary_ids(loaded)
    maskable = np.isin(np.arange(loaded.vocab_size), ordinary)
    choice = Masking(mask_id(loaded), ordinary, word_starts(loaded) if whole_words else None, mask_fraction)

    def rows(documents: Documents) -> MaskedRows:
        most = length - (3 if sentences == "pairs" else 2)
        if most < 5:
            raise ValueError(f"length is {length}, must be at least 8 tokens.")
        encoded = encode_sentences(documents, loaded, dataset=name, most=most)
        texts: NextSentences | FullSentences
        if sentences == "pairs":
            texts = NextSentences(encoded, length, start, end, short_fraction, split_seed)
        else:
            texts = FullSentences(encoded, length, start, end, sentences == "isolated")
        return MaskedRows(texts, choice, maskable, loaded.pad_id, split_seed, masking == "dynamic")

    words = "whole words" if whole_words else "tokens"
    layout = f"{sentences} of sentences in rows of {length}, {mask_fraction:.0%} of {words} masked ({masking})"
    return _checked(PretrainingData(rows(train), rows(validation), loaded, layout, train, validation))


def load_span_corruption_data(
    *,
    name: str = "python_docs",
    path: str | None = None,
    field: str | None = None,
    tokenizer: str | Tokenizer = "unigram",
    tokenizer_size: int = 8192,
    lowercase: bool = False,
    length: int = 128,
    objective: str = "spans",
    density: float = 0.15,
    mean_span: float = 3.0,
    masking: str = "dynamic",
    validation_fraction: float = 0.05,
    validation_bytes: int | None = None,
    split_seed: int = 0,
) -> PretrainingData:
    """Loads text for span corruption (T5), or for prefix language modelling.

    Rows run over the ends of documents without a sign, as T5's.

    Args:
        name: a dataset of ``DATASETS``, with "spans:" in front or not.
        path: where its files are, if it needs that.
        field: which field holds the text, if it needs that.
        tokenizer: as of ``load_masked_language_data``; one without sentinels gets 100 at its end.
        tokenizer_size: tokens at most of one that is trained, sentinels aside.
        lowercase: whether one that is trained drops capitals and accents (wordpiece only).
        length: tokens of a source row, its end included; targets have what belongs to that.
        objective: "spans", or "prefix": the beginning is given and the rest is written.
        density: share of tokens cut out.
        mean_span: mean tokens of a span.
        masking: "dynamic": spans are drawn anew in every epoch; "static": as in the first.
        validation_fraction: share of documents for validation, in (0, 1).
        validation_bytes: validation text at most, bytes; None = all.
        split_seed: chooses the documents for validation, and the draw of validation.

    Returns:
        The data; batches have the keys of pairs.

    Raises:
        ValueError: an argument cannot be used, there are too few sentinels, or there is no text.
    """
    _check_choice("objective", objective, OBJECTIVES)
    _check_choice("masking", masking, ("dynamic", "static"))
    raw, target = raw_length(length, density, mean_span)
    train, validation = _split(name.removeprefix(SPANS), path, field, validation_fraction, validation_bytes, split_seed)
    loaded = with_sentinels(_tokenizer(tokenizer, train, tokenizer_size, lowercase))
    _, end = _ends(loaded)
    sentinels = sentinel_ids(loaded)
    spans = noise_counts(raw, density, mean_span)[1]
    if objective == "spans" and spans > len(sentinels):
        raise ValueError(
            f"length is {length}: with density {density} and mean_span {mean_span} a row has {spans} spans, but "
            f"tokenizer {loaded.name!r} has {len(sentinels)} sentinels."
        )
    draw: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    if objective == "prefix":
        raw, target, draw = length, length, split_prefix
    else:
        draw = functools.partial(_corrupt, density=density, mean_span=mean_span, sentinels=sentinels)

    def rows(documents: Documents) -> SpanRows:
        encoded = encode_texts(loaded, documents.texts, names=documents.names, dataset=name)
        tokens = np.concatenate([np.zeros(0, np.uint8), *encoded])
        ids = (decoder_start(loaded), end, loaded.pad_id)
        return SpanRows(tokens, raw, (length, target), draw, *ids, split_seed, masking == "dynamic")

    what = f"{density:.0%} in spans of {mean_span:g} cut out" if objective == "spans" else "a prefix given"
    layout = f"pieces of {raw} tokens in rows of {length} to {target}, {what} ({masking})"
    return _checked(PretrainingData(rows(train), rows(validation), loaded, layout, train, validation))
