"""Prompts of unequal length as one left-padded array whose width is one of few, and the checks that come first."""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

_SMALLEST_BUCKET = 16
# The largest power of two within int32.
_LARGEST_BUCKET = 2**30


class PromptBatch(NamedTuple):
    """Prompts, each at the right end of its row, so that every row's next token goes into the same slot.

    Attributes:
      tokens: int32 [B, P], 0 in the padding.
      lengths: int32 [B], real tokens of each row.
    """

    tokens: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, "B"]


def bucket(length: int, limit: int | None = None) -> int:
    """The smallest power of two from 16 on that holds ``length``, but no more than ``limit``: bounds compilations."""
    size = max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    return size if limit is None else min(size, limit)


def pad_prompts(
    prompts: Iterable[Any] | ArrayLike, *, vocab_size: int, max_new_tokens: int, position_limit: int | None
) -> PromptBatch:
    """Check prompts and put them into one array.

    Args:
      prompts: token ids, one sequence a row, or int [B, L].
      vocab_size: ids are below it.
      max_new_tokens: tokens that will follow each prompt.
      position_limit: positions that the model has; None = any number.

    Returns:
      ``PromptBatch``.

    Raises:
      ValueError: no prompts, an empty one, ids that are not integers or out of range, or more tokens than positions.
    """
    rows = check_rows(prompts, "prompts", vocab_size)
    for row, ids in enumerate(rows):
        if position_limit is not None and ids.size + max_new_tokens > position_limit:
            raise ValueError(
                f"prompts[{row}] has {ids.size} tokens and max_new_tokens={max_new_tokens}, together "
                f"{ids.size + max_new_tokens}; the model has max_length={position_limit} positions."
            )
    lengths = np.array([ids.size for ids in rows], np.int32)
    width = bucket(int(lengths.max()), position_limit)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, width - ids.size :] = ids
    return PromptBatch(tokens, lengths)


def check_token(token: Any, name: str, vocab_size: int | None = None) -> int:
    """A token id as an int, refused unless it is an integer within int32, and below ``vocab_size`` where that is given.

    Raises:
      ValueError: naming the argument, its value and its range.
    """
    low, high = (0, vocab_size) if vocab_size is not None else (-(2**31), 2**31)
    if not _is_integer(token) or not low <= int(token) < high:
        raise ValueError(f"{name}={token!r} must be an integer in [{low}, {high}).")
    return int(token)


def check_count(count: Any, name: str) -> int:
    """A number of tokens as an int, refused unless it is an integer of at least 1 whose ``bucket`` fits int32."""
    if not _is_integer(count) or int(count) < 1:
        raise ValueError(f"{name}={count!r} must be an integer of at least 1.")
    if int(count) > _LARGEST_BUCKET:
        raise ValueError(f"{name}={count!r} must be at most {_LARGEST_BUCKET}.")
    return int(count)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_rows(sequences: Any, name: str, vocab_size: int) -> list[Int[np.ndarray, "_"]]:
    """Sequences of token ids as arrays, none of them empty.

    Args:
      sequences: token ids, one sequence a row, or int [B, L].
      name: of the argument.
      vocab_size: ids are below it.

    Raises:
      ValueError: no sequences, an empty one, or ids that are not integers or out of range.
    """
    rows = [_as_ids(ids, f"{name}[{row}]") for row, ids in enumerate(_as_rows(sequences, name))]
    if not rows:
        raise ValueError(f"{name} is empty; it must hold at least one sequence of token ids.")
    for row, ids in enumerate(rows):
        if not ids.size:
            raise ValueError(f"{name}[{row}] is empty; give it at least one token, such as the tokenizer's bos_id.")
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if wrong.size:
            raise ValueError(f"{name}[{row}] holds the id {wrong[0]}; ids must be in [0, {vocab_size}).")
    return rows


def _as_rows(sequences: Any, name: str) -> list[Any]:
    """The sequences one by one; a single one or text is a frequent mistake and is named."""
    if isinstance(sequences, str | bytes) or not hasattr(sequences, "__iter__"):
        raise ValueError(f"{name}={sequences!r} must be sequences of token ids, one per row; encode texts first.")
    if np.ndim(sequences if hasattr(sequences, "ndim") else 0) == 1:
        raise ValueError(f"{name} has shape {sequences.shape}; it must be [batch, length]: {name}[None] for one.")
    return list(sequences)


def _as_ids(sequence: Any, name: str) -> Int[np.ndarray, "L"]:
    """One sequence's ids."""
    if isinstance(sequence, str | bytes) or np.ndim(sequence) != 1:
        raise ValueError(f"{name}={sequence!r} must be a sequence of token ids.")
    ids = np.asarray(sequence)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} holds {ids.dtype}; token ids must be integers.")
    return ids.astype(np.int64)
