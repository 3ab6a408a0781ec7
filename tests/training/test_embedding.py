"""Vectors of texts, against each text by itself without padding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.cli import main
from jaxformer.data import load_tokenizer
from jaxformer.models import HeadConfig, TaskModel, Transformer, TransformerConfig
from jaxformer.training.embedding import embed_file, embed_texts
from jaxformer.training.finished import load_run
from jaxformer.training.overrides import ConfigError

BYTES = load_tokenizer("bytes")
# Of two lengths in bytes, one of them too long for the model.
TEXTS = ["für", "a longer text of many bytes, cut", "日b"]
SIZES = {"vocab_size": 259, "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_length": 24}


def _model(architecture, **changes):
    model = Transformer(TransformerConfig(architecture=architecture, positions="learned", **{**SIZES, **changes}))
    tokens = jnp.zeros((1, 5), jnp.int32)
    source = {"source": tokens} if architecture == "encoder_decoder" else {}
    params = jax.jit(model.init)(jax.random.key(1), tokens, **source)["params"]
    return model, jax.tree.map(lambda leaf: leaf * 9, params)


@pytest.fixture(scope="module")
def encoder():
    return _model("encoder")


@pytest.mark.parametrize(
    ("architecture", "poolings", "marks"),
    [
        ("encoder", ("first", "mean"), (1, 1)),
        pytest.param("decoder", ("last",), (1, 0), marks=pytest.mark.slow),
        pytest.param("encoder_decoder", ("mean",), (0, 1), marks=pytest.mark.slow),
    ],
)
def test_vectors_are_those_of_texts_by_themselves(architecture, poolings, marks, encoder):
    model, params = encoder if architecture == "encoder" else _model(architecture)
    apply = jax.jit(model.apply, static_argnames="method")
    method = "encode" if architecture == "encoder_decoder" else "hidden"
    states = []
    for text in TEXTS:
        ids = list(text.encode())[: 24 - sum(marks)]
        ids = [BYTES.bos_id] * marks[0] + ids + [BYTES.eos_id] * marks[1]
        output = apply({"params": params}, jnp.array([ids], jnp.int32), method=method)
        states.append(np.asarray(output if method == "encode" else output[0])[0])
    expected = {"first": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}
    for pooling in poolings:
        found = embed_texts(model, params, BYTES, TEXTS, pooling=pooling, batch_size=2)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.stack([expected[pooling](x) for x in states]), rtol=1e-4, atol=1e-4)


def test_none_one_and_shorter(encoder):
    model, params = encoder
    assert embed_texts(model, params, BYTES, []).shape == (0, 8)
    assert np.isfinite(embed_texts(model, params, BYTES, [""], batch_size=2)).all()
    whole = embed_texts(model, params, BYTES, ["abc", "abcdefgh"], batch_size=2)
    np.testing.assert_allclose(embed_texts(model, params, BYTES, ["abc"], batch_size=2), whole[:1], atol=1e-6)
    cut = embed_texts(model, params, BYTES, ["abcdefgh"], length=5, batch_size=2)
    np.testing.assert_allclose(cut, whole[:1], atol=1e-6)


def test_a_head_is_not_read(encoder):
    model, params = encoder
    head = TaskModel(model.config, HeadConfig(task="classification", num_classes=3))
    more = {**params, "classifier": {"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)}}
    found = embed_texts(head, more, BYTES, TEXTS[::2], pooling="first", batch_size=2)
    expected = embed_texts(model, params, BYTES, TEXTS[::2], pooling="first", batch_size=2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max', must be one of first, last, mean"),
        ({"length": 2}, "length is 2, must be at least 3 and at most the model's 24"),
        ({"length": 25}, "length is 25, must be"),
        ({"length": 0}, "length is 0, must be"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"texts": "abc"}, r"must be a sequence of texts: \[text\]"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    model = Transformer(TransformerConfig(architecture="encoder", positions="learned", **SIZES))
    with pytest.raises(ValueError, match=message):
        embed_texts(model, {}, BYTES, **{"texts": ["a"], **options})


def test_the_first_token_of_a_decoder_is_refused():
    model = Transformer(TransformerConfig(positions="learned", **SIZES))
    with pytest.raises(ValueError, match="first token sees nothing else; must be 'last' or 'mean'"):
        embed_texts(model, {}, BYTES, ["a"], pooling="first")


def test_files_of_texts_become_files_of_vectors(trained, tmp_path, capsys):
    workdir, _ = trained
    lines, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    texts = ["alpha beta", "für\u2028 one", ""]
    lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    records.write_text("".join(json.dumps({"id": 3, "a": {"b": text}}) + "\n\n" for text in texts))
    model, variables, tokenizer = load_run(workdir)
    expected = embed_texts(model, variables["params"], tokenizer, texts, pooling="last")
    command = ["embed", f"--workdir={workdir}", f"--input={lines}", f"--output={tmp_path}/v.npz", "--pooling=last"]
    assert main(command) == 0
    assert "3 texts embedded" in capsys.readouterr().err
    found = np.load(tmp_path / "v.npz")["embeddings"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    assert embed_file(workdir, records, tmp_path / "v.jsonl", field="a.b", pooling="last") == 3
    read = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [record["a"]["b"] for record in read] == texts
    np.testing.assert_array_equal(np.array([record["embedding"] for record in read], np.float32), expected)
    with pytest.raises(ValueError, match="the input itself"):
        embed_file(workdir, records, records)
    with pytest.raises(ConfigError, match=r"must end in \.npz or \.jsonl"):
        embed_file(workdir, records, tmp_path / "v.txt")
