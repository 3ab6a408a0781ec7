"""What training asks of data, and which loader makes the data of a name."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxformer.data.algorithmic import load_algorithmic_data
from jaxformer.data.language_model import load_language_model_data
from jaxformer.data.pictures import PICTURES
from jaxformer.data.pipeline import Examples, GroupedRows, Rows
from jaxformer.data.pixels import load_pixel_data
from jaxformer.data.tasks import TASKS
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.translation import PAIR_DATASETS, load_pair_data


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


def data_loader(name: str) -> Callable[..., Any]:
    """The function that loads data of a name: an algorithmic task, pairs, pictures, or else a text dataset."""
    if name in TASKS:
        return load_algorithmic_data
    if name in PAIR_DATASETS:
        return load_pair_data
    return load_pixel_data if name in PICTURES else load_language_model_data
