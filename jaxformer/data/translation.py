"""From the name of pairs to the rows and texts of a model that reads a source and writes a target."""

from collections.abc import Sequence

from jaxformer.data.packed_pairs import PackedPairRows, packed_widths
from jaxformer.data.pair_data import PairData, PairExamples, decoder_start
from jaxformer.data.pair_rows import PairRows, Widths, bucket_widths, fitting_widths
from jaxformer.data.pair_splits import PAIR_MAKERS, encode_pairs, make_pairs, pair_tokenizers, read_pairs, refuse
from jaxformer.data.pairs import Pairs
from jaxformer.data.tokenizers import Tokenizer

BATCHINGS = ("bucketed", "packed", "padded")


def load_pair_data(
    *,
    name: str = "dates",
    train: Sequence[str] = (),
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    fields: tuple[str, str] = ("source", "target"),
    tokenizer: str | Tokenizer | None = None,
    source_tokenizer: str | Tokenizer | None = None,
    validation_fraction: float = 0.05,
    train_examples: int | None = None,
    validation_examples: int | None = None,
    test_examples: int | None = None,
    locales: Sequence[str] = (),
    years: tuple[int, int] | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    num_symbols: int | None = None,
    split_seed: int = 0,
    length: int | None = None,
    batching: str = "bucketed",
    num_buckets: int = 4,
) -> PairData:
    """Loads pairs, turns both sides into ids that end with the end id, and lays them out in rows.

    Pairs with a blank side are left out of training. Evaluation pairs are never left out: a blank source there is the
    end id alone.

    Args:
        name: pairs of ``PAIR_FILES`` or ``PAIR_MAKERS``.
        train: files of the training pairs: source and target (parallel), or the one of both; of the Hugging Face Hub
            `("owner/name[:config][@split]",)`, where a split that isn't named is train, validation or test by argument.
        validation: files of the validation pairs; none = a share of the training pairs.
        test: files of the test pairs; none = no test.
        fields: which fields hold source and target, where a file holds both.
        tokenizer: of the targets, or of both sides: "bytes", a ``tokenizer.json`` or its folder, or a tokenizer; None =
            bytes, or that of pairs that bring their own, which take no other.
        source_tokenizer: of the sources; None = the same.
        validation_fraction: share of the training pairs for validation, in (0, 1), where that has no files; pairs with
            equal sources are on one side.
        train_examples: training pairs to make; this and the next seven are of ``date_pairs`` and ``task_pairs``, None
            is what those have, and pairs in files take none of them.
        validation_examples: validation pairs to make.
        test_examples: test pairs to make.
        locales: of dates.
        years: of dates, first and last.
        min_length: shortest word of a task, in symbols.
        max_length: longest word of a task, in symbols.
        num_symbols: different symbols of a task.
        split_seed: chooses the share for validation, or draws the pairs that are made.
        length: tokens that a side of a training pair has at most, end included; longer pairs are left out. None = all
            are kept.
        batching: "bucketed": by length, in groups of one shape; "padded": all in one shape, a pair a row; "packed":
            several pairs a row, whose wider side has length tokens, or those of the longest text.
        num_buckets: groups at most, of "bucketed".

    Returns:
        The data.

    Raises:
        ValueError: an argument cannot be used, a file cannot be read, or no pair is left.
    """
    check_layout(batching, num_buckets, length)
    paths = {"train": train, "validation": validation, "test": test}
    numbers = {
        "train_examples": train_examples,
        "validation_examples": validation_examples,
        "test_examples": test_examples,
        "locales": tuple(locales) or None,
        "years": years,
        "min_length": min_length,
        "max_length": max_length,
        "num_symbols": num_symbols,
    }
    numbers = {argument: value for argument, value in numbers.items() if value is not None}
    if name in PAIR_MAKERS:
        splits, own = make_pairs(name, paths, numbers, (tokenizer, source_tokenizer), split_seed)
        both = (own, own)
    else:
        refuse(name, numbers)
        splits = read_pairs(name, paths, fields, validation_fraction, split_seed)
        both = pair_tokenizers("bytes" if tokenizer is None else tokenizer, source_tokenizer)
    examples = {split: encode_pairs(name, pairs, *both) for split, pairs in splits.items()}
    return lay_out_pairs(splits["train"], examples, *both, length, batching, num_buckets)


def check_layout(batching: str, num_buckets: int, length: int | None) -> None:
    """Raises ValueError for a way to lay out rows that there is not."""
    if batching not in BATCHINGS:
        raise ValueError(f"batching is {batching!r}; must be one of {', '.join(BATCHINGS)}.")
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, must be at least 1.")
    if length is not None and length < 1:
        raise ValueError(f"length is {length}, must be at least 1 token, or None.")


def lay_out_pairs(
    pairs: Pairs,
    examples: dict[str, PairExamples],
    source_tokenizer: Tokenizer,
    tokenizer: Tokenizer,
    length: int | None,
    batching: str,
    num_buckets: int,
) -> PairData:
    """Rows of all splits in the widths that fit training, and what is said of the pairs."""
    train = examples.pop("train")
    kept = train if length is None else train.up_to(length)
    if not len(kept):
        what = f"with at most length = {length} tokens on a side " if len(train) else ""
        raise ValueError(f"{pairs.source}: there is no training pair {what}({pairs.skipped} with a blank side).")
    start = decoder_start(tokenizer)
    if batching == "packed":
        widths: tuple[Widths, ...] = (packed_widths(kept.sources, kept.targets, length),)
    else:
        widths = bucket_widths(kept.sources, kept.targets, num_buckets if batching == "bucketed" else 1)

    def rows(split: PairExamples) -> PairRows | PackedPairRows:
        ids = (start, source_tokenizer.pad_id, tokenizer.pad_id)
        fitting = fitting_widths(split.sources, split.targets, widths)
        if batching == "packed":
            return PackedPairRows(split.sources, split.targets, fitting[-1], *ids)
        return PairRows(split.sources, split.targets, fitting, *ids)

    left_out = [(pairs.skipped, "with a blank side"), (len(train) - len(kept), f"of more than {length} tokens")]
    said = " and ".join(f"{count:,} {what}" for count, what in left_out if count)
    return PairData(
        rows(kept),
        rows(examples["validation"]),
        rows(examples["test"]) if "test" in examples else None,
        tokenizer,
        source_tokenizer,
        start,
        examples,
        pairs.source + (f" (left out of training: {said})" if said else ""),
        {"training": len(kept), **{split: len(pairs) for split, pairs in examples.items()}},
    )
