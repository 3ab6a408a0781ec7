"""The settings of what an encoder beside a decoder reads, refused where they do not fit each other."""

from typing import Any


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
