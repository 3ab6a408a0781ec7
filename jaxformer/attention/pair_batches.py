"""Single pairs of small blocks put together in batches that are computed at once."""

import numpy as np
from jaxtyping import Int

# Pairs of tokens that are computed at once, about.
BATCH_AREA = 2**14
MOST_PAIRS = 8
# So many batches pay for a loop of their own.
FEWEST_BATCHES = 16
# Batches that a pair may still join: bounds the search.
MOST_OPEN = 64


def batch_pairs(
    pairs: Int[np.ndarray, "P 2"], query_block: int, key_block: int
) -> tuple[Int[np.ndarray, "_ _"], Int[np.ndarray, "_ 2"]]:
    """(batches, pairs left over): all first queries of a batch, then all first keys; no token is in two of its pairs.

    Args:
      pairs: first query and first key of pairs of blocks; blocks of queries are the same or apart.
      query_block, key_block: tokens in a block.
    """
    size = min(MOST_PAIRS, BATCH_AREA // (query_block * key_block))
    if size < 2 or len(pairs) < size * FEWEST_BATCHES:
        return np.zeros((0, 2), np.int32), pairs
    complete: list[list[tuple[int, int]]] = []
    waiting: list[list[tuple[int, int]]] = []
    rest: list[tuple[int, int]] = []
    for query, key in pairs.tolist():
        for place, batch in enumerate(waiting):
            if all(query != other and abs(key - taken) >= key_block for other, taken in batch):
                batch.append((query, key))
                if len(batch) == size:
                    complete.append(waiting.pop(place))
                break
        else:
            if len(waiting) < MOST_OPEN:
                waiting.append([(query, key)])
            else:
                rest.append((query, key))
    if len(complete) < FEWEST_BATCHES:
        return np.zeros((0, 2), np.int32), pairs
    rest = sorted(rest + [pair for batch in waiting for pair in batch])
    batches = np.array(complete, np.int32).swapaxes(1, 2).reshape(len(complete), -1)
    return batches, np.array(rest, np.int32).reshape(-1, 2)
