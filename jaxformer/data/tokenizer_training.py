"""Training a tokenizer on text: byte-level BPE, WordPiece, or a SentencePiece-style unigram model."""

import collections
import glob
import itertools
import json
import os
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformer.data.datasets import DATASETS, find_files, load_documents
from jaxformer.data.pairs import tsv_pairs
from jaxformer.data.subword_tokenizer import SubwordTokenizer

_PLAIN_MARKS = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}
_BERT_MARKS = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]"}
# Words with the space before them, runs of signs, runs of blanks: what a unigram piece stays within.
_UNIGRAM_WORDS = r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+"
# Below every real piece's log-probability: a byte piece is for bytes, never for text that looks like its name.
_BYTE_PIECE_SCORE = -1e4


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = False,
    extra_special_tokens: tuple[str, ...] = (),
    name: str | None = None,
) -> SubwordTokenizer:
    """Trains a tokenizer on texts.

    ===========  ====================================================================================================
    bpe          Byte pairs (Sennrich et al. 2016, arXiv:1508.07909) over bytes as in GPT-2: any text, kept exactly.
    wordpiece    BERT's (Devlin et al. 2019, arXiv:1810.04805): blanks are not kept, unknown signs become ``[UNK]``.
    unigram      Kudo 2018, arXiv:1804.10959, blanks as ``▁`` as SentencePiece has them, unknown signs as bytes: any
                 text is kept exactly, but for the sign ``▁`` itself, which comes back as a blank.
    ===========  ====================================================================================================

    Args:
        kind: "bpe", "wordpiece" or "unigram".
        texts: the texts, read once.
        vocab_size: tokens at most, special ones included; text with fewer pieces gives fewer.
        lowercase: whether capitals and accents are dropped (wordpiece only).
        extra_special_tokens: further special tokens, after start, end and padding.
        name: for messages.

    Returns:
        The tokenizer, with start, end and padding tokens.

    Raises:
        ValueError: unknown kind, a vocabulary too small for it, lowercase for another kind, or no text.
    """
    if kind not in TRAINERS:
        raise ValueError(f"kind is {kind!r}; must be one of {', '.join(TRAINERS)}.")
    if lowercase and kind != "wordpiece":
        raise ValueError(f"lowercase is only for wordpiece: {kind} keeps text as it is.")
    marks = _BERT_MARKS if kind == "wordpiece" else _PLAIN_MARKS
    least = 0 if kind == "wordpiece" else 256
    if vocab_size < least + len(marks) + 2 + len(extra_special_tokens):
        raise ValueError(
            f"vocab_size is {vocab_size}: {kind} needs more than {least + len(marks) + 1 + len(extra_special_tokens)}."
        )
    pieces = _pieces(texts)
    first = next(pieces, None)
    if first is None:
        raise ValueError("there is no text to train a tokenizer on.")
    pieces = itertools.chain([first], pieces)
    arguments = {"lowercase": lowercase} if kind == "wordpiece" else {}
    backend = TRAINERS[kind](pieces, vocab_size, [*marks.values()], list(extra_special_tokens), **arguments)
    return SubwordTokenizer(backend, name=name or kind, special_tokens=marks)


def _pieces(texts: Iterable[str], characters: int = 200_000) -> Iterator[str]:
    """Texts in pieces of bounded size, cut at line breaks: the library's memory grows with the longest."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + characters
            end = text.find("\n", end) + 1 or len(text) if end < len(text) else len(text)
            yield text[start:end]
            start = end


def _train_bpe(pieces: Iterable[str], vocab_size: int, marks: list[str], extra: list[str]) -> Any:
    """GPT-2's byte-level byte pairs: every byte has a token, so nothing is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=marks + extra,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pieces, trainer)
    return backend


def _train_wordpiece(
    pieces: Iterable[str], vocab_size: int, marks: list[str], extra: list[str], lowercase: bool
) -> Any:
    """BERT's normalisation, words and ``##`` continuations."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*marks, "[UNK]", "[MASK]", *extra], show_progress=False
    )
    backend.train_from_iterator(pieces, trainer)
    return backend


def _train_unigram(pieces: Iterable[str], vocab_size: int, marks: list[str], extra: list[str]) -> Any:
    """Unigram pieces with blanks as ``▁``; what has no piece is spelled in byte pieces, as SentencePiece does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = {*string.printable, "▁"}
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UNIGRAM_WORDS), "isolated"),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False),
        ]
    )
    specials = [*marks, "<unk>", *extra]
    kept, characters = _without_rare_characters(pieces)
    if vocab_size - 256 <= len(specials) + len(characters | alphabet):
        raise ValueError(
            f"vocab_size is {vocab_size}: unigram needs more than {256 + len(specials) + len(characters | alphabet)} "
            "for the bytes, special tokens and characters of this text."
        )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=specials,
        unk_token="<unk>",
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(kept, trainer)
    model = json.loads(learner.to_str())["model"]
    vocabulary = [(piece, score) for piece, score in model["vocab"]]
    vocabulary += [(f"<0x{byte:02X}>", _BYTE_PIECE_SCORE) for byte in range(256)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=model["unk_id"], byte_fallback=True))
    backend.pre_tokenizer = learner.pre_tokenizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(specials)
    return backend


def _without_rare_characters(pieces: Iterable[str], coverage: float = 0.9995) -> tuple[list[str], set[str]]:
    """The text with blanks for its rarest characters, and the others: each would need a piece, and bytes can spell it.

    ``coverage`` is the share of the text that the characters kept make up; SentencePiece's default.
    """
    texts = list(pieces)
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(text)
    most, covered = coverage * counts.total(), 0
    kept: set[str] = set()
    for character, count in counts.most_common():
        if covered >= most:
            break
        kept.add(character)
        covered += count
    rare = {ord(character): " " for character in counts.keys() - kept}
    return [text.translate(rare) for text in texts], kept


TRAINERS: dict[str, Callable[..., Any]] = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}
"""Kinds of tokenizer that can be trained."""


def train_tokenizer_from_files(
    *,
    kind: str,
    vocab_size: int,
    input: str,
    output: str | os.PathLike[str],
    field: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Trains a tokenizer on the text of files, or of a dataset, and writes its ``tokenizer.json``.

    A joint tokenizer of pairs is trained on both sides: input ``"train.en.gz,train.de.gz"`` of parallel files, or field
    ``"source,target"`` of one file of pairs. One of a single side names that alone.

    Args:
        kind: "bpe", "wordpiece" or "unigram".
        vocab_size: tokens at most, special ones included.
        input: a text file, folder or glob, or several with commas between them; or the name of a dataset that needs no
            path. With ``field`` JSON-lines, or tables if the names end in .tsv or .tsv.gz; gzip accepted in all.
        output: the file to write, or a folder for it.
        field: the field of the JSON objects that holds the text, or the column of the table (a number from 0, or a name
            that the first line gives); or several with commas between them.
        lowercase: whether capitals and accents are dropped (wordpiece only).

    Returns:
        Figures that JSON can hold: output, tokenizer (a line on it), vocab_size, documents, bytes, bytes_per_token
        (over a million characters or so from the first documents).

    Raises:
        ValueError: the input has no text, or as ``train_tokenizer``.
    """
    texts = _read_texts(input, field)
    tokenizer = train_tokenizer(kind, texts, vocab_size, lowercase=lowercase, name=str(output))
    tokenizer.save(output)
    sample = "\n".join(text[: 1_000_000 // min(len(texts), 50)] for text in texts[:50])
    return {
        "output": str(output),
        "tokenizer": tokenizer.summary,
        "vocab_size": tokenizer.vocab_size,
        "documents": len(texts),
        "bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
        "bytes_per_token": round(len(sample.encode()) / len(tokenizer.encode(sample)), 3),
    }


def _read_texts(input: str, field: str | None) -> list[str]:
    """All texts of the input."""
    if input in DATASETS and not Path(input).exists():
        return list(load_documents(input, field=field).texts)
    # A comma may be part of a name: what is there as a whole is taken so.
    paths = [input] if Path(input).expanduser().exists() or glob.glob(input) else input.split(",")
    if field is None:
        return [text for path in paths for text in load_documents("text", path=path).texts]
    files = [str(file) for path in paths for _, file in find_files("jsonl", path)]
    return [text for file, name in itertools.product(files, field.split(",")) for text in _read_field(file, name)]


def _read_field(file: str, field: str) -> Sequence[str]:
    """The texts in a column of a table or a field of JSON lines."""
    if not file.removesuffix(".gz").endswith(".tsv"):
        return load_documents("jsonl", path=file, field=field).texts
    return [text for text in tsv_pairs((file,), (field, field)).sources if text]
