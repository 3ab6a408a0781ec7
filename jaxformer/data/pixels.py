"""Pictures as sequences: pixels in raster order, each a token, for their likelihood or their class.

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509; Chen et al. 2020, "Generative
Pretraining from Pixels". A row of a picture is ``row_length`` = width × channels tokens, the channels of a
pixel one after another, so a stride of that length goes up a column.
"""

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8

from jaxformer.data.packing import IGNORE_LABEL, Batch
from jaxformer.data.pictures import Pictures, load_digits, load_images
from jaxformer.data.symbol_tokenizer import SymbolTokenizer

TARGETS = ("pixels", "label")


@dataclass(frozen=True, eq=False)
class PixelRows:
    """One row a picture: a start id, then its pixels from left to right and top to bottom.

    Args:
        values: levels of all tokens of each picture [N, H * W * C].
        label_ids: the id of each picture's class [N].
        start_id: the id before the first pixel; it fills rows too.
        targets: "pixels": each pixel from those before it; "label": the class alone, after the last pixel.
    """

    values: UInt8[np.ndarray, "N P"]
    label_ids: Int64[np.ndarray, " N"]
    start_id: int
    targets: str

    def __len__(self) -> int:
        return len(self.values)

    @property
    def length(self) -> int:
        """Tokens of a row: the start and all pixels."""
        return self.values.shape[1] + 1

    def batch(self, indices: Integer[np.ndarray, " B"]) -> Batch:
        """Rows by index, as the training step takes them.

        Args:
            indices: rows wanted [B]; ``len(self)`` or more gives a row without targets.

        Returns:
            tokens and targets, int32 [B, length]; targets are -100 where nothing is predicted.
        """
        real = indices < len(self)
        places = np.where(real, indices, 0)
        tokens = np.full((len(indices), self.length), self.start_id, np.int32)
        targets = np.full(tokens.shape, IGNORE_LABEL, np.int32)
        tokens[real, 1:] = self.values[places][real]
        if self.targets == "pixels":
            targets[real, :-1] = self.values[places][real]
        else:
            targets[real, -1] = self.label_ids[places][real]
        return {"tokens": tokens, "targets": targets}


@dataclass(frozen=True)
class PixelData:
    """Rows of pictures, and what is needed to read their loss and to show what is drawn.

    Args:
        train_rows: pictures to train on.
        validation_rows: pictures to evaluate on.
        tokenizer: names of the ids: levels, then classes, then the start.
        shape: (height, width, channels) of a picture.
        num_levels: levels of a pixel; ids below it.
        source: where the pictures come from.
    """

    train_rows: PixelRows
    validation_rows: PixelRows
    tokenizer: SymbolTokenizer
    shape: tuple[int, int, int]
    num_levels: int
    source: str

    @property
    def buckets(self) -> dict[str, PixelRows]:
        """Rows that are evaluated apart: none."""
        return {}

    @property
    def max_length(self) -> int:
        """Tokens of a row."""
        return self.train_rows.length

    @property
    def row_length(self) -> int:
        """Tokens of a row of a picture: the stride that leads to the pixel above."""
        return self.shape[1] * self.shape[2]

    @property
    def bits_per(self) -> dict[str, int]:
        """Dimensions of all validation pictures: pixels times channels. Nothing where the class is predicted."""
        dims = {"bits_per_dim": self.validation_rows.values.size}
        return dims if self.train_rows.targets == "pixels" else {}

    @functools.cached_property
    def hash(self) -> str:
        """Digest of all that training reads: 16 hexadecimal digits."""
        digest = hashlib.blake2b(self.train_rows.targets.encode(), digest_size=8)
        for rows in (self.train_rows, self.validation_rows):
            digest.update(repr((rows.values.shape, rows.start_id)).encode())
            digest.update(rows.values.tobytes() + rows.label_ids.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def baselines(self) -> str:
        """A line on what the training frequencies alone reach: of the levels, or of the classes."""
        train, validation, size = self.train_rows, self.validation_rows, self.tokenizer.vocab_size
        if train.targets == "label":
            counts = np.bincount(train.label_ids, minlength=size)
            share = float((validation.label_ids == counts.argmax()).mean())
            return f"for scale: the most frequent class of training has an accuracy of {share:.4f}"
        alike = _bits(train.values, validation.values, self.num_levels)
        places = [_bits(column, other, self.num_levels) for column, other in zip(train.values.T, validation.values.T)]
        return (
            f"for scale, on the validation pictures: frequencies of the levels {alike:.4f} bits per dim, "
            f"of the levels at each place {float(np.mean(places)):.4f} bits per dim"
        )

    @property
    def summary(self) -> str:
        """A line on source and sizes."""
        height, width, channels = self.shape
        return (
            f"{self.source}; {len(self.train_rows):,} to train on, {len(self.validation_rows):,} for validation; "
            f"{height} × {width} pixels × {channels} of {self.num_levels} levels in rows of {self.max_length} tokens; "
            f"targets {self.train_rows.targets}; tokenizer {self.tokenizer.summary}"
        )


def _bits(train: np.ndarray, validation: np.ndarray, num_levels: int) -> float:
    """Bits a value of the predictor that knows the training frequencies, counts plus one."""
    counts = np.bincount(train.reshape(-1), minlength=num_levels) + 1.0
    return float(-np.log(counts / counts.sum())[validation.reshape(-1)].mean() / math.log(2.0))


def load_pixel_data(
    *,
    name: str = "digits",
    path: str | None = None,
    height: int | None = None,
    width: int | None = None,
    channels: int | None = None,
    num_levels: int | None = None,
    targets: str = "pixels",
    length: int | None = None,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
) -> PixelData:
    """Loads pictures and lays them out as rows of pixels.

    A picture is for validation by a hash of its pixels, so equal pictures are on the same side.

    Args:
        name: "digits" (scikit-learn's) or "images" (a folder of files).
        path: the folder of images.
        height: pixels of an image; None = 32. The digits are 8 × 8, and take none of these four.
        width: likewise.
        channels: 1 or 3; None = 1.
        num_levels: levels of each channel, 2 to 256; None = 256.
        targets: "pixels" or "label" (see ``PixelRows``).
        length: tokens of a row; None, or exactly what a picture has.
        validation_fraction: share of pictures for validation, in (0, 1]; at 1 there are none to train on.
        split_seed: chooses them; at least 0.

    Returns:
        The data.

    Raises:
        ImportError: scikit-learn (digits) or Pillow (images) is not installed.
        ValueError: an argument cannot be used, or a side has no picture.
    """
    if targets not in TARGETS:
        raise ValueError(f"targets is {targets!r}; must be one of {', '.join(TARGETS)}.")
    if not 0.0 < validation_fraction <= 1.0:
        raise ValueError(f"validation_fraction is {validation_fraction}; must be above 0 and at most 1.")
    pictures = _pictures(name, path, height, width, channels, num_levels)
    count, *shape = pictures.values.shape
    values = np.ascontiguousarray(pictures.values).reshape(count, -1)
    if length is not None and length != values.shape[1] + 1:
        raise ValueError(f"length is {length}; a picture has {values.shape[1] + 1} tokens with its start, or say None.")
    validation = _chosen(values, validation_fraction, split_seed)
    if not validation.any() or (validation.all() and validation_fraction < 1.0):
        raise ValueError(
            f"validation_fraction is {validation_fraction}: of {count} pictures one side gets none; give more "
            "pictures, another fraction or another split_seed."
        )
    names = [*map(str, range(pictures.num_levels)), *(f"class:{'_'.join(name.split())}" for name in pictures.classes)]
    start = len(names)
    tokenizer = SymbolTokenizer((*names, "<start>"), pad_id=start, bos_id=start)
    label_ids = pictures.labels + pictures.num_levels
    train, validating = (PixelRows(values[side], label_ids[side], start, targets) for side in (~validation, validation))
    height, width, channels = shape
    return PixelData(train, validating, tokenizer, (height, width, channels), pictures.num_levels, pictures.source)


def _pictures(
    name: str, path: str | None, height: int | None, width: int | None, channels: int | None, num_levels: int | None
) -> Pictures:
    if name == "images":
        return load_images(path, height=height, width=width, channels=channels, num_levels=num_levels)
    if name != "digits":
        raise ValueError(f"name is {name!r}; must be digits or images.")
    given = {"path": path, "height": height, "width": width, "channels": channels, "num_levels": num_levels}
    wrong = [argument for argument, value in given.items() if value is not None]
    if wrong:
        raise ValueError(f"{wrong[0]} is {given[wrong[0]]!r}; the digits have their own, so it must be None.")
    return load_digits()


def _chosen(values: UInt8[np.ndarray, "N P"], fraction: float, seed: int) -> Bool[np.ndarray, " N"]:
    """Which pictures are for validation."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"split_seed is {seed}, must be in [0, 2^64).")
    salt = seed.to_bytes(8, "little")
    digests = [hashlib.blake2b(picture.tobytes(), digest_size=8, salt=salt).digest() for picture in values]
    return np.array([int.from_bytes(digest, "little") / 2**64 < fraction for digest in digests], bool)
