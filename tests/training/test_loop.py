import json
import math
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training import loop
from jaxformer.training.assembly import load_data, make_model
from jaxformer.training.checkpoint_reading import CheckpointError, find_steps, read_facts
from jaxformer.training.config import ConfigError, RunConfig, load_config, read_config
from jaxformer.training.evaluate import evaluate
from jaxformer.training.finished import evaluate_run, load_model, load_run, read_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.metrics import read_metrics
from jaxformer.training.run_directory import RunDirectory, RunDirectoryError
from jaxformer.training.sharding import make_mesh
from jaxformer.training.signals import TrainingInterrupted, deferred_interruption
from jaxformer.training.startup import check_batches
from jaxformer.training.step_log import NonFiniteError


def records(workdir, split):
    return [record for record in read_metrics(workdir / "metrics.jsonl") if record["split"] == split]


def test_run_writes_each_step_once_with_its_figures(trained):
    workdir, figures = trained
    train = records(workdir, "train")
    assert [record["step"] for record in train] == list(range(1, 13))
    assert {"loss", "accuracy", "gradient_norm", "learning_rate", "tokens", "tokens_per_second"} <= set(train[0])
    assert [record["step"] for record in records(workdir, "validation")] == [5, 10, 12]
    assert [record["step"] for record in records(workdir, "sample")] == [5, 10, 12]
    assert train[-1]["loss"] < train[0]["loss"]
    assert figures["status"] == "completed"
    assert figures["step"] == 12
    assert figures["train_loss"] == train[-1]["loss"]
    assert figures["validation_loss"] == records(workdir, "validation")[-1]["loss"]


def test_logged_rate_is_that_of_the_update(trained):
    workdir, _ = trained
    rates = [record["learning_rate"] for record in records(workdir, "train")]
    np.testing.assert_allclose(rates[:4], [0.0, 1e-3, 2e-3, 3e-3], rtol=1e-6)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_checkpoints_of_intervals_evaluations_and_the_end_are_kept(trained):
    workdir, _ = trained
    steps, broken = find_steps(workdir / "checkpoints")
    validation = {record["step"]: record["loss"] for record in records(workdir, "validation")}
    assert broken == []
    assert steps[-1] == 12
    assert min(validation, key=validation.get) in steps
    assert {step: read_facts(workdir / "checkpoints", step)["loss"] for step in steps if step in validation} == {
        step: validation[step] for step in steps if step in validation
    }


def test_run_directory_says_how_the_run_came_about(trained):
    workdir, _ = trained
    run = json.loads((workdir / "run.json").read_text())
    assert run["from_step"] == 0
    assert run["data_hash"]
    config, decided = read_config(workdir / "config.json")
    assert config.source == "language_model"
    assert config.arg == "size=tiny"
    assert "train.steps=12" in config.overrides
    assert decided == {"model.vocab_size": 259, "model.max_length": 23, "schedule.decay_steps": 12}


def test_evaluation_is_a_mean_over_all_tokens_once(trained):
    """The oracle scores the validation text row by row, without batches, padding or the evaluation step."""
    workdir, figures = trained
    config = read_run(workdir)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    model, params, _, step = load_model(workdir, config, mesh)
    assert step == 12
    data = load_data(config)
    total, count = 0.0, 0
    for index in range(len(data.validation_rows)):
        row = data.validation_rows[index]
        inputs = {
            name: jax.numpy.asarray(row[name])[None] for name in ("tokens", "positions", "segments") if name in row
        }
        logits = np.asarray(model.apply({"params": params}, **inputs).logits[0], np.float64)
        for position, target in enumerate(row["targets"]):
            if target >= 0:
                total += np.log(np.exp(logits[position]).sum()) - logits[position, target]
                count += 1
    assert figures["tokens"] == count
    assert figures["validation_loss"] == pytest.approx(total / count, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert figures["bits_per_byte"] == pytest.approx(total / math.log(2) / data.validation_bytes, rel=1e-5)


def test_perplexity_is_not_averaged_over_batches():
    sums = [{"loss_sum": 4 * math.log(2), "weight_sum": 4.0}, {"loss_sum": math.log(8), "weight_sum": 1.0}]
    batches = iter(sums)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    fed = [{"tokens": np.zeros((1, 3), np.int32)}] * 2
    figures = evaluate(lambda *_: next(batches), None, None, fed, mesh, {"bits_per_byte": 7})
    assert figures["perplexity"] == pytest.approx(2.6390158)
    assert figures["bits_per_byte"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(lambda *_: {"loss_sum": 0.0, "weight_sum": 0.0}, None, None, fed, mesh, {})


def test_finished_run_is_evaluated_again_with_the_same_figures(trained):
    workdir, figures = trained
    again = evaluate_run(workdir)
    assert again["loss"] == pytest.approx(figures["validation_loss"], rel=1e-6)
    assert again["step"] == 12
    assert again["tokens"] == figures["tokens"]
    best = evaluate_run(workdir, step="best")
    assert best["loss"] == pytest.approx(min(record["loss"] for record in records(workdir, "validation")), rel=1e-6)


def test_finished_run_is_evaluated_on_other_data(trained, tmp_path, write_text):
    workdir, figures = trained
    write_text(tmp_path, num_documents=7, seed=5)
    other = evaluate_run(workdir, [f"data.path={tmp_path}/*.txt", "eval.batch_size=2"])
    assert other["loss"] != figures["validation_loss"]
    # All of the other data: every byte of its documents, and the end of each.
    assert other["tokens"] == sum(path.stat().st_size + 1 for path in tmp_path.glob("*.txt"))
    for override in ("model.num_layers=3", "data.tokenizer=x.json", "train.steps=3"):
        with pytest.raises(ConfigError, match="eval may change data"):
            evaluate_run(workdir, [override])


def test_run_is_loaded_for_use_in_python(trained):
    workdir, _ = trained
    model, variables, tokenizer = load_run(str(workdir))
    logits = model.apply(variables, jnp.asarray([tokenizer.encode("beta")])).logits
    assert logits.shape == (1, 4, tokenizer.vocab_size)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) > 1000


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("optimizer", "weight_deacy", "config.optimizer.weight_deacy is unknown.*weight_decay"),
        ("schedule", "warmup", "config.schedule.warmup is unknown.*warmup_steps"),
        ("data", "lenght", "config.data.lenght is unknown.*length"),
    ],
)
def test_unknown_field_of_a_config_file_is_refused(text, tmp_path, tiny_config, section, name, message):
    config = tiny_config(text).config
    with config.unlocked():
        config[section][name] = 1
    with pytest.raises(ConfigError, match=message):
        train_and_evaluate(config, tmp_path)


def test_missing_field_of_a_config_file_is_refused(text, tmp_path, tiny_config):
    config = tiny_config(text).config
    with config.unlocked():
        del config.eval.batch_size
    with pytest.raises(ConfigError, match=r"config\.eval\.batch_size is missing"):
        train_and_evaluate(config, tmp_path)


def test_starting_a_finished_run_again_changes_nothing(trained, capsys):
    workdir, figures = trained
    before = (workdir / "metrics.jsonl").read_bytes()
    again = train_and_evaluate(read_config(workdir / "config.json")[0], workdir)
    assert {name: again[name] for name in figures} == figures
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert "nothing to do: step 12 is saved" in capsys.readouterr().err


def test_run_from_python_equals_run_with_overrides(text, trained, tmp_path, tiny_config):
    _, figures = trained
    run = tiny_config(text)
    run.config.train.steps = 12
    run.config.eval.every_steps = 0
    run.config.checkpoint.every_steps = 0
    again = train_and_evaluate(run.config, tmp_path / "run")
    assert again["validation_loss"] == figures["validation_loss"]
    assert again["train_loss"] == figures["train_loss"]
    assert find_steps(tmp_path / "run" / "checkpoints")[0] == [12]


def test_going_on_with_another_structure_is_refused_with_the_difference(text, trained, tiny_config):
    workdir, _ = trained
    before = (workdir / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"model.num_layers: 2 before, 3 now; train.batch_size: 4 before, 8 now"):
        train_and_evaluate(tiny_config(text, "train.steps=12", "model.num_layers=3", "train.batch_size=8"), workdir)
    assert (workdir / "config.json").read_bytes() == before


@pytest.mark.slow
def test_length_logging_and_evaluation_may_change(text, tmp_path, tiny_config):
    workdir = tmp_path / "run"
    train_and_evaluate(tiny_config(text, "train.steps=3"), workdir)
    figures = train_and_evaluate(
        tiny_config(text, "train.steps=6", "log.every_steps=2", "eval.every_steps=4", "sample.max_new_tokens=0"),
        workdir,
    )
    assert figures["step"] == 6
    assert [record["step"] for record in records(workdir, "train")] == [1, 2, 3, 4, 6]
    assert [record["step"] for record in records(workdir, "validation")] == [3, 4, 6]
    assert read_config(workdir / "config.json")[1]["schedule.decay_steps"] == 4


def test_changed_data_are_refused(text, tmp_path, tiny_config, write_text):
    own = tmp_path / "text"
    write_text(own)
    train_and_evaluate(tiny_config(own, "train.steps=2"), tmp_path / "run")
    write_text(own, seed=3)
    with pytest.raises(CheckpointError, match="the training data have changed since step 2"):
        train_and_evaluate(tiny_config(own, "train.steps=4"), tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_heads=3"], "num_heads"),
        (["model.name=gtp"], "config.model.name is 'gtp'; did you mean gpt"),
        (["objective=languge_model"], "did you mean language_model"),
        (["model.vocab_size=100"], "must be at least the tokenizer's 259"),
        (["model.max_length=20"], "must be at least config.data.length = 23"),
        (["train.steps=0"], "config.train.steps is 0, must be at least 1"),
        (["train.accumulation_steps=3"], "must be a multiple of"),
        (["train.non_finite=ignore"], "must be one of skip, stop"),
        (["sample.max_new_tokens=22"], r"asks for 2 \+ 22 tokens"),
        (["schedule.decay_steps=2"], "must be above warmup_steps=3"),
        (["data.path=nowhere/*.txt"], "nowhere"),
        (["mesh.data=5"], "must multiply to the number of devices"),
        (["optimizer.no_decay=nothing"], "matches no parameter"),
    ],
)
def test_wrong_config_is_refused_and_leaves_the_folder_usable(text, tmp_path, overrides, message, tiny_config):
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(tiny_config(text, *overrides), tmp_path)
    assert not RunDirectory(tmp_path).exists


def test_batches_that_the_mesh_cannot_split_are_refused(text, tiny_config):
    mesh = jax.sharding.AbstractMesh((2, 2, 1, 1), ("data", "fsdp", "tensor", "expert"))
    check_batches(tiny_config(text, "eval.batch_size=8").config, mesh)
    for field, size in (("eval.batch_size", 6), ("train.batch_size", 2)):
        with pytest.raises(ConfigError, match=f"{field} is {size}, must be a multiple of the 4 devices"):
            check_batches(tiny_config(text, "eval.batch_size=8", f"{field}={size}").config, mesh)


@pytest.mark.slow
def test_run_that_saved_nothing_may_begin_again_with_another_config(text, tmp_path, monkeypatch, tiny_config):
    def fail(*args):
        raise OSError("no data today")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "shard_batch", fail)
        with pytest.raises(OSError, match="no data today"):
            train_and_evaluate(tiny_config(text, "train.steps=2"), tmp_path)
    assert RunDirectory(tmp_path).exists
    train_and_evaluate(tiny_config(text, "train.steps=2", "model.num_layers=1"), tmp_path)
    assert read_config(tmp_path / "config.json")[0].config.model.num_layers == 1


def poison(monkeypatch, bad_step):
    """Makes the loss of one step infinite: its batch's embedding index is fine, its weights are not."""
    make_parts = loop.make_parts

    def poisoned(config, mesh):
        parts = make_parts(config, mesh)
        step = parts.train_step

        def train_step(state, batch):
            if int(state.step) + 1 == bad_step:
                params = jax.tree.map(lambda leaf: leaf + np.inf, state.params)
                good = jax.tree.map(np.array, state.params)
                broken, metrics = step(state.replace(params=params), batch)
                return broken.replace(params=jax.tree.map(jax.numpy.asarray, good)), metrics
            return step(state, batch)

        object.__setattr__(parts, "train_step", train_step)
        return parts

    monkeypatch.setattr(loop, "make_parts", poisoned)


def test_non_finite_step_is_skipped_and_told(text, tmp_path, monkeypatch, capsys, tiny_config):
    poison(monkeypatch, 3)
    train_and_evaluate(tiny_config(text, "train.steps=5"), tmp_path)
    assert "step 3: loss nan" in capsys.readouterr().err
    train = records(tmp_path, "train")
    assert [record["skipped"] for record in train] == [0, 0, 1, 0, 0]
    assert train[2]["loss"] is None
    assert train[4]["loss"] is not None


def test_non_finite_step_stops_the_run_where_asked(text, tmp_path, monkeypatch, tiny_config):
    poison(monkeypatch, 3)
    with pytest.raises(NonFiniteError, match=r"step 3: loss nan.*nothing of it was applied"):
        train_and_evaluate(
            tiny_config(text, "train.steps=5", "train.non_finite=stop", "checkpoint.every_steps=2"), tmp_path
        )
    assert find_steps(tmp_path / "checkpoints")[0] == [2]


def interrupt_at(monkeypatch, step, number):
    """Sends this process a signal while the batch of a step is placed."""
    place, calls = loop.shard_batch, []

    def shard_batch(batch, mesh):
        calls.append(None)
        if len(calls) == step:
            signal.raise_signal(number)
        return place(batch, mesh)

    monkeypatch.setattr(loop, "shard_batch", shard_batch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_tells_how_to_go_on_and_is_raised_again(text, tmp_path, monkeypatch, capsys, number, tiny_config):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupt_at(monkeypatch, 3, number)
    with pytest.raises(KeyboardInterrupt) as caught:
        train_and_evaluate(tiny_config(text, "train.steps=5"), tmp_path)
    assert isinstance(caught.value, TrainingInterrupted)
    assert caught.value.step == 3
    assert find_steps(tmp_path / "checkpoints")[0] == [3]
    assert f"go on with: jaxformer train --workdir={tmp_path}" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_second_interrupt_aborts():
    with deferred_interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal_name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interruptions_nest_and_leave_other_threads_alone():
    with deferred_interruption() as outer, deferred_interruption() as inner:
        assert inner is outer
    seen = []

    def elsewhere():
        with deferred_interruption() as interruption:
            seen.append(interruption.signal_name)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [None]


def test_second_writer_is_refused(text, tmp_path, tiny_config):
    directory = RunDirectory(tmp_path)
    with directory.lock(), pytest.raises(RunDirectoryError, match="one run at a time"):
        train_and_evaluate(tiny_config(text, "train.steps=2"), tmp_path)


def test_train_and_evaluation_steps_compile_once(text, tmp_path, monkeypatch, tiny_config):
    """The validation rows do not fill their last batch; epochs end inside the run."""
    jitted = []
    make_parts, jit = loop.make_parts, jax.jit

    def keep_parts(*args):
        parts = make_parts(*args)
        jitted.append(parts.train_step)
        return parts

    def keep_jit(function, **kwargs):
        result = jit(function, **kwargs)
        if function.__name__ == "eval_step":
            jitted.append(result)
        return result

    monkeypatch.setattr(loop, "make_parts", keep_parts)
    monkeypatch.setattr(loop.jax, "jit", keep_jit)
    config = tiny_config(text, "train.steps=25", "eval.every_steps=10")
    rows = load_data(config.config)
    assert len(rows.validation_rows) % config.config.eval.batch_size
    assert len(rows.train_rows) < 25 * config.config.train.batch_size
    train_and_evaluate(config, tmp_path)
    assert [function._cache_size() for function in jitted] == [1, 1]


@pytest.mark.slow
def test_accumulated_run_equals_the_big_batch(text, tmp_path, trained, tiny_config):
    _, figures = trained
    config = tiny_config(text, "train.steps=12", "train.accumulation_steps=2")
    accumulated = train_and_evaluate(config, tmp_path)
    assert accumulated["validation_loss"] == pytest.approx(figures["validation_loss"], rel=1e-4)


def test_tensorboard_files_are_written_where_asked(text, tmp_path, tiny_config):
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    train_and_evaluate(tiny_config(text, "train.steps=2", "log.tensorboard=true"), tmp_path)
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
def test_generated_text_continues_its_prompts_one_a_line(trained):
    workdir, _ = trained
    settings = {"max_new_tokens": 6, "temperature": 0.0}
    single = "".join(generate_from_run(workdir, ["be"], **settings))
    assert single.startswith("be")
    assert single.endswith("\n")
    several = "".join(generate_from_run(workdir, ["alpha gam", "be"], **settings)).splitlines()
    assert several[1] == single[:-1].replace("\n", "\\n")
    assert several[0].startswith("alpha gam")
    samples = "".join(generate_from_run(workdir, ["be"], max_new_tokens=6, num_samples=3, seed=1)).splitlines()
    assert len(samples) == 3
    assert len(set(samples)) > 1
    assert samples == "".join(generate_from_run(workdir, ["be"], max_new_tokens=6, num_samples=3, seed=1)).splitlines()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"max_new_tokens": 40}, "40"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**63}, "seed is 9223372036854775808, must be in"),
        ({"step": "7"}, "step must be latest, best or one of"),
    ],
)
def test_wrong_generation_settings_are_refused(trained, settings, message):
    workdir, _ = trained
    with pytest.raises(ValueError, match=message):
        list(generate_from_run(workdir, ["be"], **settings))


@pytest.mark.slow
def test_samples_of_a_model_with_spare_ids_keep_to_the_tokenizer(text, tmp_path, monkeypatch, tiny_config):
    """With 5000 ids for 259 tokens, unlimited draws of a hardly trained model would nearly all be beyond these."""
    order = []

    def noting(name, function):
        return lambda *args, **options: (order.append(name), function(*args, **options))[1]

    monkeypatch.setattr(loop, "draw_sample", noting("sample", loop.draw_sample))
    monkeypatch.setattr(loop.Checkpoints, "save", noting("save", loop.Checkpoints.save))
    sizes = ("model.vocab_size=5000", "sample.max_new_tokens=9", "sample.temperature=1.0")
    train_and_evaluate(tiny_config(text, "train.steps=1", *sizes), tmp_path)
    assert records(tmp_path, "sample")[0]["text"].startswith("be")
    assert "".join(generate_from_run(tmp_path, ["be"], max_new_tokens=9)).startswith("be")
    assert order == ["save", "sample"], "a sample that fails must not cost the step"


def test_model_of_a_run_is_made_from_its_stored_config(trained):
    workdir, _ = trained
    config = read_run(workdir)
    assert make_model(config).config.vocab_size == 259
    assert isinstance(read_config(workdir / "config.json")[0], RunConfig)
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_run(workdir.parent)
    assert load_config("language_model").config.model.vocab_size is None
