"""The roofline by hand, and what it says of decoding."""

import dataclasses

import pytest

from jaxformer.analysis.costs.work import Work
from jaxformer.analysis.model_cost import ModelCost
from jaxformer.analysis.roofline import DEVICES, Device, roofline

PHASES = {"decode": {"head": Work(600, moved_bytes=10), "attention": Work(100, moved_bytes=90)}}
COST = ModelCost("float32", {"decode": 1}, {}, 0, {}, 0, PHASES, {}, None, None, None)


def test_each_part_takes_the_longer_of_arithmetic_and_memory():
    bound = roofline(COST, Device({"float32": 100.0}, bandwidth=10.0))["decode"]
    assert (bound.parts["head"].seconds, bound.parts["head"].bound) == (6.0, "compute")
    assert (bound.parts["attention"].seconds, bound.parts["attention"].bound) == (9.0, "memory")
    assert (bound.seconds, bound.compute_seconds, bound.bound) == (15.0, 6.0, "memory")


def test_a_faster_memory_moves_the_bound():
    bound = roofline(COST, Device({"float32": 100.0}, bandwidth=90.0))["decode"]
    assert (bound.seconds, bound.bound) == (7.0, "compute")


def test_devices_have_figures_in_their_order():
    for name, device in DEVICES.items():
        assert device.source, name
        assert device.peak_operations["float16"] >= device.peak_operations["float32"] > device.bandwidth > 1e11
    assert DEVICES["h200"].bandwidth > DEVICES["h100"].bandwidth > DEVICES["a100"].bandwidth


def test_what_has_no_figure_is_refused():
    with pytest.raises(ValueError, match=r"no peak of bfloat16, the model's dtype; it must be one of float16, float32"):
        roofline(dataclasses.replace(COST, dtype="bfloat16"), DEVICES["t4"])
    with pytest.raises(ValueError, match=r"no peak of float64, the model's dtype; it must be one of float32"):
        roofline(dataclasses.replace(COST, dtype="float64"), Device({"float32": 1.0}, 1.0))
    with pytest.raises(ValueError, match=r"bandwidth is 0\.0; it must be a positive number"):
        roofline(COST, Device({"float32": 1.0}, 0.0))
