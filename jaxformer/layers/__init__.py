"""Flax Linen modules: parameters and wiring; the formulas live in ``functional`` and ``attention``."""

from jaxformer.layers.attention import AttentionOutput, MultiHeadAttention, check_heads, project_memory
from jaxformer.layers.attention_arguments import AttentionArguments
from jaxformer.layers.attention_settings import ATTENTION_ARGUMENTS, argument_defaults, check_decoding, check_settings
from jaxformer.layers.axial_positions import AxialPositionEmbedding, check_axes, square_axes
from jaxformer.layers.depthwise_convolution import ConvolutionCache, DepthwiseConvolution, init_convolution_cache
from jaxformer.layers.embeddings import (
    LearnedPositionEmbedding,
    RelativePositionBias,
    SinusoidalPositionEmbedding,
    TokenEmbedding,
)
from jaxformer.layers.feed_forward import ACTIVATIONS, HIDDEN_NORM_PLACEMENTS, FeedForward
from jaxformer.layers.mixture_of_experts import ExpertsOutput, MixtureOfExperts
from jaxformer.layers.norms import NORMS, BatchNorm, LayerNorm, RMSNorm, make_norm_layer
from jaxformer.layers.projection import Projection, project
from jaxformer.layers.recurrent import RecurrentLayer, hidden_of, make_cell, where_real
from jaxformer.layers.state import STATE

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_ARGUMENTS",
    "HIDDEN_NORM_PLACEMENTS",
    "NORMS",
    "STATE",
    "AttentionArguments",
    "AttentionOutput",
    "AxialPositionEmbedding",
    "BatchNorm",
    "ConvolutionCache",
    "DepthwiseConvolution",
    "ExpertsOutput",
    "FeedForward",
    "LayerNorm",
    "LearnedPositionEmbedding",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "Projection",
    "RMSNorm",
    "RecurrentLayer",
    "RelativePositionBias",
    "SinusoidalPositionEmbedding",
    "TokenEmbedding",
    "argument_defaults",
    "check_axes",
    "check_decoding",
    "check_heads",
    "check_settings",
    "hidden_of",
    "init_convolution_cache",
    "make_cell",
    "make_norm_layer",
    "project",
    "project_memory",
    "square_axes",
    "where_real",
]
