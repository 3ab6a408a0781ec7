"""The tokenizer of a checkpoint folder: its tokenizer.json, or older files that say the same; and writing one."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.files import read_json

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "generation_config.json",
)
"""What stands beside the tensors and is handed on as it is."""

_SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_SENTINELS = 100
_MARKS = {
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}


def load_pretrained_tokenizer(directory: Path, model_type: str) -> tuple[Any, list[str]]:
    """Loads the tokenizer of a folder.

    Args:
      directory: the folder.
      model_type: the family, whose special tokens older files don't name.

    Returns:
      The tokenizer, or None where there is none that can be read, and a note in the latter case if there are files.

    Raises:
      PretrainedError: a file is no JSON, or T5's number of sentinels is none.
    """
    from jaxformer.data import load_tokenizer

    if (directory / "tokenizer.json").is_file():
        return load_tokenizer(directory), []
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return _subword(_byte_pairs(directory, model_type), directory), []
    if (directory / "vocab.txt").is_file():
        return _subword(_word_pieces(directory), directory), []
    if model_type == "t5" and (directory / "spiece.model").is_file():
        return _unigram_pieces(directory)
    unread = [name for name in (*_SENTENCEPIECE, "vocab.json") if (directory / name).is_file()]
    if not unread:
        return None, []
    wanted = "merges.txt" if unread[0] == "vocab.json" else "tokenizer.json"
    return None, [f"no tokenizer: {unread[0]} can't be read alone; it needs {wanted} beside it"]


def decoder_start_notes(tokenizer: Any, values: Mapping[str, Any]) -> list[str]:
    """What to say where a config.json has the decoder begin with another id than the tokenizer does here.

    Args:
      tokenizer: as loaded, or None.
      values: of config.json.

    Returns:
      A sentence, or none.
    """
    from jaxformer.data import decoder_start

    wanted = values.get("decoder_start_token_id")
    if tokenizer is None or wanted is None or decoder_start(tokenizer) == wanted:
        return []
    return [
        f"the decoder begins with id {wanted} by config.json, but with {decoder_start(tokenizer)} by this tokenizer: a "
        f"run generates from that, so give jaxformer.inference.generate prompts of [{wanted}] instead"
    ]


def _unigram_pieces(directory: Path) -> tuple[Any, list[str]]:
    """T5's pieces from the file of SentencePiece, and behind them its sentinels, which that file does not hold."""
    from jaxformer.data import load_tokenizer
    from jaxformer.data.vocabulary import with_sentinels

    configured = directory / "tokenizer_config.json"
    config = read_json(configured) if configured.is_file() else {}
    count = config.get("extra_ids", _SENTINELS)
    if not isinstance(count, int) or count < 0:
        raise PretrainedError(f"{configured} has extra_ids={count!r}, must be a number of sentinels")
    try:
        tokenizer = load_tokenizer(directory / "spiece.model")
    except ValueError as error:
        return None, [f"no tokenizer: {error}"]
    return with_sentinels(tokenizer, count), []


def _subword(backend: Any, directory: Path) -> Any:
    from jaxformer.data import SubwordTokenizer

    return SubwordTokenizer(backend, name=str(directory))


def _byte_pairs(directory: Path, model_type: str) -> Any:
    """Byte-level pairs from GPT-2's or RoBERTa's two files."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    backend = tokenizers.Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    vocabulary = backend.get_vocab()
    if model_type == "roberta":
        _add_special(backend, [name for name in ("<s>", "<pad>", "</s>", "<unk>") if name in vocabulary])
        if "<mask>" in vocabulary:  # stands for a word, with the blank in front of it
            backend.add_special_tokens([tokenizers.AddedToken("<mask>", special=True, normalized=False, lstrip=True)])
        if {"<s>", "</s>"} <= set(vocabulary):
            ends = (("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]))
            backend.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    else:
        _add_special(backend, [name for name in ("<|endoftext|>",) if name in vocabulary])
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _word_pieces(directory: Path) -> Any:
    """BERT's word pieces from their list."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    configured = directory / "tokenizer_config.json"
    config = read_json(configured) if configured.is_file() else {}
    backend = tokenizers.Tokenizer(models.WordPiece.from_file(str(directory / "vocab.txt"), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    vocabulary = backend.get_vocab()
    _add_special(backend, [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocabulary])
    if {"[CLS]", "[SEP]"} <= set(vocabulary):
        ends = (("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
        backend.post_processor = processors.BertProcessing(*ends)
    return backend


def _add_special(backend: Any, names: list[str]) -> None:
    import tokenizers

    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])


def save_pretrained_tokenizer(tokenizer: Any, directory: Path, like: Path | None, model_type: str) -> list[str]:
    """Writes a tokenizer's files; as they were, where the folder that it was loaded from is given.

    Args:
      tokenizer: None = only files of ``like`` are written.
      directory: where to.
      like: folder of an earlier checkpoint, or None.
      model_type: the family.

    Returns:
      A note, where the files are no other library's.
    """
    if like is not None and _is_of(tokenizer, like, model_type):
        for name in FILES:
            if (like / name).is_file():
                shutil.copyfile(like / name, directory / name)
        return []
    if tokenizer is None:
        return []
    from jaxformer.data import SubwordTokenizer
    from jaxformer.data.vocabulary import with_tokens

    with contextlib.suppress(ValueError):  # of kinds that no other library has
        tokenizer = with_tokens(tokenizer, [])
    tokenizer.save(directory / "tokenizer.json")
    if not isinstance(tokenizer, SubwordTokenizer):
        return [f"the tokenizer {tokenizer.name} has no form that other libraries read; its file is jaxformer's"]
    _name_marks(tokenizer, directory / "tokenizer_config.json")
    return []


def _name_marks(tokenizer: Any, file: Path) -> None:
    """Adds the tokens that encoders need to the file that names special tokens."""
    config = read_json(file)
    vocabulary = tokenizer.backend.get_vocab()
    for role, names in _MARKS.items():
        found = next((name for name in names if name in vocabulary), None)
        if found is not None:
            config[f"{role}_token"] = found
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_of(tokenizer: Any, like: Path, model_type: str) -> bool:
    """Whether a tokenizer is that of a folder: none at all, or one that encodes alike."""
    if tokenizer is None:
        return True
    own, _ = load_pretrained_tokenizer(like, model_type)
    backend = getattr(tokenizer, "backend", None)
    return own is not None and backend is not None and own.backend.to_str() == backend.to_str()
