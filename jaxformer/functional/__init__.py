"""Formulas as pure functions: arrays in, arrays out. Needs JAX alone."""

from jaxformer.functional.masks import (
    as_mask,
    causal_mask,
    combine_masks,
    mask_from_lengths,
    padding_mask,
    segment_mask,
)
from jaxformer.functional.norms import layer_norm, rms_norm
from jaxformer.functional.numerics import compute_dtype
from jaxformer.functional.positions import (
    AlibiBias,
    RelativeBias,
    alibi_slopes,
    apply_rotary,
    relative_position_bucket,
    sinusoidal_positions,
)
from jaxformer.functional.softmax import masked_softmax

__all__ = [
    "AlibiBias",
    "RelativeBias",
    "alibi_slopes",
    "apply_rotary",
    "as_mask",
    "causal_mask",
    "combine_masks",
    "compute_dtype",
    "layer_norm",
    "mask_from_lengths",
    "masked_softmax",
    "padding_mask",
    "relative_position_bucket",
    "rms_norm",
    "segment_mask",
    "sinusoidal_positions",
]
