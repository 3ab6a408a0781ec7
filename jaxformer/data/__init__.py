"""Text, tasks and pictures to batches: tokenizers, datasets, packing and pipelines (NumPy and grain; no device)."""

from jaxformer.data.algorithmic import AlgorithmicData, TaskExamples, TaskRows, load_algorithmic_data
from jaxformer.data.answers import Answer, Candidate, choose_answers, choose_token_answers
from jaxformer.data.baselines import lzma_bits_per_byte, unigram_loss
from jaxformer.data.byte_tokenizer import ByteTokenizer
from jaxformer.data.character_tokenizer import CharacterTokenizer
from jaxformer.data.classification import ClassificationExamples, encode_labelled, load_classification_data
from jaxformer.data.conll import TaggedSentences, TaggingExamples, encode_tagged, load_tagged, load_tagging_data
from jaxformer.data.datasets import DATASETS, Documents, load_documents
from jaxformer.data.example_rows import ExampleRows
from jaxformer.data.labelled_texts import LABEL_FILES, LabelledTexts, load_labelled
from jaxformer.data.language_model import LanguageModelData, load_language_model_data
from jaxformer.data.masked_rows import MaskedRows
from jaxformer.data.masking import Masking
from jaxformer.data.mixtures import MixedPairRows, mixing_rates
from jaxformer.data.packed_pairs import PackedPairRows, packed_widths
from jaxformer.data.packing import IGNORE_LABEL, Batch, TokenRows, check_ids, pack_documents, stream_documents
from jaxformer.data.pair_data import PairData, PairExamples, decoder_start
from jaxformer.data.pair_rows import PairRows, bucket_widths, shift_right
from jaxformer.data.pairs import Pairs, load_pairs
from jaxformer.data.pictures import PICTURES, Pictures, contact_sheet, load_digits, load_images, write_png
from jaxformer.data.pipeline import BatchIterator, DrawnRows, Examples, GroupedRows, Rows, eval_batches, train_batches
from jaxformer.data.pixels import PixelData, PixelRows, load_pixel_data
from jaxformer.data.pretraining import load_masked_language_data, load_span_corruption_data
from jaxformer.data.pretraining_data import PretrainingData
from jaxformer.data.questions import Question, Questions, load_questions
from jaxformer.data.sources import PAIR_DATASETS, Data, data_loader
from jaxformer.data.span_corruption import SpanRows
from jaxformer.data.splits import limit_bytes, split_documents
from jaxformer.data.squad import QuestionExamples, encode_questions, load_question_data
from jaxformer.data.subword_tokenizer import SubwordTokenizer
from jaxformer.data.symbol_tokenizer import SymbolTokenizer
from jaxformer.data.task_data import TaskData
from jaxformer.data.tasks import TASKS, Task
from jaxformer.data.text_tasks import TextTask, load_text_task_data
from jaxformer.data.tokenizer_training import train_tokenizer, train_tokenizer_from_files
from jaxformer.data.tokenizers import Tokenizer, load_tokenizer
from jaxformer.data.translation import load_pair_data

__all__ = [
    "DATASETS",
    "IGNORE_LABEL",
    "LABEL_FILES",
    "PAIR_DATASETS",
    "PICTURES",
    "TASKS",
    "AlgorithmicData",
    "Answer",
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "Candidate",
    "CharacterTokenizer",
    "ClassificationExamples",
    "Data",
    "Documents",
    "DrawnRows",
    "ExampleRows",
    "Examples",
    "GroupedRows",
    "LabelledTexts",
    "LanguageModelData",
    "MaskedRows",
    "Masking",
    "MixedPairRows",
    "PackedPairRows",
    "PairData",
    "PairExamples",
    "PairRows",
    "Pairs",
    "Pictures",
    "PixelData",
    "PixelRows",
    "PretrainingData",
    "Question",
    "QuestionExamples",
    "Questions",
    "Rows",
    "SpanRows",
    "SubwordTokenizer",
    "SymbolTokenizer",
    "TaggedSentences",
    "TaggingExamples",
    "Task",
    "TaskData",
    "TaskExamples",
    "TaskRows",
    "TextTask",
    "TokenRows",
    "Tokenizer",
    "bucket_widths",
    "check_ids",
    "choose_answers",
    "choose_token_answers",
    "contact_sheet",
    "data_loader",
    "decoder_start",
    "encode_labelled",
    "encode_questions",
    "encode_tagged",
    "eval_batches",
    "limit_bytes",
    "load_algorithmic_data",
    "load_classification_data",
    "load_digits",
    "load_documents",
    "load_images",
    "load_labelled",
    "load_language_model_data",
    "load_masked_language_data",
    "load_pair_data",
    "load_pairs",
    "load_pixel_data",
    "load_question_data",
    "load_questions",
    "load_span_corruption_data",
    "load_tagged",
    "load_tagging_data",
    "load_text_task_data",
    "load_tokenizer",
    "lzma_bits_per_byte",
    "mixing_rates",
    "pack_documents",
    "packed_widths",
    "shift_right",
    "split_documents",
    "stream_documents",
    "train_batches",
    "train_tokenizer",
    "train_tokenizer_from_files",
    "unigram_loss",
    "write_png",
]
