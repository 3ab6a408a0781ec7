"""Evaluate a run's model on its validation data, or on other data.

jaxformer eval --workdir=runs/a
jaxformer eval --workdir=runs/a --config.data.name=text --config.data.path=book.txt
"""

import argparse

SUMMARY = "evaluate a run's model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")
    parser.add_argument("--config.data.b", metavar="v", dest="_", help="set a field of data, eval or mesh; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Evaluates, and prints the figures."""
    from jaxformer.cli.output import print_result
    from jaxformer.training.finished import evaluate_run

    print_result(evaluate_run(arguments.workdir, arguments.overrides, arguments.step))
