"""Words with a tag each, in CoNLL's columns: named entities, read, turned into rows, and kept to predict from."""

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from jaxformer.data.example_rows import ExampleRows
from jaxformer.data.hub import hub_column, load_hub_rows, paths_of_split
from jaxformer.data.packing import IGNORE_LABEL
from jaxformer.data.pairs import read_lines
from jaxformer.data.sentence_pairs import pair_layout
from jaxformer.data.task_data import TaskData, in_groups, read_splits, task_tokenizer
from jaxformer.data.tokenizers import Tokenizer, encode_texts

OUTSIDE = "O"
TAG_FILES = ("conll", "huggingface_tags")
"""What ``load_tagging_data`` reads."""


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences of words, in the order of the file.

    Args:
        names: file and first line of each sentence.
        words: the words of each.
        tags: a tag for each word: ``O``, ``B-class`` or ``I-class``; None = there are none, only to predict.
        source: where they come from.
    """

    names: Sequence[str]
    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]] | None
    source: str

    def __len__(self) -> int:
        return len(self.words)

    def take(self, indices: Sequence[int]) -> "TaggedSentences":
        """Some of the sentences."""
        tags = None if self.tags is None else [self.tags[index] for index in indices]
        names, words = [self.names[index] for index in indices], [self.words[index] for index in indices]
        return TaggedSentences(names, words, tags, self.source)


@dataclass(frozen=True, eq=False)
class TaggingExamples:
    """Sentences as words and as rows.

    Args:
        sentences: the words, with their tags.
        rows: of each sentence a row; ``targets`` are class ids at the first token of each word and -100 elsewhere.
        firsts: the place in its row of each word's first token; -1 if it has none or was cut off.
    """

    sentences: TaggedSentences
    rows: ExampleRows
    firsts: Sequence[Int64[np.ndarray, " _"]]

    def __len__(self) -> int:
        return len(self.sentences)

    def tags(self, predictions: Sequence[Integer[np.ndarray, " _"]], classes: Sequence[str]) -> list[list[str]]:
        """A tag for each word of each sentence; ``O`` for words that no token stands for.

        Args:
            predictions: class ids at each place of each sentence's row; longer where rows were filled up.
            classes: what they stand for.
        """
        return [
            [classes[int(ids[place])] if place >= 0 else OUTSIDE for place in places]
            for ids, places in zip(predictions, self.firsts, strict=True)
        ]


def load_tagged(path: str) -> TaggedSentences:
    """Reads a file of lines with a word first and its tag last, tabs or blanks between columns.

    Sentences end at lines that hold nothing or only blanks and tabs; lines of ``-DOCSTART-`` are left out. With one
    column everywhere there are words only.

    Raises:
        ValueError: it cannot be read, has no word, or a line has no tag or one that is not BIO.
    """
    file = Path(path).name
    names: list[str] = []
    words: list[list[str]] = []
    tags: list[list[str]] = []
    going = False
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            going = False
            continue
        columns = line.split("\t") if "\t" in line else line.split(" ")
        if not going:
            names.append(f"{file}:{number}")
            words.append([])
            tags.append([])
            going = True
        words[-1].append(columns[0])
        tag = columns[-1].strip() if len(columns) > 1 else ""
        if tag and tag != OUTSIDE and not tag.startswith(("B-", "I-")):
            raise ValueError(f"{file}, line {number}: tag {tag!r} is not O, B-class or I-class.")
        tags[-1].append(tag)
    if not words:
        raise ValueError(f"{path} holds no word.")
    missing = [name for name, of_sentence in zip(names, tags) if not all(of_sentence)]
    if not missing:
        return TaggedSentences(names, words, tags, path)
    if any(tag for of_sentence in tags for tag in of_sentence):
        raise ValueError(f"{missing[0]}: a word of this sentence has no tag, though others have.")
    return TaggedSentences(names, words, None, path)


def hub_tagged(path: str, fields: tuple[str, str] = ("tokens", "ner_tags")) -> TaggedSentences:
    """Words to tag of the Hugging Face Hub, ``owner/name[:config][@split]``, in two columns of lists.

    Args:
        path: of the data.
        fields: the columns of the words and of the tags: names as of ``load_tagged``, or their numbers where the
            column knows the names. Without a column of tags there is nothing but to predict.

    Raises:
        ValueError: the `datasets` library or the column of words is missing, a tag is of another form, or there is no
            word.
    """
    rows = load_hub_rows(path, "words 'huggingface_tags'")
    words = [list(map(str, sentence)) for sentence in hub_column(rows, fields[0], path)]
    names = [f"{path}:{index}" for index in range(len(words))]
    tags = None
    if fields[1] in rows.column_names:
        kinds = getattr(getattr(rows.features[fields[1]], "feature", None), "names", None)
        tags = [[kinds[tag] if kinds else str(tag) for tag in sentence] for sentence in rows[fields[1]]]
        for name, sentence, of_sentence in zip(names, words, tags):
            wrong = [tag for tag in of_sentence if tag != OUTSIDE and not tag.startswith(("B-", "I-"))]
            if wrong or len(sentence) != len(of_sentence):
                what = f"tag {wrong[0]!r} is not O, B-class or I-class" if wrong else "words and tags differ in number"
                raise ValueError(f"{name}: {what}.")
    kept = [index for index, sentence in enumerate(words) if sentence]
    if not kept:
        raise ValueError(f"{path} holds no word.")
    return TaggedSentences(names, words, tags, path).take(kept)


def encode_tagged(
    sentences: TaggedSentences, tokenizer: Tokenizer, *, length: int, classes: Sequence[str], dataset: str = "conll"
) -> TaggingExamples:
    """Sentences as rows ``[CLS] words [SEP]``; words that do not fit as a whole are cut off with all after them.

    A word is encoded with a blank before it, as in running text, but for the first of a sentence.

    Raises:
        ValueError: a tag is no class, or length has no room.
    """
    if length < 3:
        raise ValueError(f"length is {length}, has no room for a token.")
    texts = [word if place == 0 else f" {word}" for words in sentences.words for place, word in enumerate(words)]
    names = [name for name, words in zip(sentences.names, sentences.words) for _ in words]
    encoded = iter(encode_texts(tokenizer, texts, names=names, dataset=dataset))
    known = {name: index for index, name in enumerate(classes)}
    tokens, targets, firsts = [], [], []
    for index, words in enumerate(sentences.words):
        pieces = [next(encoded) for _ in words]
        sizes = np.array([len(piece) for piece in pieces])
        ends = np.cumsum(sizes)
        fitting = int(np.searchsorted(ends, length - 2, side="right"))
        places = np.where((sizes > 0) & (np.arange(len(words)) < fitting), 1 + ends - sizes, -1)
        whole = np.concatenate([np.zeros(0, np.int32), *pieces[:fitting]])
        assert tokenizer.bos_id is not None
        assert tokenizer.eos_id is not None
        row, _ = pair_layout(whole, None, start_id=tokenizer.bos_id, end_id=tokenizer.eos_id)
        wanted = np.full(len(row), IGNORE_LABEL, np.int32)
        for place, tag in zip(places.tolist(), sentences.tags[index] if sentences.tags else ()):
            if tag not in known:
                raise ValueError(f"{sentences.names[index]}: tag {tag!r} is none of the classes {', '.join(classes)}.")
            if place >= 0:
                wanted[place] = known[tag]
        tokens.append(row)
        targets.append(wanted)
        firsts.append(places.astype(np.int64))
    rows = ExampleRows(tokens, (max(map(len, tokens)),), tokenizer.pad_id, {"targets": (targets, IGNORE_LABEL)})
    return TaggingExamples(sentences, rows, firsts)


def tag_classes(tags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """``O``, and of each class that occurs B and I, so that each has both."""
    kinds = sorted({tag[2:] for of_sentence in tags for tag in of_sentence if tag != OUTSIDE})
    return (OUTSIDE, *(f"{place}-{kind}" for kind in kinds for place in "BI"))


def load_tagging_data(
    *,
    name: str = "conll",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    fields: tuple[str, str] = ("tokens", "ner_tags"),
    tokenizer: str | Tokenizer = "bytes",
    length: int = 128,
    num_buckets: int = 4,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
) -> TaskData[TaggingExamples]:
    """Loads words to tag.

    Args:
        name: "conll" or "huggingface_tags".
        train: the training file; of the Hugging Face Hub `("owner/name[:config][@split]",)`, where a split that is not
            named is train, validation or test by argument.
        validation: the validation file; none = a share of the training sentences.
        test: the test file; none = no test.
        fields: of the Hub the columns of words and of tags.
        tokenizer: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer.
        length: tokens of a row at most; words behind are cut off and count as ``O`` where they are predicted.
        num_buckets: groups of rows of one width at most.
        validation_fraction: share of the training sentences for validation, in (0, 1), where that has no file.
        split_seed: chooses them.

    Returns:
        The data; classes are ``O`` and those of training.

    Raises:
        ValueError: an argument cannot be used, or a file cannot be read.
    """
    if name not in TAG_FILES:
        raise ValueError(f"name is {name!r}; must be one of {', '.join(TAG_FILES)}.")
    read = functools.partial(hub_tagged, fields=fields) if name == "huggingface_tags" else load_tagged
    paths = {"train": train, "validation": validation, "test": test}
    loaded = task_tokenizer(tokenizer)
    splits = read_splits(
        read,
        TaggedSentences.take,
        lambda sentences: [" ".join(words) for words in sentences.words],
        {split: paths_of_split(name, given, split) for split, given in paths.items()},
        validation_fraction,
        split_seed,
    )
    if splits["train"].tags is None:
        raise ValueError(f"{splits['train'].source} has no tags to train on.")
    classes = tag_classes(splits["train"].tags)
    examples = {
        split: encode_tagged(sentences, loaded, length=length, classes=classes, dataset=f"{name} {split}")
        for split, sentences in splits.items()
    }
    counts = collections.Counter(tag for tags in splits["validation"].tags or () for tag in tags)
    share = counts[OUTSIDE] / max(1, counts.total())
    baselines = f"for scale, on validation: O for every word has an accuracy of {share:.4f} and an entity F1 of 0"
    rows = in_groups(examples, num_buckets, length)
    return TaskData("tagging", *rows, loaded, classes, examples, splits["train"].source, baselines)
