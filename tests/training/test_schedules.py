"""Learning-rate schedules: values at and around every boundary, against the formulas written out."""

import math

import jax
import jax.numpy as jnp
import pytest

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
        ({"embed_dim": 8}, "embed_dim is 8, must be at least 1 for 'inverse_sqrt' and None for 'cosine'"),
        ({"name": "inverse_sqrt", "embed_dim": 0}, "embed_dim is 0"),
        ({"name": "inverse_sqrt", "warmup_steps": 0}, "warmup_steps is 0, must be at least 1 for 'inverse_sqrt'"),
    ],
)
def test_bad_values_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**({"name": "cosine", "learning_rate": 1.0, "warmup_steps": 4, "decay_steps": 9} | bad))
