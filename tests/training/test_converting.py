"""A checkpoint becomes a run that is loaded as any other, and a run becomes a checkpoint again."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).parents[1] / "interop"))

from folders import BERT_CONFIG, GPT2_CONFIG, bert_tensors, gpt2_tensors, write_folder

from jaxformer.interop import PretrainedError, load_pretrained
from jaxformer.training.converting import export_checkpoint, import_checkpoint
from jaxformer.training.finished import load_run
from jaxformer.training.run_directory import RunDirectoryError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "fox"]


def with_tokenizer(folder):
    words = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "preset"),
    [(GPT2_CONFIG, gpt2_tensors, "gpt"), (BERT_CONFIG, bert_tensors, "bert")],
    ids=["gpt2", "bert"],
)
def test_a_checkpoint_becomes_a_run_and_the_run_that_checkpoint(tmp_path, config, tensors, preset):
    source = with_tokenizer(write_folder(tmp_path / "source", config, tensors()))
    figures = import_checkpoint(source, tmp_path / "run")
    assert figures["parameters"] == sum(tensor.size for tensor in tensors().values())
    model, variables, tokenizer = load_run(tmp_path / "run")
    expected, params, _ = load_pretrained(source)
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    assert tokenizer.encode("the fox") == [6, 7]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]["name"] == preset
    assert export_checkpoint(tmp_path / "run", tmp_path / "out")["notes"] == []
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors())
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(written[name], tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        import_checkpoint(source, tmp_path / "run")


def test_a_checkpoint_without_tokenizer_needs_one(tmp_path):
    source = write_folder(
        tmp_path / "source", {**GPT2_CONFIG, "vocab_size": 259}, gpt2_tensors({**GPT2_CONFIG, "vocab_size": 259})
    )
    with pytest.raises(PretrainedError, match="no tokenizer that can be read; give one: tokenizer=bytes"):
        import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_checkpoint(source, tmp_path / "run", tokenizer="bytes")
    assert load_run(tmp_path / "run")[2].name == "bytes"
