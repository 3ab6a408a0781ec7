"""The settings of what an encoder beside a decoder reads, refused where they do not fit each other."""

from typing import Any

from jaxformer.models.position_settings import TABLES

_BOUNDED = ("linformer", "sinkhorn")
"""Kinds of attention whose arrays end at ``max_length``."""


def check_source_vocabulary(config: Any) -> None:
    """Refuse a source vocabulary that nothing would read.

    Args:
      config: with ``share_embeddings`` and ``source_vocab_size``; has an encoder beside its decoder unless
        ``architecture`` says otherwise.

    Raises:
      ValueError: as said, or a size that is no integer of at least 1.
    """
    architecture = getattr(config, "architecture", "encoder_decoder")
    if not config.share_embeddings and architecture != "encoder_decoder":
        raise ValueError(
            f"share_embeddings=False needs architecture='encoder_decoder', not {architecture!r}, which has one side"
        )
    size = config.source_vocab_size
    if size is None:
        return
    if config.share_embeddings:
        raise ValueError(f"source_vocab_size={size!r} needs share_embeddings=False: one table has vocab_size rows")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"source_vocab_size={size!r} must be an integer of at least 1, or None for vocab_size")


def source_limit(config: Any) -> int | None:
    """How many tokens a source may have: ``max_length`` where positions or attentions end there, else any number.

    Args:
      config: a ``TransformerConfig`` of an encoder-decoder.
    """
    kinds = {choice.kind.name for choice in (*config.encoder_side.attentions, config.cross)}
    return config.max_length if config.positions in TABLES or kinds & set(_BOUNDED) else None
