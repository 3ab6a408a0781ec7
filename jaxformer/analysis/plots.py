"""Pictures of what is measured and computed: figures of runs, learning rates, patterns of attention, curves of cost.

    figure = plot_metrics({"dense": read_metrics("runs/dense/metrics.jsonl")})
    figure.savefig("curves.png")

Every function returns a `matplotlib.figure.Figure`, which `savefig` writes and a notebook shows (Jupyter: after
`%matplotlib inline` or an import of pyplot); nothing global is changed. They need matplotlib (extra `plots`), which is
imported only when one is called.
"""

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.analysis.cost import attention_cost
from jaxformer.attention.pattern_algebra import Pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL_METRICS = ("loss", "learning_rate", "gradient_norm")
"""Figures that are plotted where none are asked for, of those that a run has."""

QUANTITIES: dict[str, tuple[str, Callable[[Any], float | None]]] = {
    "operations": ("operations of a forward pass", lambda cost: cost.forward.total),
    "training": ("operations of forward and backward pass", lambda cost: cost.training.total),
    "temporary_bytes": ("bytes of temporaries, backward pass", lambda cost: cost.backward.temporary_bytes),
    "decode_bytes": (
        "bytes moved by a decoded token",
        lambda cost: None if cost.decode is None else cost.decode.moved_bytes,
    ),
    "cache_bytes": ("bytes of the decoding cache", lambda cost: cost.cache_bytes),
}
"""What `plot_costs` draws, by name: the axis's label, and the number of an `AttentionCost`."""


def require_matplotlib() -> None:
    """Refuses to go on without matplotlib.

    Raises:
      ImportError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install 'jaxformer[plots]'")


def new_figure(rows: int, columns: int, width: float = 5.0, height: float = 3.6) -> tuple["Figure", list[Any]]:
    """A figure with so many panels, as a flat list; sizes are a panel's, in inches.

    Raises:
      ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plot_metrics(
    runs: Mapping[str, Iterable[Mapping[str, Any]]], metrics: Sequence[str] | None = None, *, smoothing: int = 1
) -> "Figure":
    """Figures of one or several runs over steps, a panel for each figure and a colour for each run.

    Training is a line, every other split (validation, a bucket of it) has points on it.

    Args:
      runs: by label, the records of `metrics.jsonl` (`jaxformer.training.metrics.read_metrics`): mappings with `step`,
        `split` and figures; what is null is left out.
      metrics: names of figures (None = those of `USUAL_METRICS` that there are).
      smoothing: records over which a line of training is averaged, each with those before it; the rate is not.

    Returns:
      The figure.

    Raises:
      ValueError: no runs, a run without records, a name that no run has, or smoothing below 1.
      ImportError: matplotlib is not installed.
    """
    if not runs:
        raise ValueError("runs is empty; it must hold at least one run.")
    if smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; it must be at least 1 record.")
    tables = {label: _by_split(label, records) for label, records in runs.items()}
    known = sorted({name for table in tables.values() for series in table.values() for name in series})
    names = [name for name in USUAL_METRICS if name in known] if metrics is None else list(metrics)
    for name in names:
        if name not in known:
            raise ValueError(f"metrics has {name!r}, which no run has; it must be among {', '.join(known)}.")
    if not names:
        raise ValueError(f"metrics is empty; it must be among {', '.join(known)}.")
    columns = min(len(names), 3)
    figure, panels = new_figure(math.ceil(len(names) / columns), columns)
    for panel, name in zip(panels, names):
        for number, (label, table) in enumerate(tables.items()):
            _draw_run(panel, label if len(tables) > 1 else "", f"C{number % 10}", table, name, smoothing)
        panel.set(title=name.replace("_", " "), xlabel="step")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize="small")
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    return figure


Series = dict[str, dict[str, list[tuple[float, float]]]]
"""Pairs (step, number) by split and name of figure."""


def _by_split(label: str, records: Iterable[Mapping[str, Any]]) -> Series:
    series: Series = {}
    for record in records:
        split = series.setdefault(str(record.get("split", "train")), {})
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                split.setdefault(name, []).append((record["step"], value))
    if not any(series.values()):
        raise ValueError(f"run {label!r} has no figures to plot; it must have records with numbers.")
    return series


def _draw_run(panel: Any, label: str, colour: str, table: Series, name: str, smoothing: int) -> None:
    for split, series in table.items():
        if name not in series:
            continue
        steps, values = np.asarray(series[name], float).T
        words = " ".join(filter(None, (label, split)))
        if split == "train":
            averaged = values if name == "learning_rate" else _smooth(values, smoothing)
            panel.plot(steps, averaged, color=colour, linewidth=1.2, label=words)
        else:
            panel.plot(
                steps, values, color=colour, linewidth=0.8, linestyle="--", marker="o", markersize=4, label=words
            )


def _smooth(values: np.ndarray, count: int) -> np.ndarray:
    """The mean of each value and the `count` - 1 before it; of fewer at the beginning."""
    if count == 1:
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_schedules(schedules: Mapping[str, Callable[[int], Any]], num_steps: int, *, points: int = 400) -> "Figure":
    """Learning rates over steps.

    Args:
      schedules: by label, from a step (int, from 0) to its rate, as `jaxformer.training.schedules.make_schedule` makes.
      num_steps: steps that are shown.
      points: steps that are computed at most.

    Raises:
      ValueError: no schedules, or steps or points below 2.
      ImportError: matplotlib is not installed.
    """
    if not schedules:
        raise ValueError("schedules is empty; it must hold at least one.")
    for name, count in {"num_steps": num_steps, "points": points}.items():
        if count < 2:
            raise ValueError(f"{name} is {count}; it must be at least 2.")
    figure, (panel,) = new_figure(1, 1, 6.5)
    steps = np.unique(np.linspace(0, num_steps - 1, min(points, num_steps)).round().astype(int))
    for label, schedule in schedules.items():
        panel.plot(steps, [float(schedule(int(step))) for step in steps], label=label)
    panel.set(xlabel="step", ylabel="learning rate")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    return figure


def plot_patterns(patterns: Mapping[str, Pattern | np.ndarray], length: int = 64, *, causal: bool = False) -> "Figure":
    """Who sees whom: a picture for each pattern, queries downwards and keys to the right.

    Args:
      patterns: by label, patterns of `jaxformer.attention.patterns`, or matrices [queries, keys] of masks or weights.
      length: tokens, of patterns.
      causal: patterns show earlier keys only.

    Raises:
      ValueError: no patterns, or what is no matrix.
      ImportError: matplotlib is not installed.
    """
    if not patterns:
        raise ValueError("patterns is empty; it must hold at least one.")
    columns = min(len(patterns), 4)
    figure, panels = new_figure(math.ceil(len(patterns) / columns), columns, 2.8, 3.0)
    for panel, (label, pattern) in zip(panels, patterns.items()):
        if isinstance(pattern, Pattern):
            matrix = pattern.mask(length)
            matrix = np.tril(matrix) if causal else matrix
        else:
            matrix = np.asarray(pattern)
        if matrix.ndim != 2:
            raise ValueError(f"pattern {label!r} has shape {matrix.shape}; it must be [queries, keys].")
        panel.imshow(matrix, cmap="Blues", interpolation="nearest", vmin=0)
        panel.set(title=label, xlabel="key", ylabel="query")
    for panel in panels[len(patterns) :]:
        panel.set_axis_off()
    return figure


def plot_costs(
    kinds: Mapping[str, tuple[str, Mapping[str, Any]]],
    lengths: Sequence[int],
    quantity: str = "operations",
    *,
    num_heads: int = 8,
    head_dim: int = 64,
    causal: bool = False,
) -> "Figure":
    """What kinds of attention cost at growing lengths, by formula, on logarithmic axes.

    Args:
      kinds: by label, a name of `ATTENTION` or `PATTERNS` and the arguments that `attention_cost` takes for it.
      lengths: in tokens, growing.
      quantity: a name of `QUANTITIES`; a kind that has none, as of a cache where it can't decode, is left out.
      num_heads, head_dim, causal: as in `attention_cost`.

    Raises:
      ValueError: no kinds or lengths, an unknown quantity, or what `attention_cost` refuses.
      ImportError: matplotlib is not installed.
    """
    if not kinds or not lengths:
        raise ValueError(f"kinds has {len(kinds)} entries and lengths {len(lengths)}; both must have at least one.")
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity is {quantity!r}; it must be one of {', '.join(QUANTITIES)}.")
    label, number = QUANTITIES[quantity]
    curves = {}
    for name, (kind, arguments) in kinds.items():
        costs = [attention_cost(kind, 1, length, num_heads, head_dim, causal=causal, **arguments) for length in lengths]
        curves[name] = [number(cost) for cost in costs]
    known: dict[str, Sequence[float | None]] = {name: values for name, values in curves.items() if None not in values}
    return plot_curves(known, lengths, xlabel="length in tokens", ylabel=label)


def plot_curves(
    curves: Mapping[str, Sequence[float | None]], lengths: Sequence[float], *, xlabel: str, ylabel: str
) -> "Figure":
    """Positive numbers over lengths on logarithmic axes; None leaves a gap.

    Raises:
      ValueError: no curve, or one of another number of values than there are lengths.
      ImportError: matplotlib is not installed.
    """
    if not curves:
        raise ValueError("curves is empty; it must hold at least one.")
    figure, (panel,) = new_figure(1, 1, 6.5, 4.2)
    draw_curves(panel, curves, lengths, xlabel=xlabel, ylabel=ylabel)
    panel.legend(fontsize="small")
    return figure


def draw_curves(
    panel: Any,
    curves: Mapping[str, Sequence[float | None]],
    lengths: Sequence[float],
    *,
    xlabel: str,
    ylabel: str,
    yscale: str = "log",
) -> None:
    """The same in a panel of a figure, without a legend; `yscale` is Matplotlib's: log or linear."""
    for label, values in curves.items():
        if len(values) != len(lengths):
            raise ValueError(f"curve {label!r} has {len(values)} values; it must have {len(lengths)}, one a length.")
        panel.plot(lengths, [math.nan if value is None else value for value in values], marker="o", label=label)
    panel.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale=yscale)
    panel.set_xticks(list(lengths), [f"{length:,}" for length in lengths])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
