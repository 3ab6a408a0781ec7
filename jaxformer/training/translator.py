"""A trained model of pairs as a function from texts to texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np
from ml_collections import ConfigDict

from jaxformer.analysis import AttentionMap, attention_maps
from jaxformer.inference import translate
from jaxformer.training.assembly import tokenizer_name
from jaxformer.training.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class TextHypothesis:
    """One translation.

    Attributes:
      text: detokenised.
      score: as ``beam_search`` scores it; NaN of a sampled one.
    """

    text: str
    score: float


@dataclasses.dataclass(frozen=True)
class Translator:
    """A model with its variables and tokenizers.

    Attributes:
      model: an encoder-decoder ``Transformer`` or a ``RecurrentSeq2Seq``.
      params: its parameters.
      model_state: its other variables.
      source_tokenizer: of what it reads.
      tokenizer: of what it writes.
      start_id: what its decoder begins with.
      max_new_tokens: of a translation, at most, where a call does not say; None = each call has to.
    """

    model: nn.Module
    params: Any
    model_state: Any
    source_tokenizer: Any
    tokenizer: Any
    start_id: int
    max_new_tokens: int | None = None

    def translate_ids(self, sources: Sequence[Any], **options: Any) -> list[list[TextHypothesis]]:
        """As ``translate`` below, of token ids that end with the source's end id."""
        if self.max_new_tokens is not None:
            options = {"max_new_tokens": self.max_new_tokens, **options}
        found = translate(
            self.model,
            self.params,
            sources,
            start_id=self.start_id,
            eos_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
            model_state=self.model_state,
            **options,
        )
        return [
            [TextHypothesis(self.tokenizer.decode(hypothesis.tokens.tolist()), hypothesis.score) for hypothesis in row]
            for row in found
        ]

    def translate(self, texts: Sequence[str], **options: Any) -> list[list[TextHypothesis]]:
        """Translates texts.

        Args:
          texts: the sources.
          **options: of ``jaxformer.inference.translate``, as num_beams, num_return, length_penalty or
            max_new_tokens (left out, the run's own).

        Returns:
          The hypotheses of each text, best first.

        Raises:
          ValueError: an option out of its range, or a text too long for the model.
        """
        return self.translate_ids([self.source_ids(text) for text in texts], **options)

    def attention_maps(self, source: str, target: str | None = None, **options: Any) -> dict[str, AttentionMap]:
        """What the model attends to while it writes a translation.

        Args:
          source: a text.
          target: its translation; None = the model's own.
          **options: of ``translate``, for the model's own.

        Returns:
          By name ("cross", and of a Transformer "encoder" and "decoder") weights with the tokens of rows and columns:
          see ``jaxformer.analysis.attention_maps``.
        """
        if target is None:
            target = self.translate([source], **options)[0][0].text
        return attention_maps(
            self.model,
            self.params,
            self.source_ids(source),
            [*self.tokenizer.encode(target), self.tokenizer.eos_id],
            start_id=self.start_id,
            tokenizer=self.tokenizer,
            source_tokenizer=self.source_tokenizer,
            model_state=self.model_state,
        )

    def source_ids(self, text: str) -> np.ndarray:
        """The ids that the encoder reads: those of the text and the id that ends it, int32 [S]."""
        return np.array([*self.source_tokenizer.encode(text), self.source_tokenizer.eos_id], np.int32)


def make_translator(
    directory: RunDirectory, config: ConfigDict, model: nn.Module, params: Any, model_state: Any
) -> Translator:
    """The translator of a run's model, with the tokenizers that the run keeps."""
    from jaxformer.data import decoder_start, load_tokenizer

    tokenizer = load_tokenizer(directory.tokenizer(tokenizer_name(config)))
    separate = config.data.get("source_tokenizer")
    source = tokenizer if separate is None else load_tokenizer(directory.source_tokenizer(separate))
    longest = config.eval.get("max_new_tokens") or None
    return Translator(model, params, model_state, source, tokenizer, decoder_start(tokenizer), longest)


def translates(config: ConfigDict) -> bool:
    """Whether a run is of pairs: its model turns a source into a target."""
    from jaxformer.data import PAIR_DATASETS

    return config.data.name in PAIR_DATASETS
