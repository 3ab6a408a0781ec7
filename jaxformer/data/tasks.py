"""Algorithmic tasks: from random numbers to a question and its one right answer, as token ids.

A task draws nothing itself: it is a pure function of a length and of 64-bit random numbers. Ids below ``num_symbols``
are symbols; the ids after them are the task's marks, then the one that ends an answer, then padding.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from jaxformer.data.symbol_tokenizer import SymbolTokenizer

Ids = Int64[np.ndarray, " _"]


class Size(NamedTuple):
    """What the examples of one run have in common.

    Attributes:
        num_symbols: symbols that a question may hold.
        longest: the highest length of all, for training and tests, in symbols.
    """

    num_symbols: int
    longest: int


class Task(NamedTuple):
    """One task.

    Attributes:
        name: in configs.
        summary: a line on question and answer.
        example: random numbers [2 * length or more], length and ``Size`` to the ids of question and answer; the answer
            without its end.
        num_symbols: how many by default; None where the task has its own and takes no other number.
        marks: names of the ids that are no symbols.
        ends: whether an answer ends with an id of its own, which is then scored too.
        paper: where it comes from.
    """

    name: str
    summary: str
    example: Callable[[UInt64[np.ndarray, " _"], int, Size], tuple[Ids, Ids]]
    num_symbols: int | None = 10
    marks: tuple[str, ...] = ("=",)
    ends: bool = True
    paper: str = 'Graves et al. 2014, "Neural Turing Machines", arXiv:1410.5401, section 4.1'

    def tokenizer(self, size: Size) -> SymbolTokenizer:
        """Names of all ids."""
        symbols = PARITY_SYMBOLS if self.num_symbols is None else tuple(map(str, range(size.num_symbols)))
        ends = ("<end>",) if self.ends else ()
        names = (*symbols, *self.marks, *ends, "<pad>")
        return SymbolTokenizer(names, pad_id=len(names) - 1, eos_id=len(names) - 2 if self.ends else None)


PARITY_SYMBOLS = ("0", "1", "-1")


def _word(numbers: UInt64[np.ndarray, " _"], length: int, num_symbols: int) -> Ids:
    """Symbols, equally likely but for a share of num_symbols / 2^64."""
    return (numbers[:length] % np.uint64(num_symbols)).astype(np.int64)


def _asked(word: Ids, size: Size) -> Ids:
    """A word and the mark after which the answer follows."""
    return np.append(word, size.num_symbols)


def copy(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """A word, and the same again."""
    word = _word(numbers, length, size.num_symbols)
    return _asked(word, size), word


def reverse(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """A word, and the same from its end."""
    word = _word(numbers, length, size.num_symbols)
    return _asked(word, size), word[::-1]


def sort(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """A word, and its symbols in ascending order, each as often as in the word."""
    word = _word(numbers, length, size.num_symbols)
    return _asked(word, size), np.sort(word)


def addition(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """Two numbers of ``length`` digits to base ``num_symbols``, lowest digit first, and the length + 1 of their sum."""
    base = size.num_symbols
    left, right = _word(numbers, length, base), _word(numbers[length:], length, base)
    total, carry = np.zeros(length + 1, np.int64), 0
    for place in range(length):
        carry, total[place] = divmod(int(left[place] + right[place]) + carry, base)
    total[length] = carry
    return np.concatenate([left, [base + 1], right, [base]]), total


def duplicate(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """Reformer's: 0 w 0, and w again, whose symbols are 1 to num_symbols - 1."""
    word = _word(numbers, length, size.num_symbols - 1) + 1
    return np.concatenate([[0], word, [0]]), word


def parity(numbers: UInt64[np.ndarray, " _"], length: int, size: Size) -> tuple[Ids, Ids]:
    """Of ``longest`` entries the first ``length`` are 1 or -1 and the others 0: is the number of ones odd?

    Graves 2016, arXiv:1603.08983, section 3.1, with a token for each entry in place of one vector for all.
    """
    ones = _word(numbers, length, 2)
    entries = np.concatenate([np.where(ones == 1, 1, 2), np.zeros(size.longest - length, np.int64)])
    even, odd = size.num_symbols + 1, size.num_symbols + 2
    return _asked(entries, size), np.array([odd if ones.sum() % 2 else even])


_UNIVERSAL = 'Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819, section 3.4'

TASKS: dict[str, Task] = {
    "copy": Task("copy", "a word = the same word", copy),
    "reverse": Task("reverse", "a word = its symbols from the last to the first", reverse, paper=_UNIVERSAL),
    "addition": Task(
        "addition",
        "a number + a number of as many digits, lowest digit first = their sum",
        addition,
        marks=("=", "+"),
        paper=_UNIVERSAL,
    ),
    "sort": Task(
        "sort",
        "a word = its symbols in ascending order",
        sort,
        paper='Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296, table 1',
    ),
    "duplicate": Task(
        "duplicate",
        "0 word 0 the same word",
        duplicate,
        num_symbols=128,
        marks=(),
        ends=False,
        paper='Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2',
    ),
    "parity": Task(
        "parity",
        "ones and minus ones, then zeros = whether the number of ones is even or odd",
        parity,
        num_symbols=None,
        marks=("=", "even", "odd"),
        ends=False,
        paper='Graves 2016, "Adaptive Computation Time for Recurrent Neural Networks", arXiv:1603.08983, section 3.1',
    ),
}
"""The tasks a config may name as ``data.name``."""
