"""DistilBERT's encoder at its published size."""

from typing import Any

from jaxformer.models.bert import BERT_FIELDS
from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# Sanh et al. 2019, section 3. Tiny is ours, for tests and first steps.
DISTILBERT_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 1, "embed_dim": 128, "num_heads": 2},
    "base": {"num_layers": 6, "embed_dim": 768, "num_heads": 12},
}

DISTILBERT_FIELDS: dict[str, Any] = {**BERT_FIELDS, "num_token_types": 0, "next_sentence": False}


def distilbert(size: str | None = None, **fields: Any) -> Transformer:
    """DistilBERT: BERT's encoder of half the layers, without token types and pooler.

    Sanh et al. 2019, "DistilBERT, a distilled version of BERT", arXiv:1910.01108, section 3.

    Args:
      size: a key of ``DISTILBERT_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``DISTILBERT_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, DISTILBERT_SIZES, DISTILBERT_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder"}))
