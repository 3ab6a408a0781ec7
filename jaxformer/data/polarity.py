"""Sentence polarity (Pang and Lee 2005): film review sentences in a zip of two text files."""

import zipfile
from pathlib import Path

_CLASSES = {".pos": "positive", ".neg": "negative"}


def read_polarity(path: str) -> list[tuple[str, str, str]]:
    """The name, sentence and class of each line of the files that end in ``.pos`` and ``.neg``, as latin-1.

    Args:
        path: the zip.

    Returns:
        Those of the positive sentences, then those of the negative.

    Raises:
        ValueError: it cannot be read, or does not hold one file of each.
    """
    found = []
    try:
        with zipfile.ZipFile(Path(path).expanduser()) as archive:
            for ending, label in _CLASSES.items():
                names = [name for name in archive.namelist() if name.endswith(ending)]
                if len(names) != 1:
                    raise ValueError(f"{path} holds {len(names)} files that end in {ending}; must hold one.")
                lines = archive.read(names[0]).decode("latin-1").split("\n")
                file = Path(names[0]).name
                found += [
                    (f"{file}:{number}", line.strip(), label)
                    for number, line in enumerate(lines, start=1)
                    if line.strip()
                ]
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as a zip: {error}.") from error
    return found
