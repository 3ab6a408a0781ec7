"""The Universal Transformer at tensor2tensor's sizes: encoder, decoder language model or both."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.transformer import Transformer

# tensor2tensor's universal_transformer_small, _base and _big; its vocabularies have about 2^15 subwords. There the one
# block is wider than a layer of a Transformer of equal parameters. Tiny is ours, for tests and first steps.
UNIVERSAL_TRANSFORMER_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 4, "embed_dim": 64, "num_heads": 4, "max_length": 256, "vocab_size": 259},
    "small": {
        "num_layers": 6,
        "embed_dim": 512,
        "mlp_dim": 2048,
        "num_heads": 8,
        "max_length": 256,
        "vocab_size": 32768,
    },
    "base": {
        "num_layers": 6,
        "embed_dim": 1024,
        "mlp_dim": 4096,
        "num_heads": 16,
        "max_length": 256,
        "vocab_size": 32768,
    },
    "big": {
        "num_layers": 6,
        "embed_dim": 2048,
        "mlp_dim": 8192,
        "num_heads": 16,
        "max_length": 256,
        "vocab_size": 32768,
    },
}

# Dehghani et al. 2019, section 2.1, equations 4 to 7.
UNIVERSAL_TRANSFORMER_FIELDS: dict[str, Any] = {
    "positions": "sinusoidal",
    "step_embedding": "sinusoidal",
    "norm_placement": "post",
    "activation": "relu",
    "scale_embedding": True,
    "kernel_init": "xavier_uniform",
    "scale_residual_init": False,
}


def universal_transformer(size: str | None = None, **fields: Any) -> Transformer:
    """One block's parameters in every step: as many steps as layers, or halting of each position by itself.

    Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819: post-norm, ReLU, sinusoidal vectors of position
    and step added at every step. ``num_layers`` is the number of steps, and the largest one with ``halting="act"``, for
    which tensor2tensor takes twice as many. ``convolution_width=3`` gives the separable convolution as transition
    function, ``random_position_start`` positions of longer sequences than those trained on. Deviation: tensor2tensor
    learns the vectors of the steps.

    Args:
      size: a key of ``UNIVERSAL_TRANSFORMER_SIZES`` (None: ``fields`` give every size).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``UNIVERSAL_TRANSFORMER_FIELDS``;
        ``architecture`` is ``decoder`` by default.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    if size is not None and size not in UNIVERSAL_TRANSFORMER_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(UNIVERSAL_TRANSFORMER_SIZES)}")
    preset = {**UNIVERSAL_TRANSFORMER_FIELDS, **(UNIVERSAL_TRANSFORMER_SIZES[size] if size else {}), **fields}
    return Transformer(TransformerConfig(**{**preset, "stack": "universal"}))
