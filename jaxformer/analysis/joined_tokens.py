"""Tokens that spell one character together, shown as one: bytes are no text of their own."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxformer.analysis.recording import AttentionMap, token_texts
from jaxformer.data import Tokenizer

# A character has at most 4 bytes, and each of its tokens may hold bytes of the characters beside it.
_LONGEST = 8
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def character_groups(
    tokenizer: Tokenizer, ids: Sequence[int] | Int[np.ndarray, "L"]
) -> tuple[tuple[str, ...], Int[np.ndarray, "groups"]]:
    """The fewest neighbours that are whole characters together, of any tokenizer.

    Args:
      tokenizer: of the ids.
      ids: token ids.

    Returns:
      The text of each group, and the index of its first token. A token that is no part of a character (a special one,
      bytes that are not UTF-8) is a group of its own, named as by ``token_texts``.
    """
    numbers = [int(token) for token in ids]
    texts, starts, place = [], [], 0
    names = token_texts(tokenizer, numbers)
    while place < len(numbers):
        text, size = names[place], 1
        if _UNFINISHED in tokenizer.decode([numbers[place]]):
            for end in range(place + 2, min(place + _LONGEST, len(numbers)) + 1):
                joined = tokenizer.decode(numbers[place:end])
                if _UNFINISHED not in joined:
                    text, size = joined, end - place
                    break
        texts.append(text)
        starts.append(place)
        place += size
    return tuple(texts), np.array(starts, np.int64)


def join_tokens(
    shown: AttentionMap,
    rows: tuple[Sequence[str], Int[np.ndarray, "R"]] | None = None,
    columns: tuple[Sequence[str], Int[np.ndarray, "C"]] | None = None,
) -> AttentionMap:
    """Attention between groups of tokens: the sum over the tokens that are looked at, the mean over those that look.

    So rows keep their sum. Of a map of some rows alone the groups are still those of the whole text; the first and the
    last may be kept in part. Clark et al. 2019, "What Does BERT Look At?", arXiv:1906.04341, section 4.1.

    Args:
      shown: weights [layers, N, T, S] between tokens.
      rows: texts and first tokens of the groups of rows, as from ``character_groups``; None = each is its own.
      columns: those of the columns.

    Returns:
      Weights [layers, N, R, C] between groups.

    Raises:
      ValueError: groups that do not begin at token 0, are not in order or reach beyond the tokens.
    """
    joined = shown
    if rows is not None:
        total = len(shown.rows) if shown.total_rows is None else shown.total_rows
        starts = _check_starts(rows, total, "rows")
        first, last = shown.first_row, shown.first_row + len(shown.rows)
        kept = slice(int(np.searchsorted(starts, first, side="right")) - 1, int(np.searchsorted(starts, last)))
        within = np.maximum(starts[kept], first) - first
        sizes = np.diff(np.append(within, len(shown.rows))).astype(np.float32)
        joined = joined._replace(
            weights=np.add.reduceat(shown.weights, within, axis=2) / sizes[:, None],
            rows=tuple(rows[0][kept]),
            first_row=kept.start,
            total_rows=len(starts),
        )
    if columns is not None:
        starts = _check_starts(columns, shown.weights.shape[3], "columns")
        joined = joined._replace(weights=np.add.reduceat(joined.weights, starts, axis=3), columns=tuple(columns[0]))
    return joined._replace(weights=joined.weights.astype(np.float32))


def _check_starts(groups: tuple[Sequence[str], Int[np.ndarray, "G"]], length: int, name: str) -> Int[np.ndarray, "G"]:
    texts, starts = groups[0], np.asarray(groups[1])
    fits = len(texts) == starts.size and starts.size and starts[0] == 0 and starts[-1] < length
    if not fits or (np.diff(starts) < 1).any():
        raise ValueError(
            f"{name} has {len(texts)} texts and first tokens {starts.tolist()}; must be as many, from 0 on in order, "
            f"below the {length} tokens"
        )
    return starts
