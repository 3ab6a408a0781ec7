"""What models cost and what they attend to: formulas, counts and plots."""

from jaxformer.analysis.cost import attention_cost, growth_exponent, overtaking_length
from jaxformer.analysis.costs.work import AttentionCost, Work
from jaxformer.analysis.count import CompiledCost, compiled_cost, count_matmul_operations
from jaxformer.analysis.experts import FeedForwardCost, feed_forward_cost
from jaxformer.analysis.gradients import GradientReport, GradientRow, check_gradients
from jaxformer.analysis.translation_maps import AttentionMap, attention_maps, token_texts

__all__ = [
    "AttentionCost",
    "AttentionMap",
    "CompiledCost",
    "FeedForwardCost",
    "GradientReport",
    "GradientRow",
    "Work",
    "attention_cost",
    "attention_maps",
    "check_gradients",
    "compiled_cost",
    "count_matmul_operations",
    "feed_forward_cost",
    "growth_exponent",
    "overtaking_length",
    "token_texts",
]
