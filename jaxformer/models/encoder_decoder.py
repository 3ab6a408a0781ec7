"""The Transformer as published in 2017, encoder and decoder, at its published sizes."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.transformer import Transformer

# Vaswani et al. 2017, table 3, with a shared vocabulary of about 37,000 (section 5.1). Tiny is ours, for tests and
# first steps.
ENCODER_DECODER_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "embed_dim": 128, "num_heads": 4, "dropout_rate": 0.1, "vocab_size": 259},
    "base": {"num_layers": 6, "embed_dim": 512, "num_heads": 8, "dropout_rate": 0.1, "vocab_size": 37_000},
    "big": {"num_layers": 6, "embed_dim": 1024, "num_heads": 16, "dropout_rate": 0.3, "vocab_size": 37_000},
}

ENCODER_DECODER_FIELDS: dict[str, Any] = {
    "norm_placement": "post",
    "norm_epsilon": 1e-6,
    "activation": "relu",
    "positions": "sinusoidal",
    "scale_embedding": True,
    "kernel_init": "xavier_uniform",
    "scale_residual_init": False,
}


def encoder_decoder(size: str | None = None, **fields: Any) -> Transformer:
    """The Transformer of 2017: encoder and decoder, post-norm, sinusoidal positions, one scaled table for all tokens.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, sections 3 and 5.4, table 3. The paper leaves
    three things open, which are as in the authors' tensor2tensor: kernels begin Xavier-uniform, embeddings normal with
    variance 1 / embed_dim, and the norms' epsilon is 1e-6. Variants are fields: ``norm_placement="pre"`` (Xiong et al.
    2020, arXiv:2002.04745), ``share_embeddings=False`` with ``source_vocab_size``, ``positions="learned"``.

    Args:
      size: a key of ``ENCODER_DECODER_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``ENCODER_DECODER_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    if size is not None and size not in ENCODER_DECODER_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(ENCODER_DECODER_SIZES)}")
    preset = {**ENCODER_DECODER_FIELDS, **(ENCODER_DECODER_SIZES[size] if size else {}), **fields}
    width = preset.get("embed_dim")
    if isinstance(width, int) and width > 0:
        preset.setdefault("init_stddev", width**-0.5)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder_decoder"}))


def transformer_tiny(**fields: Any) -> Transformer:
    """``encoder_decoder`` of the size tiny: two layers of width 128."""
    return encoder_decoder("tiny", **fields)


def transformer_base(**fields: Any) -> Transformer:
    """``encoder_decoder`` of the paper's base model: six layers of width 512."""
    return encoder_decoder("base", **fields)


def transformer_big(**fields: Any) -> Transformer:
    """``encoder_decoder`` of the paper's big model: six layers of width 1024."""
    return encoder_decoder("big", **fields)
