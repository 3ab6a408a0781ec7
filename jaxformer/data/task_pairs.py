"""Algorithmic tasks as pairs: the question as source, its answer as target."""

import functools
from collections.abc import Callable

from jaxformer.data.algorithmic import TEST, TRAINING, VALIDATION, TaskExamples, check_lengths, number_of_symbols
from jaxformer.data.pairs import MadePairs, Pairs
from jaxformer.data.tasks import TASKS, Size


def task_pairs(
    task: str,
    *,
    train_examples: int = 30_000,
    validation_examples: int = 1000,
    test_examples: int = 2000,
    min_length: int = 1,
    max_length: int = 20,
    num_symbols: int | None = None,
    split_seed: int = 0,
) -> MadePairs:
    """Words of symbols as sources, what a task makes of them as targets: "3 1 4" and "1 3 4".

    Short words are few, so training meets the short ones of validation and test too; of words of n symbols there are
    num_symbols^n.

    Args:
        task: "copy", "reverse" or "sort".
        train_examples: training pairs.
        validation_examples: validation pairs.
        test_examples: test pairs.
        min_length: shortest word, in symbols.
        max_length: longest word, in symbols; lengths between are equally likely.
        num_symbols: different symbols; None = the task's own number.
        split_seed: of all that is drawn, at least 0.

    Returns:
        Pairs of "train", "validation" and "test", and the tokenizer of both sides.

    Raises:
        ValueError: a number is out of range.
    """
    check_lengths(min_length, max_length, ())
    if split_seed < 0:
        raise ValueError(f"split_seed is {split_seed}, must be at least 0.")
    chosen = TASKS[task]
    size = Size(number_of_symbols(chosen, num_symbols), max_length)
    tokenizer = chosen.tokenizer(size)
    counts = {"train": train_examples, "validation": validation_examples, "test": test_examples}
    for split, count in counts.items():
        if count < 1:
            raise ValueError(f"{split}_examples is {count}, must be at least 1.")
    splits = {}
    for stream, (split, count) in zip((TRAINING, VALIDATION, TEST), counts.items(), strict=True):
        examples = TaskExamples(chosen, size, (min_length, max_length), 0, stream)
        made = [examples.example(split_seed, index) for index in range(count)]
        # No part of the texts: the mark that asks a decoder alone for its answer, and the end of that.
        sources = [" ".join(tokenizer.symbols[symbol] for symbol in question[:-1].tolist()) for question, _ in made]
        targets = [" ".join(tokenizer.symbols[symbol] for symbol in answer[:-1].tolist()) for _, answer in made]
        source = f"task {task} ({chosen.summary}), words of {min_length} to {max_length} symbols"
        splits[split] = Pairs([f"{split}:{index}" for index in range(count)], sources, targets, source)
    return MadePairs(splits, tokenizer)


def _named(task: str) -> Callable[..., MadePairs]:
    made = functools.partial(task_pairs, task)
    made.__doc__ = f"{TASKS[task].summary.replace(' =', ' as source,')} as target ({TASKS[task].paper})."
    return made


PAIR_TASKS: dict[str, Callable[..., MadePairs]] = {
    f"{task}_pairs": _named(task) for task in ("copy", "reverse", "sort")
}
"""Tasks as pairs by name."""
