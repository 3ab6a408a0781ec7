"""Runs that start from another: its parameters, model and tokenizer; the head is new; a resume needs it no more."""

import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer.training.assembly import example_batch, load_data, make_parts
from jaxformer.training.checkpoint_reading import CheckpointError
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import load_config, read_config, resolve, write_config
from jaxformer.training.decided import decided_length, decided_values
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.overrides import ConfigError
from jaxformer.training.run_directory import RunDirectory
from jaxformer.training.sharding import make_mesh
from jaxformer.training.starting import start_values, take_parameters
from jaxformer.training.startup import training_batches
from jaxformer.training.state import init_state

PRETRAINING = (
    "model.num_layers=2",
    "model.embed_dim=8",
    "model.num_heads=2",
    "data.name=masked:text",
    "data.tokenizer=bytes",
    "data.length=32",
    "data.validation_fraction=0.3",
    "train.batch_size=2",
    "eval.batch_size=2",
)
FINE_TUNING = (
    "data.length=16",
    "data.num_buckets=1",
    "data.validation_fraction=0.3",
    "train.batch_size=2",
    "eval.batch_size=2",
    "eval.predict_examples=0",
)


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    file = tmp_path_factory.mktemp("labels") / "labels.tsv"
    file.write_text("text\tlabel\n" + "".join(f"word {n}\t{'abc'[n % 3]}\n" for n in range(20)))
    return file


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, text):
    """A run directory as one looks before the first update, with the parameters that it began with."""
    workdir = tmp_path_factory.mktemp("pretrained") / "run"
    run = load_config("masked_lm:size=tiny", [*PRETRAINING, f"data.path={text}/*.txt"])
    mesh, data = make_mesh(), load_data(run.config)
    decided = decided_values(run.config, data)
    config = resolve(run.config, decided)
    parts = make_parts(config, mesh)
    state = draw(config, parts)
    workdir.mkdir()
    write_config(RunDirectory(workdir).config, run, decided)
    with Checkpoints(RunDirectory(workdir).checkpoints, keep_latest=1, keep_best=0) as checkpoints:
        checkpoints.save(3, state, training_batches(config, data, mesh), {"loss": None, "data_hash": data.hash})
        checkpoints.wait()
    return workdir, state.params


def draw(config, parts):
    example = example_batch(config.data.length, parts.model)
    return init_state(parts.model, parts.optimizer, config.seed, example, parts.shardings)


def fine_tuning(start, labels, *overrides, arg="size=tiny,start=run"):
    given = [*FINE_TUNING, f"data.train={labels}", *overrides]
    return load_config(f"finetune:{arg}", [*given, f"start.workdir={start}"] if "start=run" in arg else given)


@pytest.fixture(scope="module")
def fine_tuned(pretrained, labels):
    """A config that starts from the run, with all values decided, and the state that it draws."""
    run = fine_tuning(pretrained[0], labels, "seed=5", "model.dropout_rate=0.25")
    started = start_values(run.config)
    assert started["data.tokenizer"] == "bytes"
    assert started["start.step"] == "3"
    begun = resolve(run.config, started)
    config = resolve(run.config, {**started, **decided_values(begun, load_data(begun))})
    return config, draw(config, make_parts(config, make_mesh()))


def test_everything_that_both_have_is_the_starts_and_the_rest_is_said(pretrained, fine_tuned):
    (config, drawn), before, said = fine_tuned, pretrained[1], []
    assert (config.model.name, config.model.embed_dim, config.model.dropout_rate) == ("bert", 8, 0.25)
    assert (config.model.attention_dropout_rate, config.model.max_length) == (0.1, 32)
    assert (config.head.task, config.head.num_classes) == ("classification", 3)
    state = take_parameters(config, drawn, said.append)
    for name in state.params:
        expected = drawn.params if name == "classifier" else before
        jax.tree.map(np.testing.assert_array_equal, state.params[name], expected[name])
    assert "encoder" in state.params
    assert said[0].endswith("run, step 3")
    assert said[1] == "start, drawn anew: classifier/bias, classifier/kernel"
    assert "head_transform/kernel" in said[2]
    assert "next_sentence_head/bias" in said[2]


def test_rows_are_as_long_as_the_start_has_positions_where_nothing_is_said(pretrained, labels):
    workdir, _ = pretrained
    assert "data.length" not in start_values(fine_tuning(workdir, labels).config)
    config = load_config("finetune:size=tiny,start=run", [f"data.train={labels}", f"start.workdir={workdir}"]).config
    assert config.data.length is None
    assert start_values(config)["data.length"] == 32


def test_an_encoders_run_writes_no_text_and_says_so(pretrained):
    with pytest.raises(ConfigError, match="has an encoder, which writes no text; jaxformer embed"):
        next(generate_from_run(pretrained[0], ["word"]))


def test_a_start_that_lacks_a_part_of_the_body_is_refused(fine_tuned):
    config, drawn = fine_tuned
    table = drawn.params["encoder"]["position_embedding"]["embedding"]
    longer = {**drawn.params["encoder"], "position_embedding": {"embedding": table[:20]}}
    state = drawn.replace(params={**drawn.params, "encoder": longer})
    with pytest.raises(CheckpointError, match=r"does not fit the model: params/encoder/position_embedding.*\[20, 8\]"):
        take_parameters(config, state, print)


def test_what_the_start_decides_cannot_be_given(pretrained, labels):
    workdir, _ = pretrained
    with pytest.raises(ConfigError, match=r"tokenizer is 'other\.json', must be None: it is the start's"):
        start_values(fine_tuning(workdir, labels, "data.tokenizer=other.json").config)
    with pytest.raises(ConfigError, match=r"config\.start\.workdir is None"):
        start_values(load_config("finetune:start=run").config)
    with pytest.raises(ConfigError, match="is not a run directory"):
        start_values(fine_tuning(workdir / "nothing", labels).config)
    with pytest.raises(CheckpointError, match="step must be latest, best or one of 3"):
        start_values(fine_tuning(workdir, labels, "start.step=9").config)
    whole = load_config("masked_lm", ()).config
    config = fine_tuning(workdir, labels).config.copy_and_resolve_references()
    with config.unlocked():
        config.model = whole.model
    with pytest.raises(ConfigError, match=r"config\.model\.\w+ comes from the start"):
        start_values(config)


def test_heads_and_data_of_different_tasks_are_refused(pretrained, labels):
    run = fine_tuning(pretrained[0], labels, "objective=tagging")
    begun = resolve(run.config, start_values(run.config))
    with pytest.raises(ConfigError, match="is 'tagging', but data 'tsv_labels' are for classification"):
        decided_values(begun, load_data(begun))


@pytest.mark.parametrize(("name", "fits"), [("t5", True), ("transformer_tiny", True), ("bert", False)])
def test_longer_rows_than_the_starts_need_positions_that_end_nowhere(name, fits):
    model = {"name": name, "vocab_size": 300, "max_length": 8, "num_layers": 1, "embed_dim": 8, "num_heads": 2}
    given = load_config("text_to_text:data=dates,start=run", ["start.workdir=there"]).config
    config = resolve(given, {"model": model, "data.tokenizer": "bytes"})
    data = SimpleNamespace(max_length=40)
    if fits:
        assert decided_length(config, data) == {"model.max_length": 40}
    else:
        with pytest.raises(ConfigError, match=r"longest row = 40, must be at most the start's model\.max_length = 8"):
            decided_length(config, data)


@pytest.mark.slow
def test_a_run_goes_on_when_its_start_is_gone(pretrained, labels, tmp_path):
    start, workdir = tmp_path / "start", tmp_path / "run"
    shutil.copytree(pretrained[0], start)
    figures = train_and_evaluate(fine_tuning(start, labels, "train.steps=1"), workdir)
    assert figures["step"] == 1
    shutil.rmtree(start)
    run, decided = read_config(RunDirectory(workdir).config)
    assert run.config.start.workdir == str(start)
    assert decided["model"]["embed_dim"] == 8
    figures = train_and_evaluate(fine_tuning(start, labels, "train.steps=2"), workdir)
    assert (figures["status"], figures["step"]) == ("completed", 2)
