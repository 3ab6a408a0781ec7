"""The first GPT's decoder at its published size."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# Radford et al. 2018, section 4.1. Tiny is ours, for tests and first steps.
GPT_2018_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_length": 256, "vocab_size": 259},
    "base": {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "max_length": 512, "vocab_size": 40_478},
}

GPT_2018_FIELDS: dict[str, Any] = {
    "norm_placement": "post",
    "activation": "gelu_tanh",
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "scale_residual_init": False,
}


def gpt_2018(size: str | None = None, **fields: Any) -> Transformer:
    """The first GPT: decoder-only, post-norm, learned positions, tied head.

    Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", section 4.1 (no arXiv number);
    the tanh form of GELU and the norms' epsilon are those of the authors' code.

    Args:
      size: a key of ``GPT_2018_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``GPT_2018_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, GPT_2018_SIZES, GPT_2018_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "decoder"}))
