"""Runs on pairs of texts, from config to files of translations."""

import json
import random
import sys

import jax
import numpy as np
import pytest

from jaxformer.cli import main
from jaxformer.data import train_tokenizer
from jaxformer.inference import beam_search
from jaxformer.training.config import load_config
from jaxformer.training.finished import evaluate_run, load_run, load_translator
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.run_directory import RunDirectoryError
from jaxformer.training.translation_metrics import exact_match, text_metrics

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs"}
COMMON = (
    "train.batch_size=8",
    "train.steps=6",
    "eval.every_steps=0",
    "eval.batch_size=4",
    "eval.decode_examples=3",
    "eval.max_new_tokens=9",
    "checkpoint.every_steps=3",
    "checkpoint.keep_latest=3",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=6",
    "log.every_steps=1",
    "sample.num_translations=2",
    "data.num_buckets=2",
)
SMALL = (
    "model.num_layers=1",
    "model.embed_dim=12",
    "model.num_heads=2",
    "model.mlp_dim=20",
)
SMALL_RNN = ("model.embed_dim=8", "model.hidden_dim=12")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Parallel files of counted words, German behind English: the flags that name them."""
    folder, draw, flags = tmp_path_factory.mktemp("files"), random.Random(0), []
    for split, count in (("train", 40), ("validation", 6), ("test", 7)):
        lines = [draw.choices(sorted(WORDS), k=draw.randint(1, 6)) for _ in range(count)]
        (folder / f"{split}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
        translated = [" ".join(WORDS[word] for word in line) for line in lines]
        (folder / f"{split}.de").write_text("".join(line + "\n" for line in translated))
        flags.append(f"data.{split}={folder}/{split}.en,{folder}/{split}.de")
    # A token for every word, and its bytes' for all else.
    for name, words in (("joint", [*WORDS, *WORDS.values()]), ("en", list(WORDS)), ("de", list(WORDS.values()))):
        train_tokenizer("bpe", [" ".join(words)] * 9, 300).save(folder / f"{name}.json")
    return folder, flags


def _config(files, spec, *overrides):
    folder, flags = files
    small = SMALL_RNN if "rnn" in spec else SMALL
    return load_config(
        f"translation:data=files,{spec}", [*COMMON, *small, *flags, f"data.tokenizer={folder}/joint.json", *overrides]
    )


@pytest.fixture(scope="module")
def workdir(files, tmp_path_factory):
    """A finished run of a Transformer."""
    path = tmp_path_factory.mktemp("runs") / "transformer"
    figures = train_and_evaluate(_config(files, "model=transformer"), path)
    assert figures["status"] == "completed"
    return path


def _records(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_validation_figures_have_translations(workdir):
    records = _records(workdir / "metrics.jsonl")
    validation = [record for record in records if record["split"] == "validation"]
    assert [record["step"] for record in validation] == [6]
    assert {"loss", "accuracy", "bleu", "chrf", "exact_match"} <= set(validation[0])
    (sample,) = [record["text"] for record in records if record["split"] == "sample"]
    assert sample.count("→") == sample.count("=") == 2


@pytest.fixture(scope="module")
def evaluated(workdir):
    """Figures of that run with beams, which also writes its translations."""
    return evaluate_run(workdir, ["eval.num_beams=3", "eval.length_penalty=0.5"])


def test_eval_writes_hypotheses_references_and_scores(files, workdir, evaluated):
    folder = workdir / "translations" / "step_00000006"
    names = {f"{split}_beam3.{end}" for split in ("validation", "test") for end in ("jsonl", "json")}
    names |= {f"{split}_beam3.{kind}.txt" for split in ("validation", "test") for kind in ("hypotheses", "references")}
    assert {file.name for file in folder.iterdir()} == names
    records = _records(folder / "test_beam3.jsonl")
    references = (files[0] / "test.de").read_text().splitlines()
    assert [record["reference"] for record in records] == references
    assert [record["source"] for record in records] == (files[0] / "test.en").read_text().splitlines()
    assert (folder / "test_beam3.references.txt").read_text().splitlines() == references
    hypotheses = [record["hypothesis"] for record in records]
    stored = json.loads((folder / "test_beam3.json").read_text())
    expected = text_metrics(hypotheses, references) | {"exact_match": exact_match(hypotheses, references)}
    assert {name: stored[name] for name in expected} == expected == {name: evaluated["test"][name] for name in expected}
    assert sum(entry["examples"] for entry in stored["exact_match_by_length"].values()) == 7
    assert (stored["num_beams"], stored["length_penalty"]) == (3, 0.5)
    # The scores are those of the search by itself.
    translator = load_translator(workdir)
    ids = translator.source_ids(records[4]["source"])
    alone = beam_search(
        translator.model,
        translator.params,
        [[translator.start_id]],
        sources=[ids],
        max_new_tokens=9,
        eos_id=translator.tokenizer.eos_id,
        num_beams=3,
        length_penalty=0.5,
    )
    assert records[4]["score"] == pytest.approx(alone.scores[0, 0], rel=1e-4)


def test_loss_of_the_test_is_a_mean_over_all_its_tokens(workdir, evaluated):
    model, variables, tokenizer = load_run(workdir)
    total, count = 0.0, 0
    apply = jax.jit(
        lambda tokens, source: jax.nn.log_softmax(
            model.apply(variables, tokens, source=source, source_mask=source > 0).logits
        )
    )
    for record in _records(workdir / "translations" / "step_00000006" / "test_beam3.jsonl"):
        source = [*tokenizer.encode(record["source"]), tokenizer.eos_id]
        target = [*tokenizer.encode(record["reference"]), tokenizer.eos_id]
        padded = [np.array([[*ids, *[0] * (16 - len(ids))]]) for ids in ([tokenizer.bos_id, *target[:-1]], source)]
        total -= float(apply(*padded)[0, np.arange(len(target)), target].sum())
        count += len(target)
    assert evaluated["test"]["tokens"] == count
    assert evaluated["test"]["loss"] == pytest.approx(total / count, rel=1e-4)


def test_generate_translates_line_by_line(workdir, tmp_path, capsys):
    lines = ["two one", "six", "three five one"]
    file = tmp_path / "lines.txt"
    file.write_text("".join(line + "\n" for line in lines))
    assert main(["generate", f"--workdir={workdir}", f"--prompt_file={file}", "--num_beams=3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = load_translator(workdir).translate(lines, num_beams=3, max_new_tokens=9)
    assert printed == [row[0].text for row in found]
    # Alone, greedily, and the best two.
    assert "".join(generate_from_run(workdir, lines[:1])).count("\n") == 1
    assert "".join(generate_from_run(workdir, lines, num_beams=3, num_samples=2)).splitlines()[::2] == printed


def test_attention_maps_of_a_sentence_have_its_tokens(workdir):
    translator = load_translator(workdir)
    source, target = "two one", "zwei eins"
    maps = translator.attention_maps(source, target)
    sides = [len(translator.tokenizer.encode(text)) + 1 for text in (target, source)]
    assert maps["cross"].weights.shape == (1, 2, *sides)
    assert ("".join(maps["cross"].rows), "".join(maps["cross"].columns)) == (f"{target}<eos>", f"{source}<eos>")
    np.testing.assert_allclose(maps["cross"].weights.sum(-1), 1, rtol=1e-5)
    assert translator.max_new_tokens == 9  # the run's own
    own = translator.translate([source], max_new_tokens=9)[0][0].text
    expected = translator.attention_maps(source, own)["cross"].weights
    np.testing.assert_array_equal(translator.attention_maps(source)["cross"].weights, expected)
    np.testing.assert_array_equal(translator.attention_maps(source, max_new_tokens=9)["cross"].weights, expected)


@pytest.mark.slow
def test_continued_runs_are_bit_equal_over_batches_of_several_shapes(files, workdir, tmp_path):
    train_and_evaluate(_config(files, "model=transformer", "train.steps=4"), tmp_path / "run")
    train_and_evaluate(_config(files, "model=transformer"), tmp_path / "run")
    (_, variables, _), (_, expected, _) = load_run(tmp_path / "run"), load_run(workdir)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)


@pytest.mark.slow
def test_recurrent_runs_have_tokenizers_of_their_own(files, tmp_path):
    folder, path = files[0], tmp_path / "run"
    own = (f"data.tokenizer={folder}/de.json", f"data.source_tokenizer={folder}/en.json")
    with pytest.raises(ConfigError, match=r"share_embeddings must be False"):
        train_and_evaluate(_config(files, "model=rnn", *own), tmp_path / "shared")
    config = _config(files, "model=rnn", *own, "model.share_embeddings=False", "train.steps=2")
    train_and_evaluate(config, path)
    translator = load_translator(path)
    assert translator.source_tokenizer.encode("two one") != translator.tokenizer.encode("two one")
    sizes = {name: translator.model.config.__dict__[name] for name in ("vocab_size", "source_vocab_size")}
    expected = (translator.tokenizer.vocab_size, translator.source_tokenizer.vocab_size)
    assert tuple(sizes.values()) == expected
    (row,) = translator.translate(["two one"], max_new_tokens=5)
    assert np.isfinite(row[0].score)
    (path / "source" / "tokenizer.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"tokenizer file .* is missing"):
        load_translator(path)


PACKED = ("data.batching=packed", "train.steps=2", "eval.decode_examples=0", "sample.num_translations=0")


@pytest.mark.slow
def test_packed_pairs_have_the_validation_loss_of_pairs_by_themselves(files, tmp_path):
    # Without an update both are of the same parameters.
    still = (*PACKED, "optimizer.learning_rate=0.0")
    packed = train_and_evaluate(_config(files, "model=transformer", *still), tmp_path / "packed")
    alone = train_and_evaluate(_config(files, "model=transformer", *still, "data.batching=padded"), tmp_path / "alone")
    assert packed["tokens"] == alone["tokens"]
    assert packed["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-5)


@pytest.mark.parametrize(("spec", "name"), [("model=rnn", "recurrent"), ("encoder_attention=clustered", "'clustered'")])
def test_packed_pairs_are_refused_where_they_would_see_each_other(files, tmp_path, spec, name):
    with pytest.raises(ConfigError, match=f"{name} can't keep packed"):
        train_and_evaluate(_config(files, spec, *PACKED), tmp_path)


def test_bleu_without_its_library_is_refused_before_training(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxformer\[translation\]'"):
        train_and_evaluate(_config(files, "model=transformer"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.num_beams=0"], "config.eval.num_beams is 0, must be at least 1"),
        (["eval.decode_examples=-1"], "config.eval.decode_examples is -1, must be at least 0"),
        (["model.positions=learned", "eval.max_new_tokens=64"], "max_new_tokens is 64, must be below .* = 16, where"),
    ],
)
def test_translations_that_cannot_be_made_are_refused_before_training(files, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train_and_evaluate(_config(files, "model=transformer", *overrides), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 2}, "num_samples is 2, but greedy translations are all the same"),
        ({"num_samples": 3, "num_beams": 2}, "num_samples is 3, must be at most num_beams = 2"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams=2 searches, so temperature can't be used"),
    ],
)
def test_numbers_of_translations_that_cannot_be_had_are_refused(workdir, options, message):
    with pytest.raises(ValueError, match=message):
        list(generate_from_run(workdir, ["one"], **options))


def test_eval_keeps_both_tokenizers(workdir):
    with pytest.raises(ConfigError, match=r"not its tokenizers\), .*got config.data.source_tokenizer=bytes"):
        evaluate_run(workdir, ["data.source_tokenizer=bytes"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("translation:model=rnn,attention=local", "attention=local is of model=transformer"),
        ("translation:attention=general", "attention=general is of model=rnn"),
        ("translation:cross_attention=lsh", "cross_attention must be one of"),
    ],
)
def test_attentions_of_the_other_model_are_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_config(spec)


def test_what_is_no_run_of_pairs_does_not_translate(trained):
    with pytest.raises(ConfigError, match="are no pairs"):
        load_translator(trained[0])
