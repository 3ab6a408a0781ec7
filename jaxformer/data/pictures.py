"""Pictures of one size with labels: scikit-learn's digits, and folders of image files; and writing them as PNG."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size.

    Args:
        values: brightness of each pixel, 0 (black) to num_levels - 1, channels last [N, H, W, C].
        labels: the class of each, 0 to len(classes) - 1 [N].
        classes: names of the classes.
        num_levels: how many values a pixel may have.
        source: a line on where they come from.
    """

    values: UInt8[np.ndarray, "N H W C"]
    labels: Int64[np.ndarray, " N"]
    classes: tuple[str, ...]
    num_levels: int
    source: str


def load_digits() -> Pictures:
    """The 1,797 handwritten digits of scikit-learn, 8 × 8 pixels of 17 levels: no download.

    From the test set of Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI repository.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise ImportError("the digits need scikit-learn: pip install 'jaxformer[images]'") from None
    digits = datasets.load_digits()
    values = digits.images.astype(np.uint8)[..., None]
    classes = tuple(map(str, digits.target_names))
    return Pictures(values, digits.target.astype(np.int64), classes, 17, "scikit-learn's handwritten digits")


def load_images(
    path: str | None, *, height: int | None, width: int | None, channels: int | None, num_levels: int | None
) -> Pictures:
    """All image files of a folder and the folders in it, cut to one shape, resized, and rounded to a few levels.

    The middle of an image is kept. In folders of the folder, the name of the first one below it is an image's class.

    Args:
        path: the folder.
        height: pixels; None = 32.
        width: pixels; None = 32.
        channels: 1 (grey) or 3 (red, green, blue); None = 1.
        num_levels: levels of each channel, equally spaced, from 2 to 256; None = 256.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: no folder, no image in it, a file that is no image, or a number out of range.
    """
    height, width, channels, num_levels = height or 32, width or 32, channels or 1, num_levels or 256
    if min(height, width) < 1 or channels not in (1, 3) or not 2 <= num_levels <= 256:
        raise ValueError(
            f"height is {height}, width {width}, channels {channels} and num_levels {num_levels}; height and width "
            "must be at least 1, channels 1 or 3, and num_levels from 2 to 256."
        )
    folder = Path(path or "").expanduser()
    if not path or not folder.is_dir():
        raise ValueError(f"path is {path!r}; must be a folder of images.")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"folder {path} holds no image ({', '.join(sorted(_SUFFIXES))}).")
    read = np.stack([_read(file, height, width, channels) for file in files])
    values = (read.astype(np.uint16) * num_levels // 256).astype(np.uint8)
    places = [file.relative_to(folder).parts for file in files]
    names = [place[0] if len(place) > 1 else "image" for place in places]
    classes = tuple(sorted(set(names)))
    labels = np.array([classes.index(name) for name in names], np.int64)
    return Pictures(values, labels, classes, num_levels, f"{len(files):,} images in {path}")


def _read(file: Path, height: int, width: int, channels: int) -> UInt8[np.ndarray, "H W C"]:
    """One image as numbers."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("reading images needs Pillow: pip install 'jaxformer[images]'") from None
    try:
        with Image.open(file) as image:
            fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (width, height))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}.") from error
    return np.asarray(fitted, np.uint8).reshape(height, width, channels)


PICTURES: dict[str, Callable[..., Pictures]] = {"digits": load_digits, "images": load_images}
"""The pictures a config may name as ``data.name``."""


def contact_sheet(values: UInt8[np.ndarray, "N H W C"], num_levels: int, scale: int = 4) -> UInt8[np.ndarray, "h w C"]:
    """Pictures side by side in a nearly square grid, with lines between them.

    Args:
        values: levels of each pixel.
        num_levels: how many there are; the highest becomes 255.
        scale: pixels of the sheet for each pixel of a picture, in both directions.
    """
    count, height, width, channels = values.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    cells = np.full((rows * columns, height * scale + 2, width * scale + 2, channels), 128, np.uint8)
    bright = (values.astype(np.uint16) * 255 // (num_levels - 1)).astype(np.uint8)
    cells[:count, 1:-1, 1:-1] = bright.repeat(scale, axis=1).repeat(scale, axis=2)
    grid = cells.reshape(rows, columns, *cells.shape[1:]).swapaxes(1, 2)
    return grid.reshape(rows * cells.shape[1], columns * cells.shape[2], channels)


def write_png(file: Path, pixels: UInt8[np.ndarray, "H W C"]) -> None:
    """Writes a grey (C = 1) or colour (C = 3) picture of 8 bits a channel as PNG (ISO/IEC 15948)."""
    height, width, channels = pixels.shape
    if channels not in (1, 3):
        raise ValueError(f"pixels has {channels} channels, must have 1 or 3.")
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    # Each line begins with the number of its filter: none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        content += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(file)
