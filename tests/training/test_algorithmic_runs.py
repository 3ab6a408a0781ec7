"""Runs on algorithmic tasks and on pictures, from config to figures."""

import json
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.data import load_algorithmic_data
from jaxformer.training.assembly import make_model
from jaxformer.training.buckets import decode_rows, questions_and_answers
from jaxformer.training.config import load_config, resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.finished import evaluate_run, load_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.metrics import read_metrics
from jaxformer.training.other_attention import parse_attention
from jaxformer.training.overrides import ConfigError

# Every question is among the training examples, so that some hundred steps learn them.
WORDS = (
    "model.num_layers=1",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.positions=learned",
    "optimizer.learning_rate=1e-2",
    "data.num_symbols=3",
    "data.max_length=2",
    "data.test_lengths=2,3",
    "data.validation_examples=16",
    "data.test_examples=9",
    "eval.batch_size=8",
    "train.batch_size=16",
    "train.steps=120",
    "eval.every_steps=60",
    "checkpoint.every_steps=60",
    "schedule.warmup_steps=5",
    "schedule.decay_steps=120",
    "log.every_steps=1",
    "sample.prompt=2 1 = ",
    "sample.max_new_tokens=3",
)
DIGITS = (
    "model.num_layers=2",
    "model.embed_dim=16",
    "model.num_heads=2",
    "train.steps=12",
    "train.batch_size=8",
    "eval.every_steps=0",
    "eval.batch_size=64",
    "checkpoint.every_steps=8",
    "schedule.warmup_steps=2",
    "log.every_steps=1",
    "sample.num_pictures=3",
)
# What each model of the experiments is by its fields, and the attentions of its layers.
MODELS = {
    "gpt": ({"stack": "plain", "residual": "plain"}, ("dense",)),
    "universal": ({"stack": "universal", "step_embedding": "sinusoidal"}, ("dense",)),
    "reformer": ({"residual": "reversible", "residual_merge": "concatenate", "positions": "axial"}, ("local", "lsh")),
    "sparse": ({"remat": "full", "scale_residual_init": True, "positions": "axial"}, ("sparse",)),
}
OWN_ATTENTIONS = ("reformer", "sparse")


def _figures(workdir):
    return [{**record, "tokens_per_second": None} for record in read_metrics(workdir / "metrics.jsonl")]


def _losses(workdir):
    return [record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if record["split"] == "train"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A finished run that reverses words: (run directory, its figures)."""
    workdir = tmp_path_factory.mktemp("words") / "run"
    return workdir, train_and_evaluate(load_config("algorithmic:task=reverse,size=tiny", WORDS), workdir)


def test_run_on_a_task_learns_and_reports_each_test_length(words):
    workdir, figures = words
    losses = _losses(workdir)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert set(figures["buckets"]) == {"length_2", "length_3"}
    assert figures["buckets"]["length_2"]["exact_match"] > 0.5
    assert figures["buckets"]["length_3"]["exact_match"] < figures["buckets"]["length_2"]["exact_match"]
    assert "bits_per_byte" not in figures
    last = {record["split"]: record for record in _figures(workdir) if record["step"] == 120}
    assert last["length_2"]["exact_match"] == figures["buckets"]["length_2"]["exact_match"]
    assert last["sample"]["text"].startswith("2 1 = ")


def test_figures_of_a_length_are_those_of_its_answers_counted_one_by_one(words):
    workdir, figures = words
    model, variables, _ = load_run(workdir)
    rows = load_algorithmic_data(
        name="reverse", num_symbols=3, max_length=2, test_lengths=(2, 3), test_examples=9
    ).buckets["length_2"]
    batch = rows.batch(np.arange(9))
    logits = np.asarray(model.apply(variables, jnp.asarray(batch["tokens"])).logits, np.float64)
    right, exact, loss = 0, 0, 0.0
    for row in range(9):
        places = np.flatnonzero(batch["targets"][row] != -100)
        target = batch["targets"][row, places]
        scores = logits[row, places]
        loss += (np.log(np.exp(scores).sum(-1)) - scores[np.arange(3), target]).sum()
        right += (scores.argmax(-1) == target).sum()
        # An answer is decoded exactly where each token is the likeliest after the right ones.
        exact += (scores.argmax(-1) == target).all()
    found = figures["buckets"]["length_2"]
    assert found["tokens"] == 27
    assert found["loss"] == pytest.approx(loss / 27, rel=1e-4)
    assert found["accuracy"] == pytest.approx(right / 27)
    assert found["exact_match"] == pytest.approx(exact / 9)
    assert found["decoded_accuracy"] >= found["exact_match"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_ATTENTIONS)
def test_models_with_attentions_of_their_own_learn_a_task(name, tmp_path):
    changes = [*WORDS, "model.num_layers=2"]
    figures = train_and_evaluate(load_config(f"algorithmic:task=reverse,size=tiny,model={name}", changes), tmp_path)
    losses = _losses(tmp_path)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert figures["buckets"]["length_2"]["exact_match"] > 0.5
    if name == "reformer":
        # One of the attentions is changed in its place.
        arguments = "num_hashes=1,num_buckets=(16,),chunk_size=8,within_bucket=True"
        other = evaluate_run(tmp_path, ["eval.decode=False"], attention=f"lsh:{arguments}")
        assert other["loss"] != figures["validation_loss"]
        with pytest.raises(ConfigError, match="other parameters"):
            evaluate_run(tmp_path, attention="dense")


@pytest.mark.slow
def test_run_on_a_task_goes_on_exactly(words, tmp_path):
    straight, _ = words
    config = load_config("algorithmic:task=reverse,size=tiny", WORDS)
    config.config.train.steps = 60
    train_and_evaluate(config, tmp_path)
    config.config.train.steps = 120
    train_and_evaluate(config, tmp_path)
    assert _figures(tmp_path) == _figures(straight)
    expected, found = load_run(straight)[1], load_run(tmp_path)[1]
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_finished_run_answers_and_is_tested_at_other_lengths(words):
    workdir, figures = words
    again = train_and_evaluate(load_config("algorithmic:task=reverse,size=tiny", WORDS), workdir)
    assert again["buckets"]["length_3"] == figures["buckets"]["length_3"]
    other = evaluate_run(workdir, ["data.test_lengths=1", "eval.decode=False"])
    assert set(other["buckets"]) == {"length_1"}
    assert "exact_match" not in other["buckets"]["length_1"]
    assert other["loss"] == pytest.approx(figures["validation_loss"], rel=1e-6)
    text = "".join(generate_from_run(workdir, ["2 1 = "], max_new_tokens=3, temperature=0.0))
    assert text == next(record["text"] for record in _figures(workdir)[::-1] if record["split"] == "sample") + "\n"


@pytest.mark.slow
def test_finished_run_is_evaluated_with_another_attention_of_the_same_parameters(words):
    workdir, figures = words
    same = evaluate_run(workdir, ["eval.decode=False"], attention="local:window=99")
    assert same["loss"] == pytest.approx(figures["validation_loss"], rel=1e-5)
    other = evaluate_run(workdir, ["eval.decode=False"], attention="local:window=0")
    assert other["loss"] > 2 * figures["validation_loss"]
    with pytest.raises(ConfigError, match="other parameters"):
        evaluate_run(workdir, attention="additive")


@pytest.mark.parametrize("task", ["copy", "duplicate"])
def test_config_takes_every_causal_attention_and_decodes_where_it_can(task):
    causal = {name for name, kind in [*ATTENTION.items(), *PATTERNS.items()] if kind.causal} - {"sparse"}
    for name in causal:
        config = load_config(f"algorithmic:task={task},attention={name}").config
        assert config.model.attention == name
        decided = {"model.vocab_size": 13, "model.max_length": 64}
        assert make_model(resolve(config, decided)).config.attentions[0].name == name
        assert config.eval.decode == (name in PATTERNS or ATTENTION[name].decodes)
    assert load_config("algorithmic:task=copy").config.model.attention == "dense"
    assert load_config("algorithmic:task=duplicate,size=tiny").config.model.attention == "shared_query_key"


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("name", MODELS)
def test_config_takes_every_model(name, size):
    config = load_config(f"algorithmic:model={name},size={size}").config
    made = make_model(resolve(config, {"model.vocab_size": 13, "model.max_length": 64})).config
    fields, attentions = MODELS[name]
    assert {field: getattr(made, field) for field in fields} == fields
    assert tuple(choice.name for choice in made.attentions) == attentions
    assert config.eval.decode


@pytest.mark.parametrize(
    ("name", "attention"), [("reformer", "lsh"), ("sparse", "sparse"), ("gpt", "shared_query_key")]
)
def test_duplicate_has_one_layer_of_every_model(name, attention):
    config = load_config(f"algorithmic:model={name},task=duplicate").config
    made = make_model(resolve(config, {"model.vocab_size": 130, "model.max_length": 64})).config
    assert (made.num_layers, [choice.name for choice in made.attentions]) == (1, [attention])


@pytest.mark.parametrize("experiment", ["algorithmic", "pixels"])
@pytest.mark.parametrize("name", OWN_ATTENTIONS)
def test_models_with_attentions_of_their_own_take_no_other(experiment, name):
    with pytest.raises(ConfigError, match=f"model={name} has attentions of its own; attention can't be dense"):
        load_config(f"{experiment}:model={name},attention=dense")


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("name", OWN_ATTENTIONS)
def test_pictures_decide_rows_and_columns(name, size):
    config = load_config(f"pixels:model={name},size={size}").config
    data = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(vocab_size=28),
        train_rows=types.SimpleNamespace(length=65),
        max_length=65,
        row_length=8,
    )
    made = make_model(resolve(config, decided_values(config, data))).config
    fields, attentions = MODELS[name]
    assert {field: getattr(made, field) for field in fields} == fields
    assert tuple(choice.name for choice in made.attentions) == attentions
    assert made.axial_shape == (9, 8)
    if name == "sparse":
        seen = dict(made.attentions[0].args)["pattern"].mask(65)[30][:31]
        # A row back and the column.
        assert [key for key in range(31) if seen[key]] == [6, 14, 22, *range(23, 31)]


def test_an_attention_is_read_with_its_arguments():
    assert parse_attention("dense") == ("dense", {})
    assert parse_attention("longformer:window=3,global_indices=(0, 4)") == (
        "longformer",
        {"window": 3, "global_indices": (0, 4)},
    )
    for text in ("local:window", "local:window=x", ":a=1", "local:3", "local:window=1)+(2"):
        with pytest.raises(ConfigError, match="attention must be name:argument=value"):
            parse_attention(text)


def test_questions_end_at_the_first_target():
    batch = {"tokens": np.array([[5, 6, 9, 6, 1]]), "targets": np.array([[-100, -100, 6, 5, -100]])}
    (question,), (answer,) = questions_and_answers(batch)
    assert (question.tolist(), answer.tolist()) == ([5, 6, 9], [6, 5])


def test_decoded_answers_are_counted_over_rows_not_batches(monkeypatch):
    rows = load_algorithmic_data(name="copy", max_length=2, test_lengths=(2,), test_examples=5).buckets["length_2"]
    wrong = rows.batch(np.array([4]))["targets"][0, 2:5]
    asked = []

    def answer(model, params, questions, **_):
        asked.append(len(questions))
        answers = np.stack([[*question[:2], 11] for question in questions])
        answers[(answers == wrong).all(1), 1] += 1
        return answers

    monkeypatch.setattr("jaxformer.inference.generate", answer)
    figures = decode_rows(nn.Dense(1), None, None, rows, batch_size=3, eos_id=11)
    assert asked == [3, 3]
    assert figures == {"exact_match": 4 / 5, "decoded_accuracy": 14 / 15}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arg", "decided"),
    [
        ("size=tiny", {"model.attention_args.stride": 8}),
        ("size=tiny,model=sparse", {"model.stride": 8, "model.axial_shape": [9, 8]}),
        ("size=tiny,model=reformer", {"model.axial_shape": [9, 8]}),
    ],
)
def test_run_on_pictures_learns_and_draws(tmp_path, capsys, arg, decided):
    figures = train_and_evaluate(load_config(f"pixels:{arg}", DIGITS), tmp_path)
    losses = _losses(tmp_path)
    assert losses[-1] < losses[0] - 0.3
    assert figures["bits_per_dim"] == pytest.approx(figures["validation_loss"] / np.log(2), rel=1e-6)
    resolved = json.loads((tmp_path / "config.json").read_text())["resolved"]
    assert {path: resolved[path] for path in decided} == decided
    sheet = np.asarray(Image.open(tmp_path / "pictures" / "step_00000012.png"))
    assert sheet.shape == (132, 132)
    assert len(np.unique(sheet)) > 8
    assert "bits per dim" in capsys.readouterr().err
    again = evaluate_run(tmp_path)
    assert again["bits_per_dim"] == pytest.approx(figures["bits_per_dim"], rel=1e-6)
    assert len("".join(generate_from_run(tmp_path, [""], max_new_tokens=3)).split()) == 3


@pytest.mark.slow
def test_run_on_classes_of_pictures_learns(tmp_path):
    changes = [*DIGITS, "train.steps=30", "model.dropout_rate=0.0", "optimizer.learning_rate=1e-2"]
    changes = [change for change in changes if not change.startswith("sample")]
    figures = train_and_evaluate(load_config("pixels:size=tiny,task=classify,attention=dense", changes), tmp_path)
    losses = _losses(tmp_path)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    assert "bits_per_dim" not in figures
    assert not (tmp_path / "pictures").exists()


def test_a_stride_is_left_open_for_pictures_only(tmp_path):
    config = load_config("pixels:size=tiny", DIGITS).config
    tasks = load_config("algorithmic:size=tiny", WORDS).config
    with tasks.unlocked():
        tasks.model.attention, tasks.model.attention_args = "strided", config.model.attention_args
    with pytest.raises(ConfigError, match=r"attention_args\.stride is None, which only pictures decide"):
        train_and_evaluate(tasks, tmp_path)
