"""What trivial predictors reach on the validation text: a scale for a model's loss."""

import lzma
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer

# Counting makes an int64 copy of what it counts.
_BLOCK = 2**20


def unigram_loss(
    train_tokens: Integer[np.ndarray, " N"],
    train_offsets: Int64[np.ndarray, " train_boundaries"],
    tokens: Integer[np.ndarray, " M"],
    offsets: Int64[np.ndarray, " boundaries"],
    vocab_size: int,
) -> float:
    """Loss of the predictor that knows only how often each id occurs in training.

    Counts plus one, over the ids that a model is scored on: all of a document but its first.

    Args:
        train_tokens: ids of all training documents.
        train_offsets: where each begins, and the total.
        tokens: ids of all validation documents.
        offsets: where each begins, and the total.
        vocab_size: number of ids.

    Returns:
        Nats per token; nan if nothing is scored.
    """
    scored = _count(tokens, offsets, vocab_size)
    if not scored.sum():
        return math.nan
    smoothed = _count(train_tokens, train_offsets, vocab_size) + 1.0
    return float(-(scored @ np.log(smoothed / smoothed.sum())) / scored.sum())


def _count(tokens: np.ndarray, offsets: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = -np.bincount(tokens[offsets[:-1]], minlength=vocab_size)
    for start in range(0, len(tokens), _BLOCK):
        counts += np.bincount(tokens[start : start + _BLOCK], minlength=vocab_size)
    return counts


def lzma_bits_per_byte(texts: Sequence[str], most: int = 1_000_000) -> float:
    """Bits per byte of the texts, one after the other, under the LZMA compressor, which learns from nothing else.

    Args:
        texts: the texts.
        most: bytes to compress: the first so many of longer text (compression takes about a second a million bytes).

    Returns:
        Compressed bits per byte of text, container included; nan for no text.
    """
    content = bytearray()
    for text in texts:
        content += text.encode("utf-8", "surrogatepass")
        if len(content) >= most:
            break
    content = content[:most]
    return 8.0 * len(lzma.compress(content)) / len(content) if content else math.nan
