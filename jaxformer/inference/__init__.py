"""Generation: prompts in, tokens out, over explicit caches."""

from jaxformer.inference.generate import generate, stream

__all__ = ["generate", "stream"]
