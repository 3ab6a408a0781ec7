"""Plot the figures of one or several runs over their steps.

    jaxformer plot --workdir=runs/a --workdir=runs/b --output=curves.png
    jaxformer plot --workdir=runs/a --metrics=loss,tokens_per_second --smoothing=20 --output=curves.svg

Needs matplotlib: pip install 'jaxformer[plots]'.
"""

import argparse

SUMMARY = "plot figures of runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", action="append", required=True, help="run directory; repeatable")
    parser.add_argument("--output", metavar="F", required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--metrics", metavar="A[,B]", help="figures of metrics.jsonl (loss, learning_rate, …)")
    parser.add_argument("--smoothing", type=int, default=1, metavar="N", help="records averaged in training (1)")


def run(arguments: argparse.Namespace) -> None:
    """Plots, and tells where."""
    import sys

    from jaxformer.training.plotting import plot_runs

    metrics = arguments.metrics.split(",") if arguments.metrics else None
    plot_runs(arguments.workdir, arguments.output, metrics=metrics, smoothing=arguments.smoothing)
    print(f"{len(arguments.workdir)} runs in {arguments.output}", file=sys.stderr)
