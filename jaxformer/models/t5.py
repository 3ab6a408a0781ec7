"""T5's encoder and decoder at their published sizes, versions 1.0 and 1.1 (whose shapes are Flan-T5's and mT5's)."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# Raffel et al. 2020, section 3.7. Tiny is ours, for tests and first steps.
T5_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 256, "vocab_size": 259},
    "small": {"num_layers": 6, "embed_dim": 512, "num_heads": 8, "head_dim": 64, "mlp_dim": 2048},
    "base": {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "head_dim": 64, "mlp_dim": 3072},
    "large": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16, "head_dim": 64, "mlp_dim": 4096},
    "3b": {"num_layers": 24, "embed_dim": 1024, "num_heads": 32, "head_dim": 128, "mlp_dim": 16_384},
    "11b": {"num_layers": 24, "embed_dim": 1024, "num_heads": 128, "head_dim": 128, "mlp_dim": 65_536},
}

# google-research/text-to-text-transfer-transformer, released_checkpoints.md.
T5_V1_1_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 128, "vocab_size": 259},
    "small": {"num_layers": 8, "embed_dim": 512, "num_heads": 6, "head_dim": 64, "mlp_dim": 1024},
    "base": {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "head_dim": 64, "mlp_dim": 2048},
    "large": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16, "head_dim": 64, "mlp_dim": 2816},
    "xl": {"num_layers": 24, "embed_dim": 2048, "num_heads": 32, "head_dim": 64, "mlp_dim": 5120},
    "xxl": {"num_layers": 24, "embed_dim": 4096, "num_heads": 64, "head_dim": 64, "mlp_dim": 10_240},
}

# Raffel et al. 2020, section 2.1 and 3.1; the initialisers are those of mesh-tensorflow.
T5_FIELDS: dict[str, Any] = {
    "vocab_size": 32_128,
    "max_length": 512,
    "positions": "relative",
    "norm": "rms",
    "norm_epsilon": 1e-6,
    "activation": "relu",
    "use_bias": False,
    "attention_scale": 1.0,
    "scale_logits": True,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "mlp_dropout_rate": 0.1,
    "final_dropout_rate": 0.1,
    "kernel_init": "fan_in",
    "init_stddev": 1.0,
    "scale_residual_init": False,
}

# Pre-trained without dropout; fine-tuning turns it on again.
T5_V1_1_FIELDS: dict[str, Any] = {
    **T5_FIELDS,
    "activation": "geglu_tanh",
    "tie_embeddings": False,
    "scale_logits": False,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "mlp_dropout_rate": 0.0,
    "final_dropout_rate": 0.0,
}


def t5(size: str | None = None, **fields: Any) -> Transformer:
    """T5 1.0: encoder and decoder, pre-norm without biases, buckets of relative positions, unscaled attention logits.

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    arXiv:1910.10683. One table of relative positions serves all layers of a side; cross-attention has none.

    Args:
      size: a key of ``T5_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``T5_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, T5_SIZES, T5_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder_decoder"}))


def t5_v1_1(size: str | None = None, **fields: Any) -> Transformer:
    """T5 1.1 (also Flan-T5's shapes): T5 with a gated GELU and an output head of its own.

    Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202; Flan-T5: Chung et al. 2022, arXiv:2210.11416.

    Args:
      size: a key of ``T5_V1_1_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``T5_V1_1_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, T5_V1_1_SIZES, T5_V1_1_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder_decoder"}))
