"""Learning-rate schedules: values at and around every boundary, against the formulas written out."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.decays import Phase, step_decay
from jaxformer.training.schedules import SCHEDULES, make_schedule


def test_warmup_is_linear_from_zero_and_holds_the_peak():
    schedule = make_schedule("constant", learning_rate=1e-3, warmup_steps=10)
    assert [float(schedule(step)) for step in (0, 5, 10, 11, 999)] == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_cosine_follows_its_formula(warmup_steps):
    peak, end, fraction = 3e-2, 19, 0.2
    schedule = make_schedule(
        "cosine", learning_rate=peak, warmup_steps=warmup_steps, decay_steps=end, final_fraction=fraction
    )
    for step in range(end + 5):
        if step < warmup_steps:
            expected = peak * step / warmup_steps
        else:
            progress = min((step - warmup_steps) / (end - warmup_steps), 1.0)
            expected = peak * (fraction + (1 - fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5), step


def test_linear_reaches_the_final_rate_at_decay_steps_and_holds_it():
    schedule = make_schedule("linear", learning_rate=2.0, warmup_steps=3, decay_steps=11, final_fraction=0.25)
    values = [float(schedule(step)) for step in (2, 3, 4, 7, 10, 11, 12, 500)]
    assert values == pytest.approx([4 / 3, 2.0, 1.8125, 1.25, 0.6875, 0.5, 0.5, 0.5])


def test_the_paper_s_schedule_is_its_equation():
    """Vaswani et al. 2017, equation 3 and section 5.3: base and big with 4,000 steps of warm-up."""
    for width, peak in ((512, 6.98771e-4), (1024, 4.94106e-4)):
        schedule = make_schedule("inverse_sqrt", learning_rate=1.0, warmup_steps=4000, embed_dim=width)
        assert float(schedule(4000)) == pytest.approx(peak, rel=1e-5)
        for step in (1, 17, 3999, 4001, 100_000):
            expected = width**-0.5 * min(step**-0.5, step * 4000**-1.5)
            assert float(schedule(step)) == pytest.approx(expected, rel=1e-5, abs=1e-10), step
        assert float(schedule(0)) == 0.0


def test_inverse_square_root_without_a_width_reaches_the_rate_that_was_given():
    schedule = make_schedule("inverse_sqrt", learning_rate=2e-3, warmup_steps=100, decay_steps=7)
    values = [float(schedule(step)) for step in (0, 50, 100, 400, 10_000)]
    assert values == pytest.approx([0.0, 1e-3, 2e-3, 1e-3, 2e-4])


def values(steps, name, **fields):
    schedule = jax.jit(jax.vmap(make_schedule(name, **fields)))
    return np.asarray(schedule(jnp.asarray(steps, jnp.int32)), np.float64).tolist()


def test_polynomial_follows_its_formula_and_is_linear_at_power_1():
    fields = {"learning_rate": 0.8, "warmup_steps": 3, "decay_steps": 11, "final_fraction": 0.25}
    assert values((2, 3, 5, 10, 11, 12), "polynomial", power=3.0, **fields) == pytest.approx(
        [0.8 * 2 / 3, 0.8, 0.2 + 0.6 * 0.75**3, 0.2 + 0.6 * 0.125**3, 0.2, 0.2]
    )
    assert values(range(14), "polynomial", power=1.0, **fields) == pytest.approx(values(range(14), "linear", **fields))
    assert values((7,), "polynomial", **fields) == pytest.approx([0.2 + 0.6 * 0.5**2])


def test_inverse_time_is_one_over_t_by_itself():
    by_itself = values((0, 2, 4, 5, 8, 400), "inverse_time", learning_rate=2.0, warmup_steps=4)
    assert by_itself == pytest.approx([0.0, 1.0, 2.0, 2.0 * 4 / 5, 1.0, 0.02])
    assert values((0, 1, 9), "inverse_time", learning_rate=1.0) == pytest.approx([1.0, 1 / 2, 1 / 10])
    fields = {"decay_rate": 0.5, "transition_steps": 10, "warmup_steps": 2}
    assert values((1, 2, 12, 42), "inverse_time", learning_rate=1.0, **fields) == pytest.approx(
        [0.5, 1, 1 / 1.5, 1 / 3]
    )


def test_exponential_falls_by_its_rate_or_to_the_final_one():
    fields = {"learning_rate": 1.0, "warmup_steps": 2, "decay_rate": 0.25, "transition_steps": 4}
    assert values((1, 2, 4, 6, 10), "exponential", **fields) == pytest.approx([0.5, 1.0, 0.5, 0.25, 0.0625])
    assert values((6, 10, 99), "exponential", final_fraction=0.1, **fields) == pytest.approx([0.25, 0.1, 0.1])
    fields = {"learning_rate": 3.0, "warmup_steps": 2, "decay_steps": 10}
    halved = values((2, 6, 9, 10, 11, 99), "exponential", final_fraction=0.16, **fields)
    assert halved == pytest.approx([3.0, 1.2, 3 * 0.16 ** (7 / 8), 0.48, 0.48, 0.48])
    assert values((2, 10), "exponential", **fields) == pytest.approx([3.0, 0.03])


def test_steps_are_taken_at_the_boundaries():
    fields = {"learning_rate": 1.0, "warmup_steps": 4, "boundaries": (6, 9), "factors": (0.5, 0.1)}
    assert values((2, 4, 5, 6, 8, 9, 99), "step", **fields) == pytest.approx([0.5, 1, 1, 0.5, 0.5, 0.05, 0.05])
    fields = {"learning_rate": 1.0, "decay_steps": 64}
    assert values((31, 32, 47, 48, 70), "step", **fields) == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])
    assert values((0, 99), "step", learning_rate=1.0, boundaries=()) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("form", "at"),
    [
        ("1-sqrt", lambda x: 1 - math.sqrt(x)),
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: math.cos(x * math.pi / 2) ** 2),
    ],
)
def test_warmup_stable_decay_holds_and_then_falls(form, at):
    fields = {"learning_rate": 2.0, "warmup_steps": 3, "decay_steps": 20, "final_fraction": 0.1}
    found = values(range(25), "warmup_stable_decay", cooldown_steps=8, cooldown_form=form, **fields)
    expected = [2 * step / 3 for step in range(3)] + [2.0] * 10
    expected += [2 * (0.1 + 0.9 * at(step / 8)) for step in range(1, 9)] + [0.2] * 4
    assert found == pytest.approx(expected, abs=1e-6)


def test_phases_of_no_length():
    fields = {"learning_rate": 1.0, "warmup_steps": 2, "decay_steps": 10, "final_fraction": 0.5}
    at_once = values((1, 2, 9, 10, 11), "warmup_stable_decay", cooldown_steps=0, **fields)
    assert at_once == [0.5, 1.0, 1.0, 0.5, 0.5]
    never_stable = values(range(13), "warmup_stable_decay", cooldown_steps=8, cooldown_form="linear", **fields)
    assert never_stable == pytest.approx(values(range(13), "linear", **fields))
    short = {name: make_schedule(name, learning_rate=1.0, warmup_steps=4, decay_steps=5) for name in SCHEDULES}
    rates = jax.jit(lambda: {name: schedule(4) for name, schedule in short.items()})()
    assert {name: float(rate) for name, rate in rates.items()} == dict.fromkeys(SCHEDULES, 1.0)


def test_cosine_restarts_come_at_whole_steps_and_grow():
    def wave(step, length):
        return 0.5 * (1 + math.cos(math.pi * step / length))

    fields = {"learning_rate": 1.0, "warmup_steps": 2, "cycle_steps": 3, "cycle_growth": 2, "peak_decay": 0.5}
    found = values((1, 2, 4, 5, 7, 10, 11, 12), "cosine_restarts", **fields)
    first, second = [1.0, wave(2, 3)], [0.5, 0.5 * wave(2, 6), 0.5 * wave(5, 6)]
    assert found == pytest.approx([0.5, *first, *second, 0.25, 0.25 * wave(1, 12)])
    even = values(range(12), "cosine_restarts", learning_rate=1.0, cycle_steps=3, cycle_growth=1, final_fraction=0.2)
    assert even == pytest.approx([0.2 + 0.8 * wave(step, 3) for step in range(3)] * 4)
    three = values((0, 10, 30, 69, 70), "cosine_restarts", learning_rate=1.0, decay_steps=70)
    assert three == pytest.approx([1, 1, 1, wave(39, 40), 1], abs=1e-6)
    # The table of starts ends with the last int32, to the step.
    far = values(
        (3 * (2**29 - 1), 3 * (2**29 - 1) - 1), "cosine_restarts", **fields | {"warmup_steps": 0, "peak_decay": 1.0}
    )
    assert far[0] == 1.0
    assert far[1] < 1e-6


NUMBERS = {
    "cosine_restarts": {"peak_decay": 0.75},
    "exponential": {"decay_rate": 0.75},
    "inverse_time": {"decay_rate": 0.75},
    "polynomial": {"power": 0.75},
}


def rates_and_peaks(numbers):
    """Of every schedule, in one program."""
    schedules = {name: make_schedule(name, warmup_steps=2, decay_steps=9, **own) for name, own in numbers.items()}
    return {name: (jax.vmap(schedule)(jnp.arange(12)), schedule.peak) for name, schedule in schedules.items()}


def test_numbers_may_be_traced_and_differ_under_vmap():
    numbers = {name: {"learning_rate": 0.5, "final_fraction": 0.125, **NUMBERS.get(name, {})} for name in SCHEDULES}
    several = jax.tree.map(lambda number: jnp.asarray([number, number / 2], jnp.float32), numbers)
    found = jax.jit(jax.vmap(rates_and_peaks))(several)
    halved = jax.tree.map(lambda number: number / 2, numbers)
    for name, (rates, peak) in jax.jit(lambda: rates_and_peaks(halved))().items():
        np.testing.assert_allclose(found[name][0][1], rates, rtol=5e-6, atol=1e-8, err_msg=name)
        assert found[name][1].tolist() == [0.5, 0.25] == [2 * peak, peak]


def test_peak_is_the_highest_rate():
    schedules = {name: make_schedule(name, learning_rate=0.5, warmup_steps=4, decay_steps=9) for name in SCHEDULES}
    rates = jax.jit(lambda: {name: jax.vmap(schedule)(jnp.arange(12)) for name, schedule in schedules.items()})()
    assert {name: float(values.max()) for name, values in rates.items()} == dict.fromkeys(SCHEDULES, 0.5)
    assert {schedule.peak for schedule in schedules.values()} == {0.5}
    schedule = make_schedule("inverse_sqrt", learning_rate=1.0, warmup_steps=4, embed_dim=16)
    assert float(schedule(4)) == schedule.peak == 0.125


def test_last_change_is_where_the_final_rate_begins():
    fields = {"learning_rate": 1.0, "warmup_steps": 2, "decay_steps": 30, "final_fraction": 0.1}
    found = {name: make_schedule(name, **fields).last_change for name in SCHEDULES}
    endless = {"constant", "cosine_restarts", "inverse_sqrt", "inverse_time"}
    assert {name for name, step in found.items() if step is None} == endless
    assert found.pop("step") == 23
    assert {step for name, step in found.items() if name not in endless} == {30}


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"inverse_sqrt"}))
def test_no_warmup_starts_at_the_full_rate(name):
    assert float(make_schedule(name, learning_rate=0.5, decay_steps=5)(0)) == 0.5


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_value_is_a_strong_float32_scalar_under_jit(name):
    value = jax.jit(make_schedule(name, learning_rate=1.0, warmup_steps=2, decay_steps=5))(jnp.int32(3))
    assert value.dtype == jnp.float32
    assert value.shape == ()
    assert not value.weak_type


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"name": "cosin"}, "schedule name is 'cosin'"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5"),
        ({"decay_steps": 4}, "decay_steps is 4, must be above warmup_steps=4"),
        ({"decay_steps": None}, "decay_steps is None"),
        ({"power": 2.0}, "power is 2.0, must be None for schedule 'cosine', which has no fields of its own"),
        ({"name": "step", "cycle_steps": 3}, "cycle_steps is 3, must be None.*which has boundaries, factors"),
        ({"name": "polynomial", "power": 0.0}, "power is 0.0, must be above 0"),
        (
            {"name": "exponential", "decay_rate": 1.5},
            "decay_rate of 'exponential' is 1.5, must be above 0",
        ),
        ({"name": "exponential", "transition_steps": 5}, "transition_steps is 5, must be None where decay_rate is"),
        ({"name": "inverse_time", "transition_steps": 0}, "transition_steps is 0, must be at least 1"),
        ({"name": "step", "boundaries": (4, 6)}, r"boundaries are \(4, 6\), must ascend from above warmup_steps=4"),
        ({"name": "step", "boundaries": (7, 6)}, "must ascend"),
        ({"name": "step", "boundaries": (6,), "factors": (0.1, 0.1)}, r"factors are \(0.1, 0.1\), must be as many as"),
        ({"name": "warmup_stable_decay", "cooldown_steps": 6}, "cooldown_steps is 6, must be at least 0 and at most 5"),
        ({"name": "warmup_stable_decay", "cooldown_form": "sqrt"}, "cooldown_form is 'sqrt'"),
        ({"name": "cosine_restarts", "cycle_steps": 0}, "cycle_steps is 0, must be at least 1"),
        ({"name": "cosine_restarts", "cycle_growth": 0}, "cycle_growth is 0, must be at least 1"),
        ({"name": "cosine_restarts", "peak_decay": 1.5}, "peak_decay is 1.5, must be above 0.0 and at most 1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0, must be at least 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf, must be .* at most 3.4"),
        ({"embed_dim": 8}, "embed_dim is 8, must be at least 1 for 'inverse_sqrt' and None for 'cosine'"),
        ({"name": "inverse_sqrt", "embed_dim": 0}, "embed_dim is 0"),
        ({"name": "inverse_sqrt", "warmup_steps": 0}, "warmup_steps is 0, must be at least 1 for 'inverse_sqrt'"),
    ],
)
def test_bad_values_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**({"name": "cosine", "learning_rate": 1.0, "warmup_steps": 4, "decay_steps": 9} | bad))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"boundaries": ("a", "b")}, r"boundaries are \('a', 'b'\), must be whole numbers"),
        ({"boundaries": (6.5,)}, r"boundaries are \(6.5,\), must be whole numbers"),
        ({"boundaries": (6,), "factors": ("x",)}, "factors has one that is 'x', must be a number"),
        ({"boundaries": (6,), "factors": (0.0,)}, "factors has one that is 0.0, must be above 0"),
    ],
)
def test_boundaries_and_factors_of_other_types_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(step_decay)(Phase("step", 1.0, 4, 9, 0.0), **bad)  # without the tests' check of types
