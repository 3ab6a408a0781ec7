"""Pictures of attention: each kind's own weights on one small input, and each pattern's own mask, as inline SVG.

Nothing is drawn by hand: what a picture shows is what the functions of `jaxformer.attention` give.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

LENGTH = 32
HEAD_DIM = 8
LEVELS = 8  # shades
CELL = 7  # user units of a pair

# Beside query and key: what each kind is given, from a source of random numbers. Small, so that the structure shows.
ARGUMENTS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "dense": lambda random: {},
    "kernel": lambda random: {"width": 2.0},
    "additive": lambda random: {
        "query_kernel": normal(random, HEAD_DIM, 12),
        "key_kernel": normal(random, HEAD_DIM, 12),
        "score_vector": normal(random, 12),
    },
    "concat": lambda random: {"kernel": normal(random, 2 * HEAD_DIM, 12), "score_vector": normal(random, 12)},
    "bilinear": lambda random: {"kernel": normal(random, HEAD_DIM, HEAD_DIM) / HEAD_DIM**0.5},
    "shared_query_key": lambda random: {},
    "local": lambda random: {"window": 4},
    "longformer": lambda random: {
        "window": 3,
        "global_indices": (0, 17),
        "global_query": tokens(random, LENGTH),
        "global_key": tokens(random, LENGTH),
    },
    "sparse": lambda random: {"pattern": example_pattern()},
    "lsh": lambda random: {"rotations": normal(random, 2, HEAD_DIM, 4), "chunk_size": 4},
    "routing": lambda random: {"centroids": normal(random, 1, 4, HEAD_DIM), "window": 8},
    "sinkhorn": lambda random: {"block_scores": 3 * normal(random, 1, 1, 8, 8), "block_size": 4},
    "clustered": lambda random: {"hash_planes": normal(random, HEAD_DIM, 63), "num_clusters": 4, "top_k": 3},
    "linformer": lambda random: {"key_projection": normal(random, 4, LENGTH) / LENGTH**0.5},
    "compressed": lambda random: {"stride": 4},
    "linear": lambda random: {},
    "performer": lambda random: {"projection": normal(random, 32, HEAD_DIM)},
}

# Arguments of each named pattern's constructor.
PATTERN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dilated": {"window": 4, "dilation": 3},
    "strided": {"stride": 6},
    "fixed": {"stride": 8, "num_summary": 2},
    "bigbird": {"block_size": 4, "num_random": 1, "seed": 3, "num_blocks": 8},
    "random_blocks": {"num": 2, "seed": 0, "block_size": 4, "num_blocks": 8},
    "global_tokens": {"indices": (0, 13)},
}


def picture(*names: str) -> str:
    """A row of figures: each kind or pattern as it is, and causal where it can be."""
    return "\n".join(
        ['<div class="attention-pictures">', *(figure for name in names for figure in figures(name)), "</div>"]
    )


def figures(name: str) -> list[str]:
    """The figures of one kind of attention or one named pattern."""
    from jaxformer.attention import ATTENTION, PATTERNS

    record = PATTERNS[name] if name in PATTERNS else ATTENTION[name]
    ways = [causal for causal, able in ((False, record.bidirectional), (True, record.causal)) if able]
    caption = {False: name, True: f"{name}, causal"}
    return [figure(weights(name, causal), caption[causal]) for causal in ways]


@functools.cache
def weights(name: str, causal: bool) -> np.ndarray:
    """[T, S]: what each query takes of each key, or which keys a pattern shows."""
    import jax

    from jaxformer.attention import ATTENTION, PATTERNS, patterns

    if name in PATTERNS:
        pattern = PATTERNS[name].constructor(**PATTERN_ARGUMENTS[name])
        pattern = pattern & patterns.causal() if causal else pattern
        return pattern.mask(LENGTH).astype(float)
    random = np.random.default_rng(5)
    kind = ATTENTION[name]
    query, key = tokens(random, LENGTH), tokens(random, LENGTH)
    inputs = (query,) if kind.shared_query_key else (query, key)
    function = functools.partial(kind.weights, causal=causal, **ARGUMENTS[name](random))
    return np.asarray(jax.jit(function)(*inputs))[0, 0]  # one program compiles sooner than each of its steps


def figure(matrix: np.ndarray, caption: str) -> str:
    """An inline SVG of a matrix, queries down and keys across, with its caption."""
    height, width = (CELL * size for size in matrix.shape)
    paths = "".join(
        f'<path class="{sign}" fill-opacity="{level / LEVELS}" d="{path}"/>' for sign, level, path in shades(matrix)
    )
    label = f"{caption}: queries down, keys across"
    return (
        f'<figure><svg viewBox="-1 -1 {width + 2} {height + 2}" role="img" aria-label="{label}">'
        f'<rect x="-0.5" y="-0.5" width="{width + 1}" height="{height + 1}"/>{paths}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def shades(matrix: np.ndarray) -> list[tuple[str, int, str]]:
    """(sign, level, SVG path of all runs) of each shade; a row's largest weight has the deepest."""
    largest = np.abs(matrix).max(axis=1, keepdims=True)
    share = np.divide(np.abs(matrix), largest, out=np.zeros(matrix.shape), where=largest > 0)
    levels = np.ceil(LEVELS * np.sqrt(share) - 1e-6).astype(int) * np.where(matrix < 0, -1, 1)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(levels):
        ends = [*np.flatnonzero(np.diff(line)) + 1, len(line)]
        for start, end in zip([0, *ends], ends):
            if line[start]:
                place = f"M{CELL * start} {CELL * row}h{CELL * (end - start)}v{CELL}h-{CELL * (end - start)}z"
                paths.setdefault(int(line[start]), []).append(place)
    return [("minus" if level < 0 else "plus", abs(level), "".join(runs)) for level, runs in sorted(paths.items())]


def tokens(random: np.random.Generator, length: int) -> np.ndarray:
    """float32 [1, length, 1, H]: noise around one of four topics, which last a few tokens each."""
    topics = 1.5 * random.standard_normal((4, HEAD_DIM))
    return (topics[np.arange(length) // 3 % 4] + normal(random, length, HEAD_DIM)).astype(np.float32)[None, :, None]


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """float32, standard normal."""
    return random.standard_normal(shape).astype(np.float32)


def example_pattern() -> Any:
    """A composed pattern: neighbours, two columns that all see, and a comb."""
    from jaxformer.attention import patterns

    return patterns.local(2) | patterns.global_tokens((0,)) | patterns.dilated(None, 8)
