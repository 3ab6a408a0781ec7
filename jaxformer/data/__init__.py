"""Text to batches: tokenizers, datasets, packing and pipelines (NumPy and grain; no model, no device)."""

from jaxformer.data.baselines import lzma_bits_per_byte, unigram_loss
from jaxformer.data.byte_tokenizer import ByteTokenizer
from jaxformer.data.datasets import DATASETS, Documents, load_documents
from jaxformer.data.language_model import LanguageModelData, load_language_model_data
from jaxformer.data.packing import IGNORE_LABEL, Batch, TokenRows, check_ids, pack_documents, stream_documents
from jaxformer.data.pipeline import BatchIterator, Rows, eval_batches, train_batches
from jaxformer.data.splits import limit_bytes, split_documents
from jaxformer.data.subword_tokenizer import SubwordTokenizer
from jaxformer.data.tokenizer_training import train_tokenizer, train_tokenizer_from_files
from jaxformer.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "IGNORE_LABEL",
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "Documents",
    "LanguageModelData",
    "Rows",
    "SubwordTokenizer",
    "TokenRows",
    "Tokenizer",
    "check_ids",
    "eval_batches",
    "limit_bytes",
    "load_documents",
    "load_language_model_data",
    "load_tokenizer",
    "lzma_bits_per_byte",
    "pack_documents",
    "split_documents",
    "stream_documents",
    "train_batches",
    "train_tokenizer",
    "train_tokenizer_from_files",
    "unigram_loss",
]
