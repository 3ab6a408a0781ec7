"""Text from a model: prompts to tokens, and tokens back to text as they come."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict


def sample_text(model: nn.Module, params: Any, model_state: Any, tokenizer: Any, config: ConfigDict, seed: int) -> str:
    """The prompt of `config.sample` with the model's continuation."""
    from jaxformer.inference import generate

    settings = dict(config.sample)
    prompt = settings.pop("prompt")
    tokens = generate(
        model,
        params,
        [prompt_tokens(tokenizer, prompt)],
        rng=jax.random.key(seed),
        eos_id=tokenizer.eos_id,
        model_state=model_state,
        **settings,
    )
    text = TextStream(tokenizer)
    for token in np.asarray(tokens)[0].tolist():
        text.add(token)
    text.finish()
    return prompt + text.text


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's tokens; the start of a document where it is empty.

    Raises:
      ValueError: the prompt is empty and the tokenizer has no token for the start of a document.
    """
    if prompt:
        return list(tokenizer.encode(prompt))
    if tokenizer.bos_id is None:
        raise ValueError(f"the prompt is empty and tokenizer {tokenizer.name} has no token that starts a document")
    return [tokenizer.bos_id]


class TextStream:
    """Turns the tokens of one output into text piece by piece; nothing follows the end of the document.

    Args:
      tokenizer: decodes tokens.

    Attributes:
      text: what was given out so far.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._ended = False
        self.text = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is now certain: a character may need several tokens."""
        self._ended = self._ended or token == self._tokenizer.eos_id
        if self._ended:
            return ""
        self._tokens.append(token)
        decoded = self._tokenizer.decode(self._tokens)
        # What stands for an unfinished character at the end may still change.
        return self._give_out(decoded.rstrip("\N{REPLACEMENT CHARACTER}"))

    def finish(self) -> str:
        """Returns what is left at the end."""
        return self._give_out(self._tokenizer.decode(self._tokens))

    def _give_out(self, decoded: str) -> str:
        piece = decoded[len(self.text) :]
        self.text += piece
        return piece
