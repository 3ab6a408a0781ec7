"""Evaluate a run's model on its validation data, or on other data.

jaxformer eval --workdir=runs/a
jaxformer eval --workdir=runs/a --config.data.name=text --config.data.path=book.txt
jaxformer eval --workdir=runs/translation --config.eval.num_beams=5
jaxformer eval --workdir=runs/duplicate --attention=lsh:num_hashes=8,num_buckets=16,chunk_size=8 --attention_seed=1
"""

import argparse

SUMMARY = "evaluate a run's model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--workdir", metavar="D", required=True, help="run directory")
    parser.add_argument("--step", default="latest", metavar="N", help="which checkpoint: latest, best or a number")
    parser.add_argument("--attention", metavar="A[:a=v]", help="another attention with the same parameters")
    parser.add_argument("--attention_seed", type=int, default=0, metavar="S", help="of what that draws (0)")
    parser.add_argument("--config.data.b", metavar="v", dest="_", help="set a field of data, eval or mesh; repeatable")
    parser.set_defaults(takes_overrides=True)


def run(arguments: argparse.Namespace) -> None:
    """Evaluates, and prints the figures."""
    from jaxformer.cli.output import print_result
    from jaxformer.training.finished import evaluate_run

    values = (arguments.overrides, arguments.step, arguments.attention, arguments.attention_seed)
    print_result(evaluate_run(arguments.workdir, *values))
