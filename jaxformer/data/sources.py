"""What training asks of data, and which loader makes the data of a name."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxformer.data.algorithmic import load_algorithmic_data
from jaxformer.data.classification import load_classification_data
from jaxformer.data.conll import TAG_FILES, load_tagging_data
from jaxformer.data.labelled_texts import LABEL_FILES
from jaxformer.data.language_model import load_language_model_data
from jaxformer.data.pair_splits import PAIR_MAKERS
from jaxformer.data.pairs import PAIR_FILES
from jaxformer.data.pictures import PICTURES
from jaxformer.data.pipeline import Examples, GroupedRows, Rows
from jaxformer.data.pixels import load_pixel_data
from jaxformer.data.pretraining import MASKED, SPANS, load_masked_language_data, load_span_corruption_data
from jaxformer.data.questions import QUESTION_FILES
from jaxformer.data.squad import load_question_data
from jaxformer.data.tasks import TASKS
from jaxformer.data.text_tasks import TEXT_TASKS, load_text_task_data
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.translation import load_pair_data

PAIR_DATASETS: dict[str, Callable[..., Any]] = {**PAIR_FILES, **PAIR_MAKERS, TEXT_TASKS: load_text_task_data}
"""All pairs that a config may name."""


class Data(Protocol):
    """Training and validation rows, and what is needed to read their loss."""

    @property
    def train_rows(self) -> Rows | GroupedRows | Examples:
        """Rows of one ``length``, rows in groups of at most that, or examples of it without end."""

    @property
    def validation_rows(self) -> Rows | GroupedRows:
        """Rows whose loss chooses the best checkpoint."""

    @property
    def buckets(self) -> Mapping[str, Rows | GroupedRows]:
        """Rows that are evaluated apart, by the name that their figures get."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Names of the ids."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest row, those of buckets included."""

    @property
    def bits_per(self) -> Mapping[str, int]:
        """What the bits of all validation rows are divided by, by the figure's name."""

    @property
    def hash(self) -> str:
        """Digest of all that training reads."""

    @property
    def baselines(self) -> str:
        """A line on what predictors that need no model reach."""

    @property
    def summary(self) -> str:
        """A line on source and sizes."""


FINE_TUNING: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(TAG_FILES, load_tagging_data),
    **dict.fromkeys(QUESTION_FILES, load_question_data),
}
"""Loaders of words to tag and of questions by name."""


def data_loader(name: str) -> Callable[..., Any]:
    """The function that loads data of a name: an algorithmic task, pairs, pictures, or else a text dataset.

    Those of ``FINE_TUNING`` are words to tag or questions, and those of ``LABEL_FILES`` are texts to classify.
    "masked:" or "spans:" in front of a text dataset's name has it laid out for pretraining of an encoder, or of an
    encoder-decoder.
    """
    if name.startswith(MASKED):
        return load_masked_language_data
    if name.startswith(SPANS):
        return load_span_corruption_data
    if name in LABEL_FILES:
        return load_classification_data
    if name in FINE_TUNING:
        return FINE_TUNING[name]
    if name in TASKS:
        return load_algorithmic_data
    if name in PAIR_DATASETS:
        return load_text_task_data if name == TEXT_TASKS else load_pair_data
    return load_pixel_data if name in PICTURES else load_language_model_data
