"""Training and validation documents, told apart by what they say."""

from collections.abc import Sequence

from jaxformer.data.datasets import Documents, document_digest


def split_documents(documents: Documents, validation_fraction: float, *, seed: int = 0) -> tuple[Documents, Documents]:
    """Splits documents into training and validation by a hash of their text.

    Whether a document is validation depends on its text and the seed alone, so adding documents moves none, and equal
    documents are on the same side. Two cases differ: if the hash would leave a side empty, it gets the document nearest
    to the border; and if there are not two different documents (a single file), each is cut near
    1 - validation_fraction of its length, at a line break where there is one, and the end is validation.

    Args:
        documents: the documents.
        validation_fraction: the share of documents for validation, in (0, 1]; at 1 nothing is left for training.
        seed: another seed gives another choice of documents.

    Returns:
        Training and validation documents, in their order.

    Raises:
        ValueError: validation_fraction is out of range, or a single document has less than two characters.
    """
    if not 0.0 < validation_fraction <= 1.0:
        raise ValueError(f"validation_fraction is {validation_fraction}; must be above 0 and at most 1.")
    if validation_fraction == 1.0:
        return _take(documents, []), documents
    training, validation = split_indices(documents.texts, validation_fraction, seed=seed)
    if not training or not validation:
        return _cut(documents, validation_fraction)
    return _take(documents, training), _take(documents, validation)


def split_indices(texts: Sequence[str], validation_fraction: float, *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Which texts are for training and which for validation, by their hash as ``split_documents`` has it.

    Equal texts are on one side. The text of the lowest hash is always validation and that of the highest always
    training; a side is empty only if there are not two different texts.
    """
    places = _places(texts, seed)
    if len(set(places)) < 2:
        return list(range(len(places))), []
    border = min(max(validation_fraction, _above(min(places))), max(places))
    validation = [index for index, place in enumerate(places) if place < border]
    training = [index for index, place in enumerate(places) if place >= border]
    return training, validation


def limit_bytes(documents: Documents, most: int | None, *, seed: int = 0, name: str = "validation_bytes") -> Documents:
    """At most so many bytes of the documents: whole ones as their hash orders them, the last cut off.

    Args:
        documents: the documents.
        most: bytes of text in UTF-8; None = all.
        seed: as for ``split_documents``.
        name: of the argument that ``most`` came from, for the error.

    Returns:
        The documents kept, in hash order if any were left out.

    Raises:
        ValueError: most is below 1.
    """
    if most is None or documents.num_bytes <= most:
        return documents
    if most < 1:
        raise ValueError(f"{name} is {most}; must be at least 1, or None for all.")
    places = _places(documents.texts, seed)
    names, texts, room = [], [], most
    for index in sorted(range(len(places)), key=lambda index: (places[index], index)):
        content = documents.texts[index].encode("utf-8", "surrogatepass")[:room].decode("utf-8", "ignore")
        if not content:
            break
        names.append(documents.names[index])
        texts.append(content)
        room -= len(content.encode())
    return Documents(names, texts, documents.source, documents.skipped)


def _places(texts: Sequence[str], seed: int) -> list[float]:
    """Each document's place in [0, 1), from its text."""
    salt = (seed % 2**64).to_bytes(8, "little")
    return [int.from_bytes(document_digest(text, salt), "little") / 2**64 for text in texts]


def _above(place: float) -> float:
    return place + 2.0**-52


def _take(documents: Documents, indices: list[int]) -> Documents:
    names = [documents.names[index] for index in indices]
    return Documents(names, [documents.texts[index] for index in indices], documents.source, documents.skipped)


def _cut(documents: Documents, validation_fraction: float) -> tuple[Documents, Documents]:
    """The beginning of each document for training, its end for validation."""
    heads, tails = [], []
    for name, text in zip(documents.names, documents.texts):
        if len(text) < 2:
            raise ValueError(f"document {name!r} has {len(text)} character: it cannot be split for validation.")
        at = min(max(1, round(len(text) * (1.0 - validation_fraction))), len(text) - 1)
        line_end = text.find("\n", at, at + len(text) // 20) + 1
        at = line_end if 0 < line_end < len(text) else at
        heads.append(text[:at])
        tails.append(text[at:])
    return (
        Documents(documents.names, heads, documents.source, documents.skipped),
        Documents(documents.names, tails, documents.source, documents.skipped),
    )
