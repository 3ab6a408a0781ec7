"""Generation: prompts in, tokens out, over explicit caches."""

from jaxformer.inference.beam import BeamOutput, beam_search
from jaxformer.inference.generate import generate, stream
from jaxformer.inference.score import TokenScores, score

__all__ = ["BeamOutput", "TokenScores", "beam_search", "generate", "score", "stream"]
