"""The demonstration of norms in padded batches: its figures by a loop, and the directions that it is there to show."""

import jax
import numpy as np
import pytest

from jaxformer.analysis import compare_norms, format_figures, vary_lengths


def test_figures_are_those_of_a_loop_over_batches():
    draw = np.random.default_rng(0)
    masks = np.arange(5)[None, None] < draw.integers(1, 6, (4, 3, 1))
    batches, probe = np.float32(draw.normal(1, 2, (4, 3, 5, 7))), np.float32(draw.normal(size=(2, 7)))
    figures = compare_norms(batches, masks, probe)

    def normalised(tokens):
        return (probe - tokens.mean(0)) / np.sqrt(tokens.var(0) + 1e-5)

    batch = np.stack([normalised(np.concatenate([x[m], probe])) for x, m in zip(batches, masks)])
    padding = np.zeros((3, 7))
    padded = np.stack([normalised(np.concatenate([x.reshape(-1, 7), probe, padding])) for x in batches])
    settled = normalised(batches[masks])
    for name, values in (("batch", batch), ("padded", padded)):
        np.testing.assert_allclose(getattr(figures, f"{name}_spread"), np.sqrt(values.var(0).mean()), rtol=1e-4)
        drift = np.sqrt(((values.mean(0) - settled) ** 2).mean())
        np.testing.assert_allclose(getattr(figures, f"{name}_drift"), drift, rtol=1e-3)
    assert figures.max_length == 5
    np.testing.assert_allclose(figures.real_share, masks.mean())


def test_batch_norm_moves_with_rows_and_padding_and_layer_norm_with_nothing():
    """More rows steady it, longer ones less than independent tokens would; padding shifts it whatever the sizes."""
    options = {"num_batches": 32, "dim": 6, "row_deviation": 1.0}
    short, long = vary_lengths(jax.random.key(0), max_lengths=(3, 24), batch_size=6, **options)
    (many,) = vary_lengths(jax.random.key(0), max_lengths=(24,), batch_size=48, **options)
    for figures in (short, long, many):
        assert figures.layer_spread < 1e-6
        assert figures.padded_drift > 4 * figures.batch_drift
    assert short.real_share > long.real_share
    assert many.batch_spread < long.batch_spread / 2
    # Eight times as many tokens would have about a third of the spread, were they independent.
    assert short.batch_spread / 2 < long.batch_spread < short.batch_spread
    lines = format_figures([short, long]).splitlines()
    assert lines[0].split()[:2] == ["max_length", "real_share"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "24"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3, 5, 7), (1, 3, 5), (2, 7)), "batches has shape .* must be .batches .2 or more., B, L, D"),
        (((2, 3, 5, 7), (2, 3, 4), (2, 7)), r"masks has shape \(2, 3, 4\); it must be \(2, 3, 5\)"),
        (((2, 3, 5, 7), (2, 3, 5), (6, 7)), r"probe has shape \(6, 7\); it must be \[1 to 5, 7\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    batches, masks, probe = shapes
    with pytest.raises(ValueError, match=message):
        compare_norms(np.zeros(batches, np.float32), np.ones(masks, bool), np.zeros(probe, np.float32))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        vary_lengths(jax.random.key(0), batch_size=0)
    with pytest.raises(ValueError, match=r"row_deviation=-1 and token_deviation=1\.0 must not be negative"):
        vary_lengths(jax.random.key(0), row_deviation=-1)
