"""Models: one Transformer stack driven by one frozen config, its presets by name, and its recurrent ancestor."""

from collections.abc import Callable

from jaxformer.models.bert import BERT_SIZES, bert
from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock
from jaxformer.models.config import TransformerConfig
from jaxformer.models.distilbert import DISTILBERT_SIZES, distilbert
from jaxformer.models.encoder_decoder import (
    ENCODER_DECODER_SIZES,
    encoder_decoder,
    transformer_base,
    transformer_big,
    transformer_tiny,
)
from jaxformer.models.gpt import GPT_SIZES, gpt
from jaxformer.models.gpt_2018 import GPT_2018_SIZES, gpt_2018
from jaxformer.models.llama import LLAMA_SIZES, llama
from jaxformer.models.recurrent import RecurrentCache, RecurrentSeq2Seq, recurrent
from jaxformer.models.recurrent_settings import RecurrentConfig
from jaxformer.models.reformer import REFORMER_SIZES, reformer
from jaxformer.models.roberta import ROBERTA_SIZES, roberta
from jaxformer.models.side import DecoderCache
from jaxformer.models.sparse_transformer import SPARSE_TRANSFORMER_SIZES, sparse_transformer
from jaxformer.models.stack import Stack
from jaxformer.models.stack_layout import stack_layers, unstack_layers
from jaxformer.models.switch import SWITCH_SIZES, switch
from jaxformer.models.t5 import T5_SIZES, T5_V1_1_SIZES, t5, t5_v1_1
from jaxformer.models.task_heads import HeadConfig, TaskModel, TaskOutput
from jaxformer.models.transformer import Transformer, TransformerOutput
from jaxformer.models.universal import UniversalStack
from jaxformer.models.universal_transformer import UNIVERSAL_TRANSFORMER_SIZES, universal_transformer

# The names a config may give as ``model.name``.
MODELS: dict[str, Callable[..., Transformer | RecurrentSeq2Seq]] = {
    "bert": bert,
    "distilbert": distilbert,
    "encoder_decoder": encoder_decoder,
    "gpt": gpt,
    "gpt_2018": gpt_2018,
    "llama": llama,
    "recurrent": recurrent,
    "reformer": reformer,
    "roberta": roberta,
    "sparse_transformer": sparse_transformer,
    "switch": switch,
    "t5": t5,
    "t5_v1_1": t5_v1_1,
    "transformer_base": transformer_base,
    "transformer_big": transformer_big,
    "transformer_tiny": transformer_tiny,
    "universal_transformer": universal_transformer,
}

__all__ = [
    "BERT_SIZES",
    "DISTILBERT_SIZES",
    "ENCODER_DECODER_SIZES",
    "GPT_2018_SIZES",
    "GPT_SIZES",
    "LLAMA_SIZES",
    "MODELS",
    "REFORMER_SIZES",
    "ROBERTA_SIZES",
    "SPARSE_TRANSFORMER_SIZES",
    "SWITCH_SIZES",
    "T5_SIZES",
    "T5_V1_1_SIZES",
    "UNIVERSAL_TRANSFORMER_SIZES",
    "BlockAux",
    "BlockInputs",
    "DecoderCache",
    "HeadConfig",
    "RecurrentCache",
    "RecurrentConfig",
    "RecurrentSeq2Seq",
    "Stack",
    "TaskModel",
    "TaskOutput",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerOutput",
    "UniversalStack",
    "bert",
    "distilbert",
    "encoder_decoder",
    "gpt",
    "gpt_2018",
    "llama",
    "recurrent",
    "reformer",
    "roberta",
    "sparse_transformer",
    "stack_layers",
    "switch",
    "t5",
    "t5_v1_1",
    "transformer_base",
    "transformer_big",
    "transformer_tiny",
    "universal_transformer",
    "unstack_layers",
]
