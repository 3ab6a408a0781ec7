"""The parts of a model, told from the names under which Flax traces its modules and keeps their parameters."""

import functools
import re
from collections.abc import Iterable

EMBEDDING = "embedding"
PROJECTIONS = "attention projections"
ATTENTION = "attention"
FEED_FORWARD = "feed-forward"
RECURRENT = "recurrent cells"
NORMS = "norms"
HEAD = "head"
RESIDUAL = "residual stream"
PARTS = (EMBEDDING, PROJECTIONS, ATTENTION, FEED_FORWARD, RECURRENT, NORMS, HEAD, RESIDUAL)
"""All parts, in the order of a table; the residual stream is what belongs to no other part."""

# The innermost name of a scope that one of these matches decides. A tied table is read by `attend` for the head.
_NAMES = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (NORMS, r"(\w+_)?norm"),
        (HEAD, r"token_embedding\.attend|(token|output|sentence|next_sentence|future_\d+|\d+)_head"),
        (HEAD, r"head_transform|head_bias|pooler|classifier|readout|head_dropout|TaskModel"),
        (EMBEDDING, r"(token|source|token_type|position)_embedding(\..*)?|\w+\._embed"),
        (ATTENTION, r"(cross_)?attention\._(attend|arrays|weights)|arguments(\..*)?|relative_bias"),
        (ATTENTION, r"RecurrentSeq2Seq\._attend|query_projection|key_projection|score_vector"),
        (PROJECTIONS, r"(cross_)?attention(\._project)?|\w+\.start"),
        (FEED_FORWARD, r"mlp(_convolution)?(\..*)?|experts|router|shared"),
        (RECURRENT, r"(encoder|decoder|bridge)_\d+(_\d+)?(\..*)?"),
        # Within a task's model, whose own products are its head's.
        (RESIDUAL, r"(body|encoder|decoder|stack)(\..*)?"),
    )
)
# Under these names of their own stand products of both: the output projection, and cached steps of attention.
_ATTENTION_LAYERS = ("attention", "cross_attention")
# What transformations put around a name: jvp(Transformer), transpose(jvp(…)).
_WRAPPED = re.compile(r"\w+\((.*)\)")


@functools.lru_cache(maxsize=10_000)
def find_part(path: str) -> str:
    """The part that a scope of a trace (`…/decoder/stack/…/mlp_norm`) or the path of a parameter belongs to."""
    for name in _innermost_first(path):
        for part, pattern in _NAMES:
            if pattern.fullmatch(name):
                return part
    return RESIDUAL


@functools.lru_cache(maxsize=10_000)
def is_attention_layer(path: str) -> bool:
    """Whether a scope is that of an attention's layer itself, in which projections and attention both stand."""
    for name in _innermost_first(path):
        if any(pattern.fullmatch(name) for _, pattern in _NAMES):
            return name in _ATTENTION_LAYERS
    return False


def _innermost_first(path: str) -> Iterable[str]:
    for name in reversed(path.split("/")):
        while wrapped := _WRAPPED.fullmatch(name):
            name = wrapped.group(1)
        yield name
