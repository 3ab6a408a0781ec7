"""Generation: prompts in, tokens out, over explicit caches."""

from jaxformer.inference.beam import BeamOutput, beam_search
from jaxformer.inference.generate import generate, stream
from jaxformer.inference.score import TokenScores, score
from jaxformer.inference.sources import has_encoder
from jaxformer.inference.translate import Hypothesis, translate

__all__ = [
    "BeamOutput",
    "Hypothesis",
    "TokenScores",
    "beam_search",
    "generate",
    "has_encoder",
    "score",
    "stream",
    "translate",
]
