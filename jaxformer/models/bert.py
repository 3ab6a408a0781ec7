"""BERT's encoder at its published sizes."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# Base and large: Devlin et al. 2019, section 3. Smaller ones: Turc et al. 2019, arXiv:1908.08962, table 1.
BERT_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 128, "num_heads": 2},
    "mini": {"num_layers": 4, "embed_dim": 256, "num_heads": 4},
    "small": {"num_layers": 4, "embed_dim": 512, "num_heads": 8},
    "medium": {"num_layers": 8, "embed_dim": 512, "num_heads": 8},
    "base": {"num_layers": 12, "embed_dim": 768, "num_heads": 12},
    "large": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16},
}

# Devlin et al. 2019, appendix A.2; the norms' epsilon and the initialisers are those of the authors' code.
BERT_FIELDS: dict[str, Any] = {
    "vocab_size": 30_522,
    "max_length": 512,
    "num_token_types": 2,
    "embedding_norm": True,
    "norm_placement": "post",
    "norm_epsilon": 1e-12,
    "activation": "gelu",
    "head_transform": True,
    "head_bias": True,
    "next_sentence": True,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "scale_residual_init": False,
}


def bert(size: str | None = None, **fields: Any) -> Transformer:
    """BERT: bidirectional encoder with token types, post-norm, a head of masked tokens and one of next sentences.

    Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
    arXiv:1810.04805. Deviation: kernels begin normal, not normal cut off at two standard deviations.

    Args:
      size: a key of ``BERT_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``BERT_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, BERT_SIZES, BERT_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder"}))
