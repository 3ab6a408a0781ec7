"""The settings of a stack's residual streams, refused where they do not fit each other."""

from typing import Any

from jaxformer.functional.reversible import MERGES

RESIDUALS = ("plain", "reversible")

RESIDUAL_CHOICES = {"residual": RESIDUALS, "residual_merge": MERGES}
"""Fields of a config that are one of several names."""


def check_residual(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Raises:
      ValueError: as said.
    """
    if config.residual == "plain":
        if config.residual_merge != "mean":
            raise ValueError(f"residual_merge={config.residual_merge!r} needs residual='reversible', not 'plain'")
        return
    if config.norm_placement == "post":
        raise ValueError(
            "residual='reversible' needs norm_placement='pre', not 'post': an addition that is normalised can't be "
            "undone"
        )
    if config.stack != "plain":
        raise ValueError(f"residual='reversible' needs stack='plain', not {config.stack!r}")
    if config.remat != "none":
        raise ValueError(
            f"remat={config.remat!r} must be 'none' with residual='reversible', which recomputes every layer"
        )
    if config.residual_merge == "concatenate" and config.tie_embeddings:
        raise ValueError(
            "residual_merge='concatenate' needs tie_embeddings=False: its outputs are twice as wide as embeddings"
        )
