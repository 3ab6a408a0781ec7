"""Text datasets: where documents come from."""

import difflib
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.data.polarity import read_polarity
from jaxformer.data.prose import docstrings, prose_documents, topics

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Documents:
    """Texts with their names, in a fixed order.

    Args:
        names: what each document is called: its path in the dataset, or file and line.
        texts: the documents; none is empty.
        source: a line on where they come from.
        skipped: files or entries left out: empty, or not readable as text.
    """

    names: Sequence[str]
    texts: Sequence[str]
    source: str
    skipped: int = 0

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of all texts in UTF-8."""
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in self.texts)

    @functools.cached_property
    def hash(self) -> str:
        """Digest of the texts in their order, names aside: 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        for text in self.texts:
            digest.update(document_digest(text))
        return digest.hexdigest()


def document_digest(text: str, salt: bytes = b"") -> bytes:
    """Eight bytes that depend on the text alone (and the salt, 16 bytes at most): the same on every machine."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest()


def load_documents(name: str, *, path: str | None = None, field: str | None = None) -> Documents:
    """Loads a dataset's documents.

    Args:
        name: a key of ``DATASETS``.
        path: file, folder or glob (text, jsonl), or the Hub's name of the data (huggingface).
        field: the field or column that holds the text (jsonl, huggingface); "text" if None.

    Returns:
        The documents, empty ones left out.

    Raises:
        ValueError: unknown dataset, an argument that it needs or cannot use, or no document found.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"dataset {name!r} is unknown; there are {', '.join(DATASETS)}.{hint}")
    documents = DATASETS[name](path=path, field=field)
    if not documents.texts:
        raise ValueError(f"dataset {name!r}: no document in {documents.source} ({documents.skipped} skipped).")
    return documents


def python_stdlib(*, path: str | None = None, field: str | None = None) -> Documents:
    """Python sources of the standard library of the running interpreter, tests excluded: text without a download.

    Each ``.py`` file is a document, decoded as Python itself does (PEP 263), sorted by path.
    """
    _refuse("python_stdlib", path=path, field=field)
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        # Not to be walked at all: site-packages may hold a hundred thousand files.
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found = [Path(folder, name) for name in names if name.endswith(".py")]
        files.extend((file.relative_to(root).as_posix(), file) for file in found)
    return _read_files(sorted(files), _decode_python, f"the standard library of Python {platform.python_version()}")


def python_docs(*, path: str | None = None, field: str | None = None) -> Documents:
    """English prose of the running interpreter: documentation of its library and language, without a download.

    The docstrings of each file of ``python_stdlib`` are a document, and so is each chapter of the language reference
    that ``help()`` shows (``pydoc_data.topics``). Paragraphs of prose are kept, once each, with blank lines between
    them (see ``jaxformer.data.prose``). Takes seconds the first time.
    """
    _refuse("python_docs", path=path, field=field)
    return _python_docs()


@functools.cache
def _python_docs() -> Documents:
    sources = python_stdlib()
    documented: list[tuple[str, Sequence[str]]] = []
    broken = 0
    for name, source in zip(sources.names, sources.texts):
        # Most tables of code points have no docstring worth the parsing.
        if '"""' in source:
            try:
                documented.append((name, docstrings(source)))
            except (SyntaxError, ValueError):
                broken += 1
    documented += [(f"topics/{name}", [text]) for name, text in topics()]
    kept = [(name, prose) for name, prose in prose_documents(documented) if prose]
    return Documents(
        [name for name, _ in kept],
        [prose for _, prose in kept],
        f"the documentation in Python {platform.python_version()}",
        broken,
    )


def text(*, path: str | None = None, field: str | None = None) -> Documents:
    """Text files in UTF-8 (gzip accepted), each a document: a file, a folder (all files below it) or a glob."""
    _refuse("text", field=field)
    return _read_files(find_files("text", path), decode_utf8, str(path))


def jsonl(*, path: str | None = None, field: str | None = None) -> Documents:
    """JSON-lines files (gzip accepted), each line an object with the text in a field: a file, a folder or a glob."""
    field = field or "text"
    names, texts, skipped = [], [], 0
    for name, file in find_files("jsonl", path):
        for number, line in enumerate(decode_utf8(read_bytes(file), name).split("\n"), start=1):
            if not line.strip():
                continue
            content = json_texts(line, [field], f"{name}, line {number}")[0]
            if content:
                names.append(f"{name}:{number}")
                texts.append(content)
            else:
                skipped += 1
    return Documents(names, texts, f"{path}, field {field!r}", skipped)


def sentence_polarity(*, path: str | None = None, field: str | None = None) -> Documents:
    """The sentences of a sentence-polarity zip without their classes, each a document."""
    _refuse("sentence_polarity", field=field)
    if not path:
        raise ValueError("dataset 'sentence_polarity' needs a path: the zip of its two files.")
    lines = read_polarity(path)
    return Documents([name for name, _, _ in lines], [line for _, line, _ in lines], path)


def huggingface(*, path: str | None = None, field: str | None = None) -> Documents:
    """The train split of data on the Hugging Face Hub, by name (``owner/name`` or ``owner/name:config``)."""
    if not path:
        raise ValueError("dataset 'huggingface' needs a path: the name of the data on the Hub.")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "dataset 'huggingface' needs the datasets package: pip install 'jaxformer[datasets]'."
        ) from error
    field = field or "text"
    name, _, config = path.partition(":")
    rows = datasets.load_dataset(name, config or None, split="train")
    if field not in rows.column_names:
        raise ValueError(f"dataset {path!r} has no column {field!r}; it has {', '.join(rows.column_names)}.")
    column = rows[field]
    kept = [(f"{path}:{index}", entry) for index, entry in enumerate(column) if entry]
    wrong = next((name for name, entry in kept if not isinstance(entry, str)), None)
    if wrong:
        raise ValueError(f"dataset {path!r}: column {field!r} of row {wrong} is not text.")
    return Documents(
        [name for name, _ in kept], [entry for _, entry in kept], f"{path}, column {field!r}", len(column) - len(kept)
    )


DATASETS: dict[str, Callable[..., Documents]] = {
    "python_stdlib": python_stdlib,
    "python_docs": python_docs,
    "text": text,
    "jsonl": jsonl,
    "huggingface": huggingface,
    "sentence_polarity": sentence_polarity,
}
"""Datasets by name; each takes path and field, and refuses what it cannot use."""


def _refuse(name: str, **arguments: str | None) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise ValueError(f"dataset {name!r} takes no {argument}, got {value!r}.")


def find_files(dataset: str, path: str | None) -> list[tuple[str, Path]]:
    """Files with their names: of a folder all below it but hidden ones, named from there; sorted by name.

    Raises:
        ValueError: no path, or nothing there.
    """
    if not path:
        raise ValueError(f"dataset {dataset!r} needs a path: a file, a folder or a glob.")
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if root.is_dir():
        inside = ((file.relative_to(root), file) for file in root.rglob("*") if file.is_file())
        files = [(name.as_posix(), file) for name, file in inside if not any(p.startswith(".") for p in name.parts)]
    else:
        files = [(found, Path(found)) for found in glob.glob(str(root), recursive=True) if Path(found).is_file()]
    if not files:
        raise ValueError(f"dataset {dataset!r}: there is no file at {path!r}.")
    return sorted(files)


def _read_files(files: list[tuple[str, Path]], decode: Callable[[bytes, str], str], source: str) -> Documents:
    """Each file a document; files that cannot be decoded are skipped and counted, unless there is only one."""
    names, texts, skipped = [], [], 0
    for name, file in files:
        try:
            content = decode(read_bytes(file), name)
        except ValueError:
            if len(files) == 1:
                raise
            content = ""
        if content:
            names.append(name)
            texts.append(content)
        else:
            skipped += 1
    return Documents(names, texts, source, skipped)


def read_bytes(file: Path) -> bytes:
    """A file's bytes, decompressed if its name ends in .gz. Raises ValueError if it cannot be read."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as stream:
                return stream.read()
        return file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def decode_utf8(content: bytes, name: str) -> str:
    """Bytes as text, without a byte-order mark. Raises ValueError if they are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8 (byte {error.start}).") from error


def _decode_python(content: bytes, name: str) -> str:
    """Decodes a Python source by its byte-order mark or coding comment."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, LookupError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be decoded: {error}.") from error


def json_texts(line: str, fields: Sequence[str], where: str) -> list[str]:
    """The texts in fields of a line of JSON; "a.b" is field b of the object in a, where no field has that whole name.

    Raises:
        ValueError: says where and what was wrong.
    """
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from error
    return [text_at(entry, field, where) for field in fields]


def text_at(entry: Any, field: str, where: str) -> str:
    """The text in a field of an object, or of an object in it. Raises ValueError for anything else."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: no field {field!r}; there is a {type(entry).__name__}, not an object.")
    if field not in entry:
        head, dot, rest = field.partition(".")
        if dot and head in entry:
            return text_at(entry[head], rest, where)
        raise ValueError(f"{where}: no field {field!r}; there is {', '.join(map(repr, entry))}.")
    if not isinstance(entry[field], str):
        raise ValueError(f"{where}: field {field!r} is {type(entry[field]).__name__}, must be text.")
    return entry[field]
