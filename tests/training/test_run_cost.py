"""What a config costs: figures, table and command."""

import json

import pytest

from jaxformer.analysis.roofline import DEVICES, roofline
from jaxformer.cli import main
from jaxformer.training.cost_table import columns, cost_table, short
from jaxformer.training.run_cost import run_cost, run_figures


def call(capsys, *arguments):
    status = main(["cost", *arguments])
    return (*capsys.readouterr(), status)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "", "0"),
        (7, "B", "7 B"),
        (999.6, "", "1.00 k"),
        (124_439_808, "", "124 M"),
        (1.5e12, "B", "1.50 TB"),
        (0.00142, "s", "1.42 ms"),
        (25e-6, "s", "25.0 µs"),
        (float("inf"), "s", "inf s"),
    ],
)
def test_numbers_have_three_figures_and_a_prefix(number, unit, text):
    assert short(number, unit) == text


def test_columns_stand_below_each_other():
    assert columns([["a", "bcd"], ["efg", "h"]]) == "a    bcd\nefg    h"


@pytest.fixture(scope="module")
def cost(text, tiny_config):
    return run_cost(tiny_config(text, "train.accumulation_steps=2"))


def test_figures_are_complete(cost):
    figures = json.loads(json.dumps(run_figures(cost, roofline(cost.model, DEVICES["h100"]))))
    assert set(figures["phases"]) == {"forward", "backward", "prefill", "decode"}
    assert (figures["batch_size"], figures["length"], figures["accumulation_steps"]) == (2, 23, 2)
    parameters = sum(figures["parameters"].values())
    assert figures["parameter_bytes"] == figures["gradient_bytes"] == 4 * parameters
    # AdamW's two moments, and counters.
    assert 0 <= figures["optimizer_bytes"] - 8 * parameters < 100
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "state_bytes")
    kept = sum(figures[name] for name in parts) + sum(figures["activation_bytes"].values())
    assert figures["training_bytes"] == kept
    assert figures["roofline"]["decode"]["bound"] == "memory"
    assert figures["temporary_bytes"] is None


def test_the_table_has_parts_memory_and_times(cost):
    lines = cost_table(cost, "a machine", roofline(cost.model, DEVICES["a100"])).splitlines()
    assert lines[0].startswith("gpt: ")
    assert lines[1] == "2 rows of 23 tokens at a time, 2 times an update"
    starts = ("embedding", "attention projections", "feed-forward", "head", "all", "memory of training", "decode")
    for name in (*starts, "least time on a machine"):
        assert any(line.startswith(name) for line in lines), name


@pytest.mark.slow
def test_the_command_prints_json_or_a_table(tiny_flags, capsys):
    stdout, _, status = call(capsys, *tiny_flags, "--device=h100", "--json")
    assert status == 0
    assert json.loads(stdout)["model"] == "gpt"
    stdout, _, status = call(capsys, *tiny_flags, "--peak_flops=1e12", "--bandwidth=1e11", "--compiled")
    assert status == 0
    assert "temporaries of training, as compiled here" in stdout
    assert "least time on such a device" in stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device=abacus"], "device is 'abacus'; it must be one of a100"),
        (["--device=h100", "--bandwidth=1"], "peak_flops and bandwidth must then be left out"),
        (["--peak_flops=1"], "both must be given, or neither"),
        (["--device=h100", "--config.model.num_heads=0"], "num_heads=0 must be an integer of at least 1"),
    ],
)
def test_wrong_flags_end_with_a_sentence(tiny_flags, capsys, flags, message):
    stdout, stderr, status = call(capsys, *tiny_flags, *flags)
    assert status in (1, 2)
    assert stdout == ""
    assert message in stderr
