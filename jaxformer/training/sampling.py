"""Text from a model: prompts to tokens, and tokens back to text as they come."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Tokens decoded again with each new one: enough for any character, and for what precedes a token to tell on it.
_CONTEXT = 16


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
        vocab_size=tokenizer.vocab_size,
        model_state=model_state,
        **settings,
    )
    text = TextStream(tokenizer)
    for token in np.asarray(tokens)[0].tolist():
        text.add(token)
    text.finish()
    return prompt + text.text


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's tokens; where it is empty, the token that starts a document, or else the one that ends the last.

    Raises:
      ValueError: the prompt is empty and the tokenizer has neither of these tokens.
    """
    if prompt:
        return list(tokenizer.encode(prompt))
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise ValueError(
            f"the prompt is empty and tokenizer {tokenizer.name} has no token that starts or ends a document"
        )
    return [start]


class TextStream:
    """Turns the tokens of one output into text piece by piece; nothing follows the end of the document.

    Only the last tokens are decoded each time, so that the work is proportional to the output. They are cut off where
    their text alone is the end of the text of all: not within a character, nor where a token reads otherwise first.

    Args:
      tokenizer: decodes tokens.

    Attributes:
      text: what was given out so far.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0
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
        certain = decoded.rstrip(_UNFINISHED)
        piece = self._give_out(certain)
        if certain == decoded and len(self._tokens) > 2 * _CONTEXT:
            self._shorten(decoded)
        return piece

    def finish(self) -> str:
        """Returns what is left at the end."""
        return self._give_out(self._tokenizer.decode(self._tokens))

    def _give_out(self, decoded: str) -> str:
        piece = decoded[self._given :]
        self._given += len(piece)
        self.text += piece
        return piece

    def _shorten(self, decoded: str) -> None:
        tail = self._tokenizer.decode(self._tokens[-_CONTEXT:])
        if tail and not tail.startswith(_UNFINISHED) and decoded.endswith(tail):
            self._tokens, self._given = self._tokens[-_CONTEXT:], len(tail)
