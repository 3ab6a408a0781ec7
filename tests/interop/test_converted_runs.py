"""The command line makes runs of checkpoints, which generate, predict, embed and are started from, and goes back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from folders import (
    BERT_CONFIG,
    DISTILBERT_CONFIG,
    LLAMA_CONFIG,
    T5_CONFIG,
    bert_tensors,
    distilbert_tensors,
    llama_tensors,
    sentencepiece_file,
    t5_tensors,
    write_folder,
)
from safetensors.numpy import load_file

from jaxformer.cli import main
from jaxformer.inference import generate
from jaxformer.interop import load_pretrained
from jaxformer.training.finished import load_run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "fox", "runs", "far", "home", "now", "no"]
TEXTS = ["the fox runs", "no fox", "a far home now", "the the the the the the"]
BERT_LABELS = {**BERT_CONFIG, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "x", "1": "y"}}


def with_words(folder):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(WORDS[:5])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def bert_body(seed=0):
    return {name: tensor for name, tensor in bert_tensors(seed=seed).items() if not name.startswith("cls.")}


def varied(tensors, norms):
    """Norms that leave their inputs as they are: random ones would make all texts nearly one."""
    plain = {".weight": np.ones, ".bias": np.zeros}
    return {
        name: plain[name[name.rindex(".") :]](6, np.float32) if name.rsplit(".", 1)[0].endswith(norms) else tensor
        for name, tensor in tensors.items()
    }


def bert_labels():
    classifier = {"classifier.weight": np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32)}
    return {**varied(bert_body(), "LayerNorm"), **classifier, "classifier.bias": np.zeros(2, np.float32)}


def distilbert_labels():
    return varied(distilbert_tensors(), ("layer_norm", "LayerNorm"))


def run_command(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def converted(folder, config, tensors, *flags):
    """A checkpoint's folder and the run that the command makes of it."""
    source = with_words(write_folder(folder / "source", config, tensors))
    run_command("convert", f"--from_hf={source}", f"--workdir={folder / 'run'}", *flags)
    return source, folder / "run"


def logits_of(model, params, text):
    """Of a text between its two marks."""
    tokens = jnp.array([[2, *(WORDS.index(word) for word in text.split()), 3]])
    return np.asarray(model.apply({"params": params}, tokens).logits[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tensors", "classes"),
    [
        (BERT_LABELS, bert_labels, "xy"),
        pytest.param(DISTILBERT_CONFIG, distilbert_labels, ("bad", "good", "so"), marks=pytest.mark.slow),
    ],
    ids=["bert", "distilbert"],
)
def test_a_converted_classifier_predicts(tmp_path, config, tensors, classes):
    source, run = converted(tmp_path, config, tensors())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    given = ("--fields=text", "--label=label")
    run_command("predict", f"--workdir={run}", f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl", *given)
    model, params, _ = load_pretrained(source)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == len(TEXTS)
    for text, line in zip(TEXTS, found):
        logits = logits_of(model, params, text)
        assert line["label"] == classes[int(logits.argmax())]
        assert line["probability"] == pytest.approx(float(jax.nn.softmax(logits).max()), abs=1e-4)
    assert np.ptp([line["probability"] for line in found]) > 0.01


@pytest.mark.slow
def test_a_converted_llama_generates(tmp_path, capfd):
    tensors = llama_tensors()
    tensors["lm_head.weight"][:5] = 0  # so that words win
    source, run = converted(tmp_path, LLAMA_CONFIG, tensors)
    model, params, tokenizer = load_pretrained(source)
    capfd.readouterr()
    flags = ("--temperature=0", "--max_new_tokens=6")
    run_command("generate", f"--workdir={run}", "--prompt=the fox", *flags)
    written = capfd.readouterr().out
    ids = generate(model, params, [tokenizer.encode("the fox")], max_new_tokens=6)[0]
    assert ids.min() > 4
    assert written.strip() == "the fox" + " ".join(WORDS[token] for token in ids)


@pytest.mark.slow
def test_a_converted_t5_with_pieces_alone_generates(tmp_path, capfd):
    source = write_folder(tmp_path / "source", T5_CONFIG, t5_tensors(seed=3))
    sentencepiece_file(source / "spiece.model", [f"▁{word}" for word in WORDS[5:]])
    (source / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 2}))
    run_command("convert", f"--from_hf={source}", f"--workdir={tmp_path / 'run'}")
    model, variables, tokenizer = load_run(tmp_path / "run")
    assert tokenizer.backend.token_to_id("<extra_id_0>") == 12
    capfd.readouterr()
    run_command("generate", f"--workdir={tmp_path / 'run'}", "--prompt=the fox", "--max_new_tokens=10")
    written = capfd.readouterr().out
    sources = [[*tokenizer.encode("the fox"), 1]]
    ids = np.asarray(generate(model, variables["params"], [[0]], sources=sources, max_new_tokens=10))[0].tolist()
    assert ids == [4, 10] * 5
    assert written.strip() == tokenizer.decode(ids) == " ".join(["the", "no"] * 5)


@pytest.mark.slow
def test_a_body_without_head_goes_without_its_pooler_or_under_new_heads(tmp_path, capsys):
    config = {**BERT_CONFIG, "architectures": ["BertModel"]}
    _, run = converted(tmp_path / "a", config, bert_body())
    assert "the pooler is left out" in capsys.readouterr().err
    assert "pooler" not in load_run(run)[1]["params"]
    _, run = converted(tmp_path / "b", config, bert_body(), "--new_head")
    assert "drawn anew" in capsys.readouterr().err
    params = load_run(run)[1]["params"]
    np.testing.assert_array_equal(params["pooler"]["kernel"], bert_body()["bert.pooler.dense.weight"].T)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A converted BERT, and a run of two steps that started from it."""
    folder = tmp_path_factory.mktemp("started")
    source, run = converted(folder, BERT_CONFIG, bert_tensors())
    table = "text\tlabel\n" + "".join(f"{TEXTS[n % 4]}\t{'xy'[n % 2]}\n" for n in range(20))
    (folder / "labels.tsv").write_text(table)
    overrides = {
        "start.workdir": run,
        "data.train": folder / "labels.tsv",
        "data.length": 10,
        "data.num_buckets": 1,
        "data.validation_fraction": 0.3,
        "train.steps": 2,
        "train.batch_size": 2,
        "eval.batch_size": 2,
        "eval.predict_examples": 0,
    }
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    run_command("train", "--config=finetune:size=tiny,start=run", f"--workdir={folder / 'labels'}", *flags)
    return source, run, folder / "labels"


@pytest.mark.slow
def test_a_converted_run_embeds(started, tmp_path):
    source, run, _ = started
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    files = (f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.npz")
    run_command("embed", f"--workdir={run}", *files, "--pooling=first")
    vectors = np.load(tmp_path / "out.npz")["embeddings"]
    model, params, _ = load_pretrained(source)
    for text, vector in zip(TEXTS, vectors):
        tokens = jnp.array([[2, *(WORDS.index(word) for word in text.split()), 3]])
        hidden = model.apply({"params": params}, tokens, method="hidden")[0]
        np.testing.assert_allclose(vector, hidden[0, 0], atol=1e-4)


@pytest.mark.slow
def test_a_fine_tuned_run_starts_from_the_checkpoint_and_is_written_as_one(started, tmp_path):
    source, _, labels = started
    model, variables, _ = load_run(labels)
    before = load_file(source / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    change = np.abs(np.asarray(variables["params"]["token_embedding"]["embedding"]) - before).max()
    assert 0 < change < 0.01
    run_command("convert", f"--workdir={labels}", f"--to_hf={tmp_path / 'out'}")
    again, params, tokenizer = load_pretrained(tmp_path / "out")
    assert again.head.task == "classification"
    assert tokenizer.encode("the fox") == [6, 7]
    for text in TEXTS:
        np.testing.assert_array_equal(logits_of(again, params, text), logits_of(model, variables["params"], text))


@pytest.mark.slow
@pytest.mark.parity
def test_a_fine_tuned_run_is_the_same_function_in_transformers(started, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra parity (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity (transformers)")
    labels = started[2]
    run_command("convert", f"--workdir={labels}", f"--to_hf={tmp_path / 'out'}")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == {0: "x", 1: "y"}
    model, variables, _ = load_run(labels)
    for text in TEXTS:
        tokens = torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])
        with torch.inference_mode():
            expected = theirs(tokens).logits[0].numpy()
        np.testing.assert_allclose(logits_of(model, variables["params"], text), expected, atol=1e-4, rtol=0)
