"""Llama's decoder at published sizes."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.preset import preset_fields
from jaxformer.models.transformer import Transformer

# 7b: Touvron et al. 2023, arXiv:2307.09288, table 1 and appendix A.2.1 (Llama 2). 8b: Grattafiori et al. 2024, "The
# Llama 3 Herd of Models", arXiv:2407.21783, table 3. 1b and 3b: Llama 3.2's shapes. Tiny is ours, for tests and first
# steps.
_LLAMA_3: dict[str, Any] = {
    "num_kv_heads": 8,
    "max_length": 8192,
    "vocab_size": 128_256,
    "rotary_base": 500_000.0,
}
LLAMA_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 172,
        "max_length": 256,
        "vocab_size": 259,
    },
    "1b": {**_LLAMA_3, "num_layers": 16, "embed_dim": 2048, "num_heads": 32, "mlp_dim": 8192, "tie_embeddings": True},
    "3b": {**_LLAMA_3, "num_layers": 28, "embed_dim": 3072, "num_heads": 24, "mlp_dim": 8192, "tie_embeddings": True},
    "7b": {
        "num_layers": 32,
        "embed_dim": 4096,
        "num_heads": 32,
        "mlp_dim": 11_008,
        "max_length": 4096,
        "vocab_size": 32_000,
    },
    "8b": {**_LLAMA_3, "num_layers": 32, "embed_dim": 4096, "num_heads": 32, "mlp_dim": 14_336},
}

LLAMA_FIELDS: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "norm_epsilon": 1e-5,
    "activation": "swiglu",
    "use_bias": False,
    "tie_embeddings": False,
}


def llama(size: str | None = None, **fields: Any) -> Transformer:
    """Llama: decoder with rotary positions, RMSNorm, a SwiGLU feed-forward layer, grouped heads and no biases.

    Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971, section 2.2. Feature
    i of a head turns with feature i + head_dim / 2, as in the published checkpoints of Hugging Face; Meta's own files
    pair neighbours. Deviation: Llama 3.1 and later stretch the wavelengths of slow features, which is not here: 1b and
    3b are Llama 3.2's shapes, not its positions.

    Args:
      size: a key of ``LLAMA_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``LLAMA_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    preset = preset_fields(size, LLAMA_SIZES, LLAMA_FIELDS, fields)
    return Transformer(TransformerConfig(**{**preset, "architecture": "decoder"}))
