"""What models cost, what they attend to, and how their losses slope and curve: formulas, counts, checks and plots."""

from jaxformer.analysis.attention_view import AttentionView, attention_view
from jaxformer.analysis.cost import attention_cost, growth_exponent, overtaking_length
from jaxformer.analysis.costs.work import AttentionCost, Work
from jaxformer.analysis.count import CompiledCost, compiled_cost, count_matmul_operations
from jaxformer.analysis.curvature import (
    Eigenvalues,
    gauss_newton_product,
    hessian_eigenvalues,
    hessian_vector_product,
    top_eigenvalues,
)
from jaxformer.analysis.experts import FeedForwardCost, feed_forward_cost
from jaxformer.analysis.gradients import GradientReport, GradientRow, check_gradients
from jaxformer.analysis.grids import Grid, Separability, read_grid, separability
from jaxformer.analysis.joined_tokens import character_groups, join_tokens
from jaxformer.analysis.model_cost import ModelCost, forward_products, model_cost
from jaxformer.analysis.model_costs.parts import PARTS
from jaxformer.analysis.noise_scale import (
    MinibatchStatistics,
    NoiseScale,
    expected_variance,
    minibatch_statistics,
    noise_scale_of_batches,
    noise_scale_of_examples,
)
from jaxformer.analysis.normalisation import NormFigures, compare_norms, format_figures, vary_lengths
from jaxformer.analysis.plots import plot_costs, plot_curves, plot_metrics, plot_patterns, plot_schedules
from jaxformer.analysis.recording import AttentionMap, record_attention, token_texts
from jaxformer.analysis.roofline import DEVICES, Bound, Device, roofline
from jaxformer.analysis.second_order import (
    SecondOrderCost,
    SecondOrderStep,
    gauss_newton_step,
    newton_step,
    second_order_cost,
)
from jaxformer.analysis.trajectories import SURFACES, Surface, plot_trajectories, point_params, trajectory
from jaxformer.analysis.translation_maps import attention_maps

__all__ = [
    "DEVICES",
    "PARTS",
    "SURFACES",
    "AttentionCost",
    "AttentionMap",
    "AttentionView",
    "Bound",
    "CompiledCost",
    "Device",
    "Eigenvalues",
    "FeedForwardCost",
    "GradientReport",
    "GradientRow",
    "Grid",
    "MinibatchStatistics",
    "ModelCost",
    "NoiseScale",
    "NormFigures",
    "SecondOrderCost",
    "SecondOrderStep",
    "Separability",
    "Surface",
    "Work",
    "attention_cost",
    "attention_maps",
    "attention_view",
    "character_groups",
    "check_gradients",
    "compare_norms",
    "compiled_cost",
    "count_matmul_operations",
    "expected_variance",
    "feed_forward_cost",
    "format_figures",
    "forward_products",
    "gauss_newton_product",
    "gauss_newton_step",
    "growth_exponent",
    "hessian_eigenvalues",
    "hessian_vector_product",
    "join_tokens",
    "minibatch_statistics",
    "model_cost",
    "newton_step",
    "noise_scale_of_batches",
    "noise_scale_of_examples",
    "overtaking_length",
    "plot_costs",
    "plot_curves",
    "plot_metrics",
    "plot_patterns",
    "plot_schedules",
    "plot_trajectories",
    "point_params",
    "read_grid",
    "record_attention",
    "roofline",
    "second_order_cost",
    "separability",
    "token_texts",
    "top_eigenvalues",
    "trajectory",
    "vary_lengths",
]
