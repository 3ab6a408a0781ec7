"""Separability of grids: surfaces whose shape is known."""

import numpy as np
import pytest

from jaxformer.analysis.grids import read_grid, separability

RATES = [1e-3, 1e-2, 1e-1, 1.0, 10.0]
X = np.log10(RATES)[:, None] + 1.0  # -2 … 2
Y = np.log10(RATES)[None, :] + 1.0


def test_a_round_bowl_is_separable():
    measures = separability(X**2 + Y**2, RATES, RATES)
    assert measures.best == (2, 2)
    assert measures.correlation == pytest.approx(0.0, abs=1e-9)
    assert measures.tuning_gap == 0.0
    assert measures.additive_share == pytest.approx(1.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_diagonal_valley_is_not(sign):
    losses = (X - sign * Y) ** 2 + 0.01 * (X + sign * Y) ** 2
    measures = separability(losses, RATES, RATES)
    assert measures.best == (2, 2)
    assert measures.correlation == pytest.approx(sign, abs=0.2)
    # Beginning at row i the best column is the same place on the diagonal, and the best row there row i again.
    assert measures.tuning_gap == pytest.approx(np.mean(0.01 * (2 * X) ** 2))
    # (x - sy)² + 0.01 (x + sy)² = 1.01 (x² + y²) - 1.98 s x y, whose product is the part that does not add.
    product = np.square(1.98 * X * Y).sum()
    total = np.square(losses - losses.mean()).sum()
    assert measures.additive_share == pytest.approx(1.0 - product / total)


def test_runs_that_diverged_count_as_the_worst():
    losses = X**2 + Y**2
    losses[4, 4] = np.nan
    assert separability(losses, RATES, RATES) == separability(X**2 + Y**2, RATES, RATES)
    capped = np.minimum(X**2 + Y**2, 5.0)
    assert separability(losses, RATES, RATES, worst=5.0) == separability(capped, RATES, RATES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 3)), [1, 2], [1, 2]), "columns has 2 values, must be the 3 of losses"),
        ((np.zeros((1, 3)), [1], [1, 2, 3]), "rows has 1 values, .* at least 2"),
        ((np.zeros((2, 2)), [0.0, 2], [1, 2]), "rows is .* must be above 0 and ascending"),
        ((np.zeros((2, 2)), [1, 2], [2, 2]), "columns is .* ascending"),
        ((np.full((2, 2), np.nan), [1, 2], [1, 2]), "losses has no finite value"),
    ],
)
def test_bad_grids_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        separability(*arguments)


def test_a_sweep_s_table_becomes_a_plane_for_each_seed(tmp_path):
    head = "run,optimizer.learning_rate,optimizer.weight_decay,seed,status,step,train_loss,validation_loss,seconds\n"
    cells = [(1e-2, 0.1, 0, "3.5"), (1e-3, 0.1, 0, "3.25"), (1e-2, 1.0, 1, ""), (1e-3, 1.0, 1, "2.5")]
    lines = [f"r,{rate},{decay},{seed},completed,9,1.0,{loss},2.0\n" for rate, decay, seed, loss in cells]
    (tmp_path / "sweep.csv").write_text(head + "".join(lines))
    grid = read_grid(tmp_path)
    assert grid.rows == (1e-3, 1e-2)
    assert grid.columns == (0.1, 1.0)
    assert grid.others == ({"seed": "0"}, {"seed": "1"})
    nan = np.nan
    np.testing.assert_array_equal(grid.losses, [[[3.25, nan], [3.5, nan]], [[nan, 2.5], [nan, nan]]])
    with pytest.raises(ValueError, match=r"value is 'loss', must be a column of .*: run, optimizer\.learning_rate"):
        read_grid(tmp_path / "sweep.csv", value="loss")
