"""Plots: what is drawn, read back from the figures."""

import numpy as np
import pytest

from jaxformer.analysis import plots
from jaxformer.analysis.cost import attention_cost
from jaxformer.attention import patterns

pytest.importorskip("matplotlib", reason="plots need matplotlib (extra plots)")

RUN = [
    {"step": 1, "split": "train", "loss": 4.0, "learning_rate": 0.1},
    {"step": 2, "split": "train", "loss": 2.0, "learning_rate": 0.2},
    {"step": 2, "split": "validation", "loss": 3.0, "perplexity": 20.0},
    {"step": 3, "split": "train", "loss": None, "learning_rate": 0.3},
    {"step": 3, "split": "sample", "text": "abc"},
]


def lines(panel):
    return {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}


def test_metrics_have_a_panel_each_and_a_line_for_each_split():
    loss, rate = plots.plot_metrics({"a": RUN}).axes
    assert (loss.get_title(), rate.get_title()) == ("loss", "learning rate")
    assert lines(loss) == {"train": [[1, 4.0], [2, 2.0]], "validation": [[2, 3.0]]}
    assert lines(rate) == {"train": [[1, 0.1], [2, 0.2], [3, 0.3]]}


def test_several_runs_are_told_apart_by_label_and_colour():
    (panel,) = plots.plot_metrics({"a": RUN, "b": RUN[:2]}, ["loss"]).axes
    assert set(lines(panel)) == {"a train", "a validation", "b train"}
    colours = {line.get_label(): line.get_color() for line in panel.get_lines()}
    assert colours["a train"] == colours["a validation"] != colours["b train"]


def test_smoothing_averages_with_the_records_before():
    loss, rate = plots.plot_metrics({"a": RUN}, ["loss", "learning_rate"], smoothing=2).axes
    assert lines(loss)["train"] == [[1, 4.0], [2, 3.0]]
    assert lines(rate)["train"] == [[1, 0.1], [2, 0.2], [3, 0.3]]


def test_schedules_are_computed_at_steps():
    (panel,) = plots.plot_schedules({"half": lambda step: step / 2}, 5).axes
    assert lines(panel) == {"half": [[0, 0.0], [1, 0.5], [2, 1.0], [3, 1.5], [4, 2.0]]}


def test_patterns_are_their_masks():
    pattern = patterns.local(2) | patterns.global_tokens((0,))
    weights = np.eye(7)[:3]
    first, second, *rest = plots.plot_patterns({"a": pattern, "b": weights}, 11, causal=True).axes
    assert np.array_equal(first.get_images()[0].get_array(), np.tril(pattern.mask(11)))
    assert np.array_equal(second.get_images()[0].get_array(), weights)
    assert not rest


def test_costs_are_those_of_the_formula_and_kinds_without_any_are_left_out():
    kinds = {"all": ("dense", {}), "near": ("local", {"window": 7}), "slots": ("linformer", {"rank": 8})}
    (panel,) = plots.plot_costs(kinds, [64, 256], "cache_bytes", num_heads=2, head_dim=8).axes
    drawn = lines(panel)
    assert set(drawn) == {"all", "near"}
    expected = [[length, attention_cost("dense", 1, length, 2, 8).cache_bytes] for length in (64, 256)]
    assert drawn["all"] == expected
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


def test_a_gap_stays_a_gap():
    (panel,) = plots.plot_curves({"a": [1.0, None, 4.0]}, [1, 2, 3], xlabel="x", ylabel="y").axes
    assert np.isnan(lines(panel)["a"][1][1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plot_metrics({}), "runs is empty"),
        (lambda: plots.plot_metrics({"a": []}), "run 'a' has no figures to plot"),
        (lambda: plots.plot_metrics({"a": RUN}, ["los"]), "metrics has 'los', which no run has; it must be among"),
        (lambda: plots.plot_metrics({"a": RUN}, smoothing=0), "smoothing is 0"),
        (lambda: plots.plot_schedules({"a": float}, 1), "num_steps is 1"),
        (lambda: plots.plot_patterns({"a": np.zeros(3)}), r"pattern 'a' has shape \(3,\)"),
        (lambda: plots.plot_costs({"a": ("dense", {})}, [8], "price"), "quantity is 'price'; it must be one of"),
        (lambda: plots.plot_curves({"a": [1.0]}, [1, 2], xlabel="", ylabel=""), "curve 'a' has 1 values"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
