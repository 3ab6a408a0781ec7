"""The settings of normalisation, refused where they do not fit each other or the rest of a config."""

from typing import Any

from jaxformer.layers import HIDDEN_NORM_PLACEMENTS, NORMS

NORM_CHOICES = {
    "norm": (*NORMS, "none"),
    "norm_placement": ("pre", "post", "none"),
    "mlp_norm": (None, *NORMS),
    "mlp_norm_placement": (None, *HIDDEN_NORM_PLACEMENTS),
}
"""Fields of a config that are one of several names."""


def check_norms(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Args:
      config: a ``TransformerConfig``.

    Raises:
      ValueError: a number out of range, a setting that nothing would read, or a norm that its place cannot have.
    """
    batch = [name for name in ("norm", "mlp_norm") if getattr(config, name) == "batch"]
    momentum = config.norm_momentum
    if momentum is not None:
        if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0.0 <= momentum <= 1.0:
            raise ValueError(f"norm_momentum={momentum!r} must be a number in [0, 1], or None")
        if not batch:
            raise ValueError(f"norm_momentum={momentum} needs norm='batch' or mlp_norm='batch', which has averages")
    if config.mlp_norm is None and config.mlp_norm_placement is not None:
        raise ValueError(f"mlp_norm_placement={config.mlp_norm_placement!r} needs mlp_norm, which is None")
    if config.norm == "none" and config.embedding_norm:
        raise ValueError("embedding_norm=True needs a norm, not norm='none'")
    if config.mlp_norm is not None and config.num_experts is not None:
        raise ValueError(
            f"mlp_norm={config.mlp_norm!r} can't be given with num_experts={config.num_experts}: experts have no norm "
            "of their own"
        )
    if batch:
        _check_batch(config, batch[0])


def _check_batch(config: Any, name: str) -> None:
    """Refuse batch norm where its statistics would be wrong."""
    if config.stack != "plain":
        raise ValueError(
            f"{name}='batch' needs stack='plain', not {config.stack!r}, whose steps have different statistics but only "
            "one block to keep their averages in"
        )
    if config.norm == "batch" and config.head_transform:
        raise ValueError(
            "head_transform=True can't be given with norm='batch': training computes the head for some positions only"
        )
    if config.mlp_norm == "batch" and config.mlp_chunk_size is not None:
        raise ValueError(
            f"mlp_chunk_size={config.mlp_chunk_size} can't be given with mlp_norm='batch', whose statistics need all "
            "positions"
        )
