"""RoBERTa's encoder at its published sizes."""

from typing import Any

from jaxformer.models.bert import BERT_FIELDS
from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# Liu et al. 2019, section 5. Tiny is ours, for tests and first steps.
ROBERTA_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "embed_dim": 128, "num_heads": 2},
    "base": {"num_layers": 12, "embed_dim": 768, "num_heads": 12},
    "large": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16},
}

# As in the authors' code, fairseq: its table of positions begins with that of the padding token, whose id is 1; and
# the published checkpoints have a table of one token type.
ROBERTA_FIELDS: dict[str, Any] = {
    **BERT_FIELDS,
    "vocab_size": 50_265,
    "position_offset": 2,
    "positions_skip_padding": True,
    "num_token_types": 1,
    "norm_epsilon": 1e-5,
    "next_sentence": False,
}


def roberta(size: str | None = None, **fields: Any) -> Transformer:
    """RoBERTa: BERT's encoder without token types and next sentences, positions counted over real tokens.

    Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach", arXiv:1907.11692.

    Args:
      size: a key of ``ROBERTA_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``ROBERTA_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, ROBERTA_SIZES, ROBERTA_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "encoder"}))
