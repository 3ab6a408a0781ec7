"""Models: one Transformer stack driven by one frozen config, its presets by name, and its recurrent ancestor."""

from collections.abc import Callable

from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock
from jaxformer.models.config import TransformerConfig
from jaxformer.models.encoder_decoder import (
    ENCODER_DECODER_SIZES,
    encoder_decoder,
    transformer_base,
    transformer_big,
    transformer_tiny,
)
from jaxformer.models.gpt import GPT_SIZES, gpt
from jaxformer.models.recurrent import RecurrentCache, RecurrentSeq2Seq, recurrent
from jaxformer.models.recurrent_settings import RecurrentConfig
from jaxformer.models.reformer import REFORMER_SIZES, reformer
from jaxformer.models.sparse_transformer import SPARSE_TRANSFORMER_SIZES, sparse_transformer
from jaxformer.models.stack import Stack
from jaxformer.models.stack_layout import stack_layers, unstack_layers
from jaxformer.models.switch import SWITCH_SIZES, switch
from jaxformer.models.transformer import DecoderCache, Transformer, TransformerOutput
from jaxformer.models.universal import UniversalStack
from jaxformer.models.universal_transformer import UNIVERSAL_TRANSFORMER_SIZES, universal_transformer

# The names a config may give as ``model.name``.
MODELS: dict[str, Callable[..., Transformer | RecurrentSeq2Seq]] = {
    "encoder_decoder": encoder_decoder,
    "gpt": gpt,
    "recurrent": recurrent,
    "reformer": reformer,
    "sparse_transformer": sparse_transformer,
    "switch": switch,
    "transformer_base": transformer_base,
    "transformer_big": transformer_big,
    "transformer_tiny": transformer_tiny,
    "universal_transformer": universal_transformer,
}

__all__ = [
    "ENCODER_DECODER_SIZES",
    "GPT_SIZES",
    "MODELS",
    "REFORMER_SIZES",
    "SPARSE_TRANSFORMER_SIZES",
    "SWITCH_SIZES",
    "UNIVERSAL_TRANSFORMER_SIZES",
    "BlockAux",
    "BlockInputs",
    "DecoderCache",
    "RecurrentCache",
    "RecurrentConfig",
    "RecurrentSeq2Seq",
    "Stack",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerOutput",
    "UniversalStack",
    "encoder_decoder",
    "gpt",
    "recurrent",
    "reformer",
    "sparse_transformer",
    "stack_layers",
    "switch",
    "transformer_base",
    "transformer_big",
    "transformer_tiny",
    "universal_transformer",
    "unstack_layers",
]
