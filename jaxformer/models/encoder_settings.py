"""The settings of the parts around an encoder's stack, and of the heads, refused where they do not fit each other."""

from typing import Any


def check_encoder_parts(config: Any) -> None:
    """Refuse token types, a norm of embeddings or a sentence head where nothing fits them.

    Args:
      config: a ``TransformerConfig``.

    Raises:
      ValueError: as said, or a number of types that is no integer of at least 0.
    """
    count, architecture = config.num_token_types, config.architecture
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"num_token_types={count!r} must be an integer of at least 0")
    if count and architecture == "encoder_decoder":
        raise ValueError(
            f"num_token_types={count} needs architecture='encoder' or 'decoder', not 'encoder_decoder', whose source "
            "and target are told apart by the two sides"
        )
    if config.embedding_norm and config.stack == "universal":
        raise ValueError("embedding_norm=True needs stack='plain': stack='universal' adds positions at every step")
    if config.next_sentence and architecture != "encoder":
        raise ValueError(f"next_sentence=True needs architecture='encoder', not {architecture!r}")


def check_output_head(config: Any) -> None:
    """Refuse settings of the output head that do not fit each other.

    Args:
      config: a ``TransformerConfig``.

    Raises:
      ValueError: as said.
    """
    if config.scale_logits and not config.tie_embeddings:
        raise ValueError("scale_logits=True needs tie_embeddings=True: a head of its own learns its scale")
    for name in ("head_transform", "head_bias"):
        if getattr(config, name) and config.num_future_tokens > 1:
            raise ValueError(
                f"{name}=True can't be with num_future_tokens={config.num_future_tokens}, whose losses are computed "
                "from the hidden states and a kernel alone"
            )
