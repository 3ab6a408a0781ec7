"""Formulas as pure functions: arrays in, arrays out. Needs JAX alone."""

from jaxformer.functional.batch_norm import BatchStatistics, batch_norm, batch_statistics, update_running
from jaxformer.functional.expert_dispatch import DISPATCHES, einsum_dispatch, sort_dispatch
from jaxformer.functional.experts import (
    ExpertRoutes,
    balance_loss,
    check_experts,
    expert_capacities,
    route_tokens,
    router_jitter,
    router_z_loss,
)
from jaxformer.functional.feature_maps import FEATURE_MAPS, elu_features, relu_features, softplus_features
from jaxformer.functional.grouped_matmul import grouped_matmul
from jaxformer.functional.halting import adaptive_steps, halting_weights, ponder_cost
from jaxformer.functional.losses import CrossEntropy, chunked_cross_entropy, cross_entropy, mean_loss
from jaxformer.functional.masks import (
    as_mask,
    causal_mask,
    combine_masks,
    mask_from_lengths,
    padding_mask,
    segment_mask,
)
from jaxformer.functional.norms import layer_norm, rms_norm
from jaxformer.functional.numerics import compute_dtype, first_argmax
from jaxformer.functional.pooling import POOLINGS, pool_tokens
from jaxformer.functional.positions import (
    AlibiBias,
    RelativeBias,
    alibi_slopes,
    apply_rotary,
    relative_position_bucket,
    sinusoidal_positions,
)
from jaxformer.functional.reversible import ReversibleOutput, merge_streams, reversible_stack, split_streams
from jaxformer.functional.sampling import (
    apply_repetition_penalty,
    check_sampling,
    min_p_filter,
    sample_logits,
    top_k_filter,
    top_p_filter,
)
from jaxformer.functional.softmax import masked_softmax

__all__ = [
    "DISPATCHES",
    "FEATURE_MAPS",
    "POOLINGS",
    "AlibiBias",
    "BatchStatistics",
    "CrossEntropy",
    "ExpertRoutes",
    "RelativeBias",
    "ReversibleOutput",
    "adaptive_steps",
    "alibi_slopes",
    "apply_repetition_penalty",
    "apply_rotary",
    "as_mask",
    "balance_loss",
    "batch_norm",
    "batch_statistics",
    "causal_mask",
    "check_experts",
    "check_sampling",
    "chunked_cross_entropy",
    "combine_masks",
    "compute_dtype",
    "cross_entropy",
    "einsum_dispatch",
    "elu_features",
    "expert_capacities",
    "first_argmax",
    "grouped_matmul",
    "halting_weights",
    "layer_norm",
    "mask_from_lengths",
    "masked_softmax",
    "mean_loss",
    "merge_streams",
    "min_p_filter",
    "padding_mask",
    "ponder_cost",
    "pool_tokens",
    "relative_position_bucket",
    "relu_features",
    "reversible_stack",
    "rms_norm",
    "route_tokens",
    "router_jitter",
    "router_z_loss",
    "sample_logits",
    "segment_mask",
    "sinusoidal_positions",
    "softplus_features",
    "sort_dispatch",
    "split_streams",
    "top_k_filter",
    "top_p_filter",
    "update_running",
]
