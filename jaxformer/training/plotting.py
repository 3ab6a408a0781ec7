"""Figures of finished and running runs as a picture in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformer.analysis.plots import plot_metrics, require_matplotlib
from jaxformer.training.metrics import read_metrics
from jaxformer.training.run_directory import RunDirectory, RunDirectoryError

PICTURES = (".png", ".svg", ".pdf")


def plot_runs(
    workdirs: Sequence[str | Path], output: str | Path, *, metrics: Sequence[str] | None = None, smoothing: int = 1
) -> None:
    """Draws the metrics of run directories into a file, by the shortest part of their paths that tells them apart.

    Args:
      workdirs: run directories.
      output: a file whose name ends as one of `PICTURES`.
      metrics: names of figures (None = loss, learning rate and gradient norm).
      smoothing: records over which lines of training are averaged.

    Raises:
      RunDirectoryError: a folder that holds no metrics.
      ValueError: a name that no run has, a directory given twice, or a file that cannot be written.
      ImportError: matplotlib is not installed.
    """
    check_picture(output)
    paths = [Path(workdir) for workdir in workdirs]
    runs = {}
    for label, path in zip(tell_apart(paths), paths):
        records = list(read_metrics(RunDirectory(path).metrics))
        if not records:
            raise RunDirectoryError(f"workdir {path} holds no metrics: nothing was trained there")
        runs[label] = records
    save_picture(plot_metrics(runs, metrics, smoothing=smoothing), output)


def check_picture(output: str | Path) -> None:
    """Refuses, before anything is computed, a picture that cannot be drawn or written.

    Raises:
      ValueError: its name or its folder.
      ImportError: matplotlib is not installed.
    """
    path = Path(output)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"output is {path.name!r}; its name must end in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"output {path}: there is no folder {path.parent}")
    require_matplotlib()


def save_picture(figure: Any, output: str | Path) -> None:
    """Writes a figure.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise ValueError(f"output {output} cannot be written: {error.strerror or error}") from error


def tell_apart(paths: Sequence[Path]) -> list[str]:
    """As many last parts of each path as it takes to tell all of them apart.

    Raises:
      ValueError: two are the same.
    """
    parts = [path.absolute().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError(f"workdirs are {', '.join(map(str, paths))}; each must be given once")
    for count in range(1, max(map(len, parts), default=1) + 1):
        labels = ["/".join(own[-count:]) for own in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError(parts)
