import io
import json
import subprocess
import sys
import time

import pytest

from jaxformer.attention import ATTENTION
from jaxformer.cli import main
from jaxformer.cli.generate import _read_prompts
from jaxformer.cli.parsing import UsageError, expand_flagfiles, split_overrides


def run(*arguments):
    """A command in a process of its own: (stdout, stderr, exit status)."""
    result = subprocess.run(
        [sys.executable, "-m", "jaxformer", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    return result.stdout, result.stderr, result.returncode


def call(capsys, *arguments):
    """A command in this process: (stdout, stderr, exit status)."""
    status = main([str(argument) for argument in arguments])
    return (*capsys.readouterr(), status)


def test_help_is_quick_and_loads_no_jax():
    began = time.monotonic()
    code = "import sys; from jaxformer.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    loaded = "print([name for name in ('jax', 'flax', 'orbax', 'grain', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code + loaded], capture_output=True, text=True, check=True)
    assert "train a model" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 10


def test_list_names_what_a_config_may_name_with_a_line_each():
    stdout, _, status = run("list")
    assert status == 0
    lines = stdout.splitlines()
    for title in ("experiments", "attentions", "models", "datasets", "pairs", "objectives", "optimizers", "schedules"):
        assert f"{title}:" in lines
    entries = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    assert {"language_model", "dense", "gpt", "python_stdlib", "adamw", "cosine"} <= set(entries)
    assert all(len(summary) > 10 for summary in entries.values())
    for name, kind in ATTENTION.items():
        place = next(place for place, line in enumerate(lines) if line.split()[:1] == [name])
        assert kind.paper.rpartition(", ")[2] in lines[place]
        causal, decodes = "" if kind.causal else "never ", "decodes" if kind.decodes else "no decoding"
        assert lines[place + 1].split() == f"{causal}causal {decodes} {kind.cost}".split()


def test_train_prints_one_json_line_and_nothing_else_on_stdout(tiny_flags, tmp_path, capsys):
    stdout, stderr, status = call(
        capsys, "train", *tiny_flags, f"--workdir={tmp_path}", "--config.train.steps=2", "--config.data.prefetch", "1"
    )
    assert status == 0
    (line,) = stdout.splitlines()
    figures = json.loads(line)
    assert {"status", "step", "train_loss", "validation_loss", "perplexity", "bits_per_byte"} <= set(figures)
    assert (figures["status"], figures["step"]) == ("completed", 2)
    assert "step 2/2  loss" in stderr
    assert "weight decay (" in stderr
    assert "unigram entropy" in stderr


def test_flag_file_equals_the_command_line(tiny_flags, trained, tmp_path, capsys):
    _, expected = trained
    more = ["# the run of the other tests", "", "--config.train.steps=12", f"--workdir={tmp_path / 'run'}"]
    (tmp_path / "flags").write_text("\n".join(["train", *tiny_flags, *more]))
    stdout, _, status = call(capsys, f"--flagfile={tmp_path / 'flags'}")
    assert status == 0
    assert json.loads(stdout)["validation_loss"] == expected["validation_loss"]


def test_eval_prints_the_figures_of_the_run(trained, capsys):
    workdir, figures = trained
    stdout, _, status = call(capsys, "eval", f"--workdir={workdir}")
    assert status == 0
    assert json.loads(stdout)["loss"] == pytest.approx(figures["validation_loss"], rel=1e-6)


@pytest.mark.slow
def test_generate_writes_nothing_but_text_on_stdout(trained):
    workdir, _ = trained
    flags = ("--max_new_tokens=5", "--temperature=0")
    stdout, _, status = run("generate", f"--workdir={workdir}", "--prompt=be", *flags)
    assert status == 0
    assert stdout.startswith("be")
    again, _, _ = run("generate", f"--workdir={workdir}", "--prompt=be", *flags)
    assert again == stdout


def test_generate_continues_the_lines_of_standard_input(trained, capsys, monkeypatch):
    workdir, _ = trained
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"alpha gam\nbe\n")))
    stdout, _, status = call(capsys, "generate", f"--workdir={workdir}", "--prompt_file=-", "--max_new_tokens=5")
    assert status == 0
    first, second = stdout.splitlines()
    assert first.startswith("alpha gam")
    assert second.startswith("be")


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\n\n", ["one", ""]),
        (b"\n", [""]),
        ("\ufeffone\n".encode(), ["one"]),
        ("a\fb\vc\rd\x85e\u2028f\x1cg\n".encode(), ["a\fb\vc\rd\x85e\u2028f\x1cg"]),
    ],
)
def test_prompt_files_are_split_at_line_feeds_alone(tmp_path, content, prompts):
    (tmp_path / "prompts").write_bytes(content)
    assert _read_prompts(str(tmp_path / "prompts")) == prompts


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"caf\xe9\n", "is not UTF-8: .* at byte 3")])
def test_unusable_prompt_files_are_named(tmp_path, content, message):
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(ValueError, match=f"prompt file {tmp_path}/prompts {message}"):
        _read_prompts(str(tmp_path / "prompts"))


@pytest.mark.slow
def test_tokenizer_is_trained_and_used(text, tiny_flags, tmp_path, capsys):
    output = tmp_path / "tokenizer.json"
    arguments = ("--kind=bpe", "--vocab_size=270", f"--input={text}/*.txt", f"--output={output}")
    stdout, _, status = call(capsys, "tokenizer", "train", *arguments)
    assert status == 0
    vocab_size = json.loads(stdout)["vocab_size"]
    assert vocab_size <= 270
    workdir = tmp_path / "run"
    flags = (f"--workdir={workdir}", "--config.train.steps=2", f"--config.data.tokenizer={output}")
    assert call(capsys, "train", *tiny_flags, *flags)[2] == 0
    assert json.loads((workdir / "config.json").read_text())["resolved"]["model.vocab_size"] == vocab_size
    output.unlink()
    assert call(capsys, "train", f"--workdir={workdir}", "--config.train.steps=3")[2] == 0
    assert call(capsys, "eval", f"--workdir={workdir}")[2] == 0
    assert call(capsys, "generate", f"--workdir={workdir}", "--prompt=be", "--max_new_tokens=3")[0].startswith("be")


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        ((), "the following arguments are required: command", 2),
        (("trian",), "invalid choice: 'trian'", 2),
        (("train", "--config=language_model"), "train needs --workdir", 2),
        (("train", "--config=language_model", "--wordir=x"), "no argument --wordir=x; did you mean --workdir", 2),
        (("train", "--config=langage_model", "--workdir={tmp}/run"), "did you mean language_model", 2),
        (
            ("train", "--config=language_model:size=tinny", "--workdir={tmp}/run"),
            "size must be one of small, tiny, base",
            2,
        ),
        (("train", "--config=none.py", "--workdir={tmp}/run"), "config file none.py does not exist", 2),
        (("train", "--workdir={tmp}/run"), "holds no run to go on with: begin one with --config", 2),
        (("train", "{flags}", "--workdir={tmp}/run", "--config.train.step=3"), "did you mean train.steps", 2),
        (
            ("train", "{flags}", "--workdir={tmp}/run", "--config.train.steps=2.5"),
            "must be a whole number, got '2.5'",
            2,
        ),
        (("train", "{flags}", "--workdir={tmp}/run", "--config.model.num_heads=3"), "num_heads", 1),
        (
            ("train", "{flags}", "--workdir={tmp}/run", "--config.optimizer.no_decay=("),
            "no_decay pattern '(' is not a regular expression",
            2,
        ),
        (("train", "{flags}", "--workdir={tmp}/file"), "cannot be used", 1),
        (("eval", "--workdir={tmp}/run"), "is not a run directory", 2),
        (("eval", "--workdir={trained}", "--config.model.num_layers=3"), "eval may change data", 2),
        (("eval", "--workdir={trained}", "--config.data.path=nowhere.txt"), "nowhere.txt", 1),
        (("eval", "--workdir={trained}", "--step=3"), "step must be latest, best or one of", 1),
        (("generate", "--workdir={trained}"), "one of the arguments --prompt --prompt_file is required", 2),
        (("generate", "--workdir={trained}", "--prompt=a", "--temperature=hot"), "invalid float value: 'hot'", 2),
        (("generate", "--workdir={trained}", "--prompt=a", "--temperature=-1"), "temperature", 1),
        (("generate", "--workdir={trained}", "--prompt=a", f"--seed={10**23}"), "must be in [-2^63, 2^63)", 1),
        (("generate", "--workdir={trained}", "--prompt=a", "--config.seed=3"), "generate takes no config", 2),
        (("generate", "--workdir={trained}", "--prompt_file={tmp}/none"), "none", 1),
        (("--flagfile={tmp}/none", "list"), "flag file {tmp}/none cannot be read", 2),
    ],
)
def test_wrong_input_ends_with_one_sentence(trained, tiny_flags, tmp_path, capsys, arguments, message, status):
    (tmp_path / "file").write_text("")
    expanded = []
    for argument in arguments:
        argument = argument.format(tmp=tmp_path, trained=trained[0], flags="{flags}")
        expanded += tiny_flags if argument == "{flags}" else [argument]
    stdout, stderr, found = call(capsys, *expanded)
    assert stdout == ""
    assert message.format(tmp=tmp_path) in stderr.splitlines()[-1]
    assert stderr.splitlines()[-1].startswith("jaxformer: error: ")
    assert "Traceback" not in stderr
    assert found == status


def test_traceback_is_shown_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="is not a run directory"):
        main(["eval", f"--workdir={tmp_path}"])


def test_overrides_are_split_from_the_other_flags():
    arguments = ["train", "--config=f", "--config.a.b=3", "--config.c", "4", "--config.d", "--workdir=w", "--config.e"]
    assert split_overrides(arguments) == (["train", "--config=f", "--workdir=w"], ["a.b=3", "c=4", "d", "e"])
    assert split_overrides(["--config.a=", "--config.b=x=y z"])[1] == ["a=", "b=x=y z"]


def test_flag_files_may_name_each_other_but_not_in_a_circle(tmp_path):
    (tmp_path / "a").write_text(f"--x=1\n// a comment\n--flagfile={tmp_path}/b\n--config.names=('p', \"q\")\n")
    (tmp_path / "b").write_text("--y=a b\n")
    assert expand_flagfiles([f"--flagfile={tmp_path}/a", "--z"]) == [
        "--x=1",
        "--y=a b",
        "--config.names=('p', \"q\")",
        "--z",
    ]
    (tmp_path / "b").write_text(f"--flagfile={tmp_path}/a\n")
    with pytest.raises(UsageError, match="nested"):
        expand_flagfiles(["--flagfile", str(tmp_path / "a")])
