"""What models cost and what they attend to: formulas, counts and plots."""

from jaxformer.analysis.cost import attention_cost, growth_exponent, overtaking_length
from jaxformer.analysis.costs.work import AttentionCost, Work
from jaxformer.analysis.count import CompiledCost, compiled_cost, count_matmul_operations

__all__ = [
    "AttentionCost",
    "CompiledCost",
    "Work",
    "attention_cost",
    "compiled_cost",
    "count_matmul_operations",
    "growth_exponent",
    "overtaking_length",
]
