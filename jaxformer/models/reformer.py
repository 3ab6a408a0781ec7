"""Reformer: reversible layers with LSH and local attention, axial positions and a feed-forward layer in chunks."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.transformer import Transformer

# Base and large: google/trax, trax/supervised/configs/reformer_enwik8.gin (large: what it says to use "if more memory
# is available", which is google/reformer-enwik8 of 149 million parameters). Small is the shape published as
# google/reformer-crime-and-punishment. A query sees the window of 2 * chunk_len - 1 tokens before it that chunks of
# local attention show at most. Tiny is ours, for tests and first steps.
_ENWIK8: dict[str, Any] = {
    "num_layers": 12,
    "num_heads": 8,
    "max_length": 65536,
    "vocab_size": 258,
    "attention": ("local", "local", "lsh", "local"),
    "attention_args": {
        "local": {"window": 255},
        "lsh": {"num_hashes": 2, "num_buckets": 512, "chunk_size": 256},
    },
    "axial_shape": (128, 512),
    "mlp_chunk_size": 4096,
}
REFORMER_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 4,
        "max_length": 256,
        "vocab_size": 259,
        "attention": ("local", "lsh"),
        "attention_args": {"local": {"window": 31}, "lsh": {"num_hashes": 2, "num_buckets": 16, "chunk_size": 32}},
        "axial_dims": (16, 48),
        "mlp_chunk_size": 64,
    },
    "small": {
        "num_layers": 6,
        "embed_dim": 256,
        "num_heads": 2,
        "head_dim": 64,
        "mlp_dim": 512,
        "max_length": 524_288,
        "vocab_size": 320,
        "attention": ("local", "lsh"),
        "attention_args": {
            "local": {"window": 127},
            "lsh": {"num_hashes": 1, "num_buckets": (64, 128), "chunk_size": 64},
        },
        "axial_shape": (512, 1024),
        "axial_dims": (64, 192),
        "mlp_chunk_size": 4096,
    },
    "base": {**_ENWIK8, "embed_dim": 768, "head_dim": 64, "mlp_dim": 2048, "axial_dims": (256, 512)},
    "large": {**_ENWIK8, "embed_dim": 1024, "head_dim": 128, "mlp_dim": 4096, "axial_dims": (256, 768)},
}

REFORMER_FIELDS: dict[str, Any] = {
    "residual": "reversible",
    "residual_merge": "concatenate",
    "tie_embeddings": False,
    "positions": "axial",
    "activation": "relu",
    "kernel_init": "xavier_uniform",
    "scale_residual_init": False,
}


def reformer(size: str | None = None, **fields: Any) -> Transformer:
    """Reformer: pre-norm, reversible, LSH and local layers in turn, axial positions, feed-forward layer in chunks.

    Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451. LSH layers share query and
    key, local ones don't, as in the published configurations. The output is made of both streams side by side.
    Memory for gradients does not grow with ``num_layers``; with the objective's ``chunk_size`` the logits are never
    whole either. ``architecture`` may be ``encoder`` or ``encoder_decoder``.

    Training never reads later tokens, but which earlier ones an LSH layer shows depends on them; decoding follows the
    rule of ``jaxformer.attention.lsh_step`` and equals the full pass where a chunk holds the whole row and
    ``within_bucket`` is set.

    Deviations: attention projections have biases (``use_bias``), tables of embeddings and positions begin at
    ``init_stddev``, local windows move with the query, and no dropout of attention weights (LSH has none).

    Args:
      size: a key of ``REFORMER_SIZES`` (None: ``fields`` give every size, ``attention`` and its arguments among them).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``REFORMER_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, or fields that ``TransformerConfig`` refuses.
    """
    if size is not None and size not in REFORMER_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(REFORMER_SIZES)}")
    return Transformer(TransformerConfig(**{**REFORMER_FIELDS, **(REFORMER_SIZES[size] if size else {}), **fields}))
