"""GPT-2's decoder at its published sizes, and modern variants of it through the same fields."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.transformer import Transformer

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2; the head is 64 wide throughout.
# Tiny is ours, for tests and first steps.
GPT_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_length": 256, "vocab_size": 259},
    "small": {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "max_length": 1024, "vocab_size": 50257},
    "medium": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16, "max_length": 1024, "vocab_size": 50257},
    "large": {"num_layers": 36, "embed_dim": 1280, "num_heads": 20, "max_length": 1024, "vocab_size": 50257},
    "xl": {"num_layers": 48, "embed_dim": 1600, "num_heads": 25, "max_length": 1024, "vocab_size": 50257},
}


def gpt(size: str | None = None, **fields: Any) -> Transformer:
    """Decoder-only language model: GPT-2 exactly by default (pre-norm, learned positions, tanh GELU, tied head).

    Radford et al. 2019. Modern options are fields: ``positions="rotary"``, ``norm="rms"``, ``activation="swiglu"``,
    ``num_kv_heads``, ``use_bias=False``, ``tie_embeddings=False``.

    Args:
      size: a key of ``GPT_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    if size is not None and size not in GPT_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(GPT_SIZES)}")
    preset = GPT_SIZES[size] if size else {}
    return Transformer(TransformerConfig(**{**preset, **fields, "architecture": "decoder"}))
