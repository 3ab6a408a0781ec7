"""Paths of every optimizer on the classic surfaces, against steps written by hand and against what theory says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import SURFACES, plot_trajectories
from jaxformer.training.optimizers import OPTIMIZERS
from jaxformer.training.trajectories import RATES, every_trajectory, named_trajectory, trajectories_over

STEPS = 300


@functools.cache
def paths_on(surface):
    return jax.tree.map(np.asarray, every_trajectory(surface, steps=STEPS))


@pytest.mark.parametrize("surface", list(SURFACES.values()), ids=list(SURFACES))
def test_minima_are_where_the_gradient_is_zero_and_nothing_near_is_lower(surface):
    points = np.random.default_rng(0).normal(0, 0.3, (50, 2)).astype(np.float32)
    minima = jnp.asarray(surface.minima)
    evaluate = jax.jit(lambda point, near: (jax.grad(surface.function)(point), jax.vmap(surface.function)(near)))
    for minimum in minima:
        slope, heights = evaluate(minimum, jnp.concatenate([minimum[None], minimum[None] + points]))
        np.testing.assert_allclose(slope, 0.0, atol=1e-5)
        assert np.all(heights >= heights[0])
    np.testing.assert_allclose(surface.distance(minima), 0.0)
    assert surface.distance(jnp.asarray(surface.start)) > 1.0


@pytest.mark.parametrize("name", ["valley", pytest.param("saddle", marks=pytest.mark.slow)])
def test_every_optimizer_comes_near_a_minimum(name):
    paths, surface = paths_on(name), SURFACES[name]
    assert set(paths) == set(OPTIMIZERS)
    for optimizer, points in paths.items():
        assert points.shape == (STEPS + 1, 2)
        np.testing.assert_array_equal(points[0], np.float32(surface.start))
        assert surface.distance(points[-1]) < 0.15, optimizer


@pytest.mark.slow
def test_every_optimizer_goes_down_the_bent_valley():
    surface = SURFACES["rosenbrock"]
    for optimizer, points in paths_on("rosenbrock").items():
        first, last = jax.vmap(surface.function)(jnp.asarray(points[np.array([0, -1])]))
        assert last < 0.3 * first, optimizer


def test_gradient_descent_shrinks_each_axis_by_its_own_factor():
    factors = 1.0 - RATES["valley"]["sgd"] * np.array([1.0, 20.0])
    wanted = np.asarray(SURFACES["valley"].start) * factors ** np.arange(STEPS + 1)[:, None]
    np.testing.assert_allclose(paths_on("valley")["sgd"], wanted, rtol=1e-4, atol=1e-5)


def test_the_first_step_of_rmsprop_is_longer_the_longer_it_remembers():
    """Its average begins at 0: rate / sqrt(1 - b2) along each axis; without memory every step is one rate."""
    values = (0.0, 0.75, 0.99)
    paths = trajectories_over("valley", "rmsprop", "b2", values, learning_rate=0.01, steps=5)
    first = np.abs(np.asarray(paths[:, 1] - paths[:, 0]))
    np.testing.assert_allclose(first, 0.01 / np.sqrt(1 - np.array(values))[:, None] * np.ones((1, 2)), rtol=1e-4)
    np.testing.assert_allclose(np.abs(np.diff(paths[0], axis=0)), 0.01, rtol=1e-4)


def test_adam_overshoots_more_the_longer_its_first_moment_remembers():
    values = (0.0, 0.9, 0.97)
    paths = trajectories_over("valley", "adam", "b1", values, learning_rate=0.1, steps=STEPS)
    np.testing.assert_allclose(np.abs(paths[:, 1] - paths[:, 0]), 0.1, rtol=1e-4)
    beyond = np.asarray(paths[:, :, 0]).max(1)
    assert beyond[0] < beyond[1] < beyond[2]
    alone = named_trajectory("valley", "adam", learning_rate=0.1, steps=STEPS)
    np.testing.assert_allclose(paths[1], alone, atol=1e-4)


def test_paths_are_drawn_over_the_surface():
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is optional").use("Agg")
    axes = plot_trajectories("saddle", {"still": jnp.zeros((3, 2)), "there": jnp.ones((3, 2))}, resolution=11)
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["still", "there"]
    assert axes.get_title() == "saddle"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: every_trajectory("hill"), "surface is 'hill'"),
        (lambda: named_trajectory("hill", "sgd", learning_rate=0.1, steps=3), "surface is 'hill'"),
        (lambda: named_trajectory("valley", "sgd", learning_rate=0.1, steps=0), "steps is 0"),
        (lambda: named_trajectory("valley", "walk", learning_rate=0.1, steps=1), "'walk'"),
        (
            lambda: named_trajectory("valley", "sgd", learning_rate=0.1, steps=1, settings={"b2": 0.9}),
            "settings has b2, must be of optimizer 'sgd'",
        ),
        (lambda: trajectories_over("valley", "adam", "b2", (), learning_rate=0.1, steps=1), "values is empty"),
        (lambda: plot_trajectories("valley", {}), "paths is empty"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
